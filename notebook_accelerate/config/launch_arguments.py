"""Arguments that a launch gives to every `Accelerator()` of its ranks; arguments passed in the function win."""

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
# Arguments that set the same thing: passing one of a group keeps out the group's others from the launch.
_ALTERNATIVES = (
    {"gradient_accumulation_steps", "gradient_accumulation_plugin"},
    {"dynamo_backend", "dynamo_plugin"},
    {"split_batches", "dataloader_config"},
    {"project_dir", "project_config"},
    {*_STRATEGIES, "torch_tp_plugin", "parallelism_config"},
)
_from_launch: dict[str, Any] = {}
_Init = TypeVar("_Init", bound=Callable[..., None])


def check_accelerator_arguments(given: Any) -> None:
    """Check the arguments that a launch gives to every `Accelerator()`.

    Args:
        given: Arguments by name; None: no arguments.

    Raises:
        ValueError: It is not a mapping, has a name that is not an argument of `Accelerator`, or selects two strategies.
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


def set_launch_arguments(given: Mapping[str, Any] | None) -> None:
    """Set the arguments that every `Accelerator()` of this process takes where the function passes none.

    Args:
        given: Arguments by name; None: no arguments.
    """
    _from_launch.clear()
    _from_launch.update(given or {})


@contextmanager
def launch_arguments_set(given: Mapping[str, Any] | None) -> Iterator[None]:
    """Set the arguments as `set_launch_arguments` does, inside a with block.

    Args:
        given: Arguments by name; None: no arguments.

    Yields:
        Nothing.
    """
    before = dict(_from_launch)
    set_launch_arguments(given)
    try:
        yield
    finally:
        set_launch_arguments(before)


def takes_launch_arguments(init: _Init) -> _Init:
    """Make a constructor take the launch's arguments where the caller passes none.

    Args:
        init: The constructor of `Accelerator`.

    Returns:
        The constructor with the same signature.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if _from_launch:
            passed = {*names[: len(args)], *kwargs}
            settled = passed.union(*(group for group in _ALTERNATIVES if group & passed))
            kwargs = {**{name: value for name, value in _from_launch.items() if name not in settled}, **kwargs}
        init(self, *args, **kwargs)

    return cast("_Init", wrapped)
