"""What the launch told this rank's `Accelerator()`: arguments that it takes where the function passes none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

ACCELERATOR_ARGUMENTS = (
    "device_placement",
    "split_batches",
    "gradient_accumulation_steps",
    "dataloader_config",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "rng_types",
    "log_with",
    "project_dir",
    "project_config",
    "gradient_accumulation_plugin",
    "step_scheduler_with_optimizer",
    "kwargs_handlers",
    "dynamo_backend",
    "dynamo_plugin",
    "deepspeed_plugins",
    "parallelism_config",
)
"""Arguments of `Accelerator` that a launch can give; `mixed_precision` and `cpu` are settings of the launch itself."""
_STRATEGIES = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
# Two ways to say one thing: who says it in one way does not get the other from the launch.
_INSTEAD = (
    {"gradient_accumulation_steps", "gradient_accumulation_plugin"},
    {"dynamo_backend", "dynamo_plugin"},
    {"split_batches", "dataloader_config"},
    {"project_dir", "project_config"},
    {*_STRATEGIES, "torch_tp_plugin", "parallelism_config"},
)
_told: dict[str, Any] = {}
_Init = TypeVar("_Init", bound=Callable[..., None])


def check_accelerator_arguments(given: Any) -> None:
    """Check what a launch is to give to every `Accelerator()`.

    Args:
        given: Arguments by name; None for none.

    Raises:
        ValueError: It is no mapping, names what `Accelerator` does not take, or two ways to train.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ValueError(
            f"accelerator={given!r} is not allowed; pass the arguments of Accelerator by name, as in "
            'LaunchConfig(accelerator={"fsdp_plugin": FullyShardedDataParallelPlugin()})'
        )
    for name in given:
        if name in ("mixed_precision", "cpu"):
            raise ValueError(f"accelerator={{{name!r}: ...}}: write LaunchConfig({name}={given[name]!r}) instead")
        if name not in ACCELERATOR_ARGUMENTS:
            known = ", ".join(ACCELERATOR_ARGUMENTS)
            raise ValueError(f"accelerator={{{name!r}: ...}}: Accelerator has no such argument; it has {known}")
    chosen = [name for name in _STRATEGIES if given.get(name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"accelerator has {' and '.join(chosen)}, which contradict each other; pass one of them")


def tell(given: Mapping[str, Any] | None) -> None:
    """Set what every `Accelerator()` of this process takes where it is not passed another value.

    Args:
        given: Arguments by name; None for none.
    """
    _told.clear()
    _told.update(given or {})


@contextmanager
def told(given: Mapping[str, Any] | None) -> Iterator[None]:
    """As `tell`, inside a block.

    Args:
        given: Arguments by name; None for none.

    Yields:
        Nothing.
    """
    before = dict(_told)
    tell(given)
    try:
        yield
    finally:
        tell(before)


def takes_what_the_launch_told(init: _Init) -> _Init:
    """Make a constructor take the launch's arguments where it is passed none.

    Args:
        init: The constructor of `Accelerator`.

    Returns:
        One with the same signature.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if _told:
            passed = {*names[: len(args)], *kwargs}
            said = passed.union(*(group for group in _INSTEAD if group & passed))
            kwargs = {**{name: value for name, value in _told.items() if name not in said}, **kwargs}
        init(self, *args, **kwargs)

    return cast("_Init", wrapped)


__all__ = ["ACCELERATOR_ARGUMENTS", "check_accelerator_arguments", "takes_what_the_launch_told", "tell", "told"]
