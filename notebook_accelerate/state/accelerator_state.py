"""The state of the current `Accelerator` (precision and plugins), and functions that reset a process's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType, PrecisionType
from notebook_accelerate.state import partial_state, process_group
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.parallel_layout import arrange_ranks, offloads_gradients, plugins_from_environ
from notebook_accelerate.state.partial_state import PartialState, SharedDict, Slots
from notebook_accelerate.state.warn_once import reset_warnings, warn_once

if TYPE_CHECKING:
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
    from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
    from notebook_accelerate.config.parallelism_config import TorchTensorParallelPlugin


# The distributed type that each plugin implies.
_TYPE_OF_PLUGIN = {
    "deepspeed_plugins": DistributedType.DEEPSPEED,
    "fsdp_plugin": DistributedType.FSDP,
    "megatron_lm_plugin": DistributedType.MEGATRON_LM,
}


class AcceleratorState(PartialState):
    """`PartialState` plus precision and plugins. All instances share one dictionary per process.

    Creating another instance with different settings changes the shared settings, and a warning lists the changes.
    Settings that are not passed stay the same, and objects that have already been prepared keep working as before.

    Args:
        mixed_precision: The precision: no, fp16, bf16 or fp8. If None, the value of ACCELERATE_MIXED_PRECISION is used,
            or no if the variable is not set.
        cpu: Whether to use the CPU.
        dynamo_plugin: How models are compiled (`TorchDynamoPlugin`).
        deepspeed_plugin: A `DeepSpeedPlugin`, or a dict of several plugins by name. The first one is active.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        parallelism_config: The parallel layout (`ParallelismConfig`).
        _from_accelerator: Whether an `Accelerator` is creating this object.
        kwargs: Arguments for `torch.distributed.init_process_group`.

    Attributes:
        dynamo_plugin: How models are compiled, or None if they are not compiled.
        fsdp_plugin: The active FSDP plugin, or None if FSDP is not used.
        parallelism_config: The parallel layout, or None if ranks only use data parallelism.
        device_mesh: The device mesh of the parallel layout, or None if there is no layout.
    """

    _shared_state: ClassVar[Slots] = SharedDict()

    _mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin | None
    fork_launched: bool
    fsdp_plugin: Any
    torch_tp_plugin: TorchTensorParallelPlugin | None
    megatron_lm_plugin: MegatronLMPlugin | None
    parallelism_config: Any
    deepspeed_plugins: dict[str, DeepSpeedPlugin] | None
    device_mesh: Any
    use_ipex: bool

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        requested = {
            "_mixed_precision": check_precision(mixed_precision),
            "dynamo_plugin": dynamo_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
            "deepspeed_plugins": _by_name(deepspeed_plugin),
        }
        if not self._shared_state:
            requested |= plugins_from_environ(requested)
        if offloads_gradients(requested):
            kwargs["with_cpu"] = True
        if not self._shared_state:
            self._fill(PartialState(cpu, **kwargs), requested)
        elif cpu or kwargs or any(value is not None for value in requested.values()):
            self._apply_settings(PartialState(cpu, **kwargs), requested)

    def __repr__(self) -> str:
        plugins = f"DeepSpeed plugins: {self.deepspeed_plugins}\n" if self.deepspeed_plugins else ""
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n{plugins}"

    def _fill(self, partial: PartialState, requested: Slots) -> None:
        if requested["_mixed_precision"] is None:
            requested = {**requested, "_mixed_precision": precision_from_environ()}
        _deciding_plugin(requested)
        self._arrange({**partial.__dict__, "device_mesh": None, "use_ipex": False, **requested})

    def _apply_settings(self, partial: PartialState, requested: Slots) -> None:
        new = {name: value for name, value in requested.items() if value is not None}
        if kind := _deciding_plugin(new):
            new |= {name: None for name in _TYPE_OF_PLUGIN if name != kind and self.__dict__.get(name) is not None}
        before = {name: self.__dict__.get(name) for name in ("device", *new)}
        self._arrange({**self.__dict__, **partial.__dict__, **new})
        changes = [_describe_change(name, old, self.__dict__[name]) for name, old in before.items()]
        if any(changes):
            warn_once(
                f"this Accelerator changes the shared state: {', '.join(filter(None, changes))}; "
                "objects prepared by an earlier Accelerator stay as they were prepared"
            )

    def _arrange(self, settings: Slots) -> None:
        settings |= arrange_ranks(settings)
        kind = _deciding_plugin(settings)
        self.__dict__.update(settings)
        self.distributed_type = _TYPE_OF_PLUGIN.get(kind) or PartialState().distributed_type

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the shared dictionary, so that the next instance reads the environment again.

        Args:
            reset_partial_state: Whether to reset `PartialState`, too.
        """
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8. Unless it is fp8, a DeepSpeed configuration takes precedence."""
        enabled = None if self.deepspeed_plugin is None else self.deepspeed_plugin.precision
        return self._mixed_precision if enabled is None or self._mixed_precision == "fp8" else str(enabled)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin, or None if DeepSpeed is not used."""
        plugins = self.deepspeed_plugins or {}
        return next((plugin for plugin in plugins.values() if getattr(plugin, "selected", True)), None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP 2."""
        return self.distributed_type == DistributedType.FSDP and self.fsdp_plugin.fsdp_version == 2

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the DeepSpeed plugin with this name.

        Args:
            name: The key of the plugin in the dict that was passed to the `Accelerator`.

        Returns:
            The plugin, which need not be the active one.

        Raises:
            ValueError: No plugin has that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            known = ", ".join(map(repr, plugins)) or "none"
            raise ValueError(f"no DeepSpeed plugin is named {name!r}; known: {known}")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin with this name the active one.

        Args:
            name: The key of the plugin in the dict that was passed to the `Accelerator`.

        Raises:
            ValueError: No plugin has that name.
        """
        chosen = self.get_deepspeed_plugin(name or "")
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)


