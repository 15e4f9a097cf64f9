"""`AcceleratorState`: the place in the world, plus the precision and the plugins of the current `Accelerator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType, PrecisionType
from notebook_accelerate.state.parallel_layout import arrange, offloads_gradients, plugins_from_environ
from notebook_accelerate.state.partial_state import PartialState
from notebook_accelerate.state.shared_dict import SharedDict, Slots
from notebook_accelerate.state.warn_once import warn_once

_PLUGINS = ("dynamo_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config")
# Which kind of world a plugin makes of one with (or without) a process group.
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

    A later instance that asks for other settings gets them, with one warning that says what changed; what it does not
    mention stays, and objects prepared before keep working as they were prepared.

    Args:
        mixed_precision: no, fp16, bf16 or fp8; None means ACCELERATE_MIXED_PRECISION, or no.
        cpu: Leave accelerators alone.
        dynamo_plugin: How models are compiled (`TorchDynamoPlugin`).
        deepspeed_plugin: A `DeepSpeedPlugin`, or several by name; the first one is active.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        parallelism_config: A `ParallelismConfig`.
        _from_accelerator: Whether an `Accelerator` makes it.
        kwargs: Arguments of `torch.distributed.init_process_group`.

    Attributes:
        dynamo_plugin: How models are compiled; None: not.
        fsdp_plugin: The active plugin of that kind; None: not used.
        parallelism_config: The parallel layout; None: data parallel only.
        device_mesh: The mesh of ranks of the parallel layout; None without one.
    """

    _shared_state: ClassVar[Slots] = SharedDict()
    _known_attrs: ClassVar[tuple[str, ...]] = (
        *PartialState._known_attrs,
        *_PLUGINS,
        "_mixed_precision",
        "deepspeed_plugins",
        "device_mesh",
        "use_ipex",
    )

    fork_launched: bool
    _mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin | None
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
        asked = {
            "_mixed_precision": check_precision(mixed_precision),
            "dynamo_plugin": dynamo_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
            "deepspeed_plugins": _by_name(deepspeed_plugin),
        }
        if not self._shared_state:
            asked |= plugins_from_environ(asked)
        if offloads_gradients(asked):
            kwargs["with_cpu"] = True
        if not self._shared_state:
            self._fill(PartialState(cpu, **kwargs), asked)
        elif cpu or kwargs or any(value is not None for value in asked.values()):
            self._change(PartialState(cpu, **kwargs), asked)

    def __repr__(self) -> str:
        plugins = f"DeepSpeed plugins: {self.deepspeed_plugins}\n" if self.deepspeed_plugins else ""
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n{plugins}"

    def _fill(self, place: PartialState, asked: Slots) -> None:
        if asked["_mixed_precision"] is None:
            asked = {**asked, "_mixed_precision": precision_from_environ()}
        _only_kind(asked)
        settings = {**place.__dict__, "device_mesh": None, "use_ipex": False, **asked}
        settings |= arrange(settings)
        kind = _only_kind(settings)
        self.__dict__.update(settings)
        self._choose_type(kind)

    def _change(self, place: PartialState, asked: Slots) -> None:
        new = {name: value for name, value in asked.items() if value is not None}
        if kind := _only_kind(new):
            new |= {name: None for name in _TYPE_OF_PLUGIN if name != kind and self.__dict__.get(name) is not None}
        before = {name: self.__dict__.get(name) for name in ("device", *new)}
        settings = {**self.__dict__, **place.__dict__, **new}
        settings |= arrange(settings)
        kind = _only_kind(settings)
        self.__dict__.update(settings)
        self._choose_type(kind)
        changes = [_change_in_words(name, old, self.__dict__[name]) for name, old in before.items()]
        if any(changes):
            warn_once(
                f"this Accelerator changes the shared state: {', '.join(filter(None, changes))}; "
                "objects prepared by an earlier Accelerator stay as they were prepared"
            )

    def _choose_type(self, kind: str) -> None:
        self.distributed_type = _TYPE_OF_PLUGIN.get(kind) or PartialState().distributed_type

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget everything; the next instance reads the environment again.

        Args:
            reset_partial_state: Also reset `PartialState`.
        """
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8; where a DeepSpeed configuration has enabled one, that one."""
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
            name: Its key in the dict that the `Accelerator` was given.

        Returns:
            The plugin.

        Raises:
            ValueError: There is none of that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ValueError(f"no DeepSpeed plugin is named {name!r}; there are {sorted(plugins) or 'none'}")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin of that name the active one.

        Args:
            name: Its key in the dict that the `Accelerator` was given.

        Raises:
            ValueError: There is none of that name.
        """
        chosen = self.get_deepspeed_plugin(name or "")
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)


def check_precision(name: Any) -> str | None:
    """Return a precision's name as text.

    Args:
        name: A name or a `PrecisionType`; None stays None.

    Returns:
        The name in lower case.

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
    """Return the precision that the launch asked for (ACCELERATE_MIXED_PRECISION), or no."""
    return check_precision(environ.text("ACCELERATE_MIXED_PRECISION")) or "no"


def _by_name(plugin: Any) -> dict[str, Any] | None:
    """Return DeepSpeed plugins by name, one of them selected."""
    if plugin is None:
        return None
    plugins: dict[str, Any] = plugin if isinstance(plugin, dict) else {"default": plugin}
    if wrong := [type(item).__name__ for item in plugins.values() if not hasattr(item, "deepspeed_config")]:
        raise ValueError(f"deepspeed_plugin is a {wrong[0]}; pass a DeepSpeedPlugin, or a dict of them by name")
    if not plugins:
        raise ValueError("deepspeed_plugin={} has no plugin; pass a DeepSpeedPlugin, or a dict of them by name")
    if not any(item.selected for item in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins


def _only_kind(slots: Slots) -> str:
    """Return the name of the plugin among some settings that decides the kind of world; "" where there is none.

    Raises:
        ValueError: There are several, which contradict each other.
    """
    given = [name for name in _TYPE_OF_PLUGIN if slots.get(name) is not None]
    if len(given) > 1:
        shown = " and ".join(name.removesuffix("s") for name in given)
        raise ValueError(
            f"{shown} contradict each other: a model is trained by one of them; leave the others out (variables such "
            "as ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP ask for a plugin too)"
        )
    return given[0] if given else ""


def _change_in_words(name: str, old: Any, new: Any) -> str:
    if old is new or old == new:
        return ""
    kinds = (str, torch.device, type(None))
    shown = [str(value) if isinstance(value, kinds) else type(value).__name__ for value in (old, new)]
    return f"{name.lstrip('_')} from {shown[0]} to {shown[1]}"
