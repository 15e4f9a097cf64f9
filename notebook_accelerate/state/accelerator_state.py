"""`AcceleratorState`: `PartialState` plus the precision and plugins of the current `Accelerator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType, PrecisionType
from notebook_accelerate.state.parallel_layout import arrange_ranks, offloads_gradients, plugins_from_environ
from notebook_accelerate.state.partial_state import PartialState
from notebook_accelerate.state.shared_dict import SharedDict, Slots
from notebook_accelerate.state.warn_once import warn_once

# The distributed type that a plugin implies.
_TYPE_OF_PLUGIN = {
    "deepspeed_plugins": DistributedType.DEEPSPEED,
    "fsdp_plugin": DistributedType.FSDP,
    "megatron_lm_plugin": DistributedType.MEGATRON_LM,
}


if TYPE_CHECKING:
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
    from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
    from notebook_accelerate.config.parallelism_plugins import TorchTensorParallelPlugin


class AcceleratorState(PartialState):
    """`PartialState` plus precision and plugins. All instances share one dictionary per process.

    A later instance with other settings changes them, with one warning that lists the changes. Other settings stay, and
    objects prepared before keep working as they were prepared.

    Args:
        mixed_precision: no, fp16, bf16 or fp8; None means ACCELERATE_MIXED_PRECISION, or no.
        cpu: Use the CPU.
        dynamo_plugin: How models are compiled (`TorchDynamoPlugin`).
        deepspeed_plugin: A `DeepSpeedPlugin`, or several by name; the first one is active.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        parallelism_config: A `ParallelismConfig`.
        _from_accelerator: Whether an `Accelerator` creates it.
        kwargs: Arguments of `torch.distributed.init_process_group`.

    Attributes:
        dynamo_plugin: How models are compiled; None: they are not.
        fsdp_plugin: The active FSDP plugin; None: not used.
        parallelism_config: The parallel layout; None: data parallel only.
        device_mesh: The mesh of ranks of the parallel layout; None without one.
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
        """Clear the shared dictionary; the next instance reads the environment again.

        Args:
            reset_partial_state: Also reset `PartialState`.
        """
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8; that of a DeepSpeed configuration takes precedence."""
        enabled = None if self.deepspeed_plugin is None else self.deepspeed_plugin.precision
        return self._mixed_precision if enabled is None or self._mixed_precision == "fp8" else str(enabled)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin; None without one."""
        plugins = self.deepspeed_plugins or {}
        return next((plugin for plugin in plugins.values() if getattr(plugin, "selected", True)), None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP's second version."""
        return self.distributed_type == DistributedType.FSDP and self.fsdp_plugin.fsdp_version == 2

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the DeepSpeed plugin of that name.

        Args:
            name: Its key in the dict that was passed to the `Accelerator`.

        Returns:
            The plugin.

        Raises:
            ValueError: No plugin has that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            known = ", ".join(map(repr, plugins)) or "none"
            raise ValueError(f"no DeepSpeed plugin is named {name!r}; known: {known}")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin of that name the active one.

        Args:
            name: Its key in the dict that was passed to the `Accelerator`.

        Raises:
            ValueError: No plugin has that name.
        """
        chosen = self.get_deepspeed_plugin(name or "")
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)


def check_precision(name: Any) -> str | None:
    """Check and normalise the name of a precision.

    Args:
        name: A name or a `PrecisionType`, or None.

    Returns:
        The name in lower case, or None.

    Raises:
        ValueError: There is no such precision.
    """
    if name is None:
        return None
    text = str(getattr(name, "value", name)).lower()
    allowed = [member.value for member in PrecisionType]
    if text not in allowed:
        raise ValueError(f"mixed_precision={name!r} is not known; pass one of {', '.join(map(repr, allowed))}")
    return text


def precision_from_environ() -> str:
    """Return the launch's precision (ACCELERATE_MIXED_PRECISION), or no."""
    return check_precision(environ.text("ACCELERATE_MIXED_PRECISION")) or "no"


def _by_name(plugin: Any) -> dict[str, Any] | None:
    """Return DeepSpeed plugins by name, with one selected."""
    if plugin is None:
        return None
    plugins: dict[str, Any] = plugin if isinstance(plugin, dict) else {"default": plugin}
    if wrong := [type(item).__name__ for item in plugins.values() if not hasattr(item, "deepspeed_config")]:
        raise ValueError(f"deepspeed_plugin is a {wrong[0]}; pass a DeepSpeedPlugin, or a dict of them by name")
    if not plugins:
        raise ValueError("deepspeed_plugin={} contains no plugin; pass a DeepSpeedPlugin, or a dict of them by name")
    if not any(item.selected for item in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins


def _deciding_plugin(slots: Slots) -> str:
    """Return the name of the plugin that decides the distributed type; "" without one.

    Raises:
        ValueError: There are several, which contradict each other.
    """
    given = [name for name in _TYPE_OF_PLUGIN if slots.get(name) is not None]
    if len(given) > 1:
        shown = " and ".join(name.removesuffix("s") for name in given)
        raise ValueError(
            f"{shown} contradict each other: a model is trained by one of them; omit the others (variables such as "
            "ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP request a plugin too)"
        )
    return given[0] if given else ""


def _describe_change(name: str, old: Any, new: Any) -> str:
    if old is new or old == new:
        return ""
    kinds = (str, torch.device, type(None))
    shown = [str(value) if isinstance(value, kinds) else type(value).__name__ for value in (old, new)]
    return f"{name.lstrip('_')} from {shown[0]} to {shown[1]}"