def is_initialized() -> bool:
    """Return whether this process has created an `AcceleratorState`."""
    return bool(AcceleratorState._shared_state)


def check_precision(name: Any) -> str | None:
    """Check and normalise the name of a precision.

    Args:
        name: A name, a `PrecisionType`, or None.

    Returns:
        The name in lower case, or None.

    Raises:
        ValueError: The precision is unknown.
    """
    if name is None:
        return None
    text = str(getattr(name, "value", name)).lower()
    allowed = [member.value for member in PrecisionType]
    if text not in allowed:
        raise ValueError(f"mixed_precision={name!r} is not known; pass one of {', '.join(map(repr, allowed))}")
    return text


def precision_from_environ() -> str:
    """Return the precision that the launch has set in ACCELERATE_MIXED_PRECISION, or "no" if the launch set none."""
    return check_precision(environ.text("ACCELERATE_MIXED_PRECISION")) or "no"


def _find_precision() -> str:
    """Return the precision of the `AcceleratorState`. Without one, read it from the environment."""
    return AcceleratorState().mixed_precision if AcceleratorState._shared_state else precision_from_environ()


partial_state.find_precision = _find_precision


def _by_name(plugin: Any) -> dict[str, Any] | None:
    """Return DeepSpeed plugins by name, and make sure that one of them is selected."""
    if plugin is None:
        return None
    plugins: dict[str, Any] = plugin if isinstance(plugin, dict) else {"default": plugin}
    if wrong := [type(item).__name__ for item in plugins.values() if not hasattr(item, "deepspeed_config")]:
        raise ValueError(f"deepspeed_plugin is a {wrong[0]}; pass a DeepSpeedPlugin, or a dict of plugins by name")
    if not plugins:
        raise ValueError("deepspeed_plugin={} contains no plugin; pass a DeepSpeedPlugin, or a dict of plugins by name")
    if not any(item.selected for item in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins


def _deciding_plugin(slots: Slots) -> str:
    """Return the name of the plugin that determines the distributed type, or "" if there is no such plugin.

    Raises:
        ValueError: Several plugins determine the type, and therefore contradict each other.
    """
    given = [name for name in _TYPE_OF_PLUGIN if slots.get(name) is not None]
    if len(given) > 1:
        shown = " and ".join(name.removesuffix("s") for name in given)
        raise ValueError(
            f"{shown} contradict each other: a model is trained by one of them; omit the others (variables such as "
            "ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP request a plugin, too)"
        )
    return given[0] if given else ""


def _describe_change(name: str, old: Any, new: Any) -> str:
    if old is new or old == new:
        return ""
    kinds = (str, torch.device, type(None))
    shown = [str(value) if isinstance(value, kinds) else type(value).__name__ for value in (old, new)]
    return f"{name.lstrip('_')} from {shown[0]} to {shown[1]}"


# ---- resetting the state, so that new workers and inline runs start afresh


def reset_shared_state() -> None:
    """Clear this process's state, so that the next `Accelerator` or `PartialState` reads the environment again.

    A process group that this process has started is destroyed. A group that was inherited in a fork is only dropped,
    because its threads and sockets belong to the parent.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    # Start a new dictionary instead of clearing the old one, which objects that have already been prepared keep.
    GradientState._shared_state = {}
    process_group.forget_group()
    reset_warnings()


def replace_shared_state(with_: tuple[Slots, Slots, Slots] | None = None) -> tuple[Slots, Slots, Slots]:
    """Replace the dictionaries of the state classes. Existing objects keep the previous dictionaries.

    Args:
        with_: The dictionaries of `PartialState`, `AcceleratorState` and `GradientState`. If None, they are new and
            empty.

    Returns:
        The previous dictionaries.
    """
    before = PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state
    after = with_ or (SharedDict(), SharedDict(), SharedDict())
    PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state = after
    return before


def start_afresh() -> None:
    """Discard the state of an inline run that was the first to import this package."""
    process_group.end_group_of_one()
    replace_shared_state()


@contextmanager
def isolated_shared_state() -> Iterator[None]:
    """Give a run its own state inside the block, and restore this process's state afterwards."""
    had_group = process_group.group_exists()
    before = replace_shared_state()
    try:
        yield
    finally:
        if not had_group:
            process_group.end_group()
        replace_shared_state(before)
