"""The state of the current `Accelerator`: precision, plugins and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType, PrecisionType
from notebook_accelerate.config.parallelism_config import ParallelismConfig
from notebook_accelerate.config.plain_values import check_type
from notebook_accelerate.state import process_group
from notebook_accelerate.state.partial_state import PartialState, SharedDict, Slots
from notebook_accelerate.state.warn_once import reset_warnings, warn_once

if TYPE_CHECKING:
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
    from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
    from notebook_accelerate.config.parallelism_config import TorchTensorParallelPlugin


# The distributed type that a plugin implies.
_TYPE_OF_PLUGIN = {
    "deepspeed_plugins": DistributedType.DEEPSPEED,
    "fsdp_plugin": DistributedType.FSDP,
    "megatron_lm_plugin": DistributedType.MEGATRON_LM,
}


class AcceleratorState(PartialState):
    """`PartialState` plus precision and plugins. All instances share one dictionary per process.

    An instance that is created later with other settings changes the shared settings, and a warning lists the changes.
    Settings that it does not pass stay the same, and objects that are already prepared keep working as before.

    Args:
        mixed_precision: no, fp16, bf16 or fp8. None means the value of ACCELERATE_MIXED_PRECISION, or no.
        cpu: Whether to use the CPU.
        dynamo_plugin: How models are compiled (`TorchDynamoPlugin`).
        deepspeed_plugin: A `DeepSpeedPlugin`, or a dict of several by name, of which the first is active.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        parallelism_config: A `ParallelismConfig`.
        _from_accelerator: Whether an `Accelerator` creates this object.
        kwargs: Arguments of `torch.distributed.init_process_group`.

    Attributes:
        dynamo_plugin: How models are compiled, or None if they are not compiled.
        fsdp_plugin: The active FSDP plugin, or None if FSDP is not used.
        parallelism_config: The parallel layout, or None if ranks use data parallelism only.
        device_mesh: The mesh of ranks of the parallel layout, or None if there is no layout.
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
        """The precision: no, fp16, bf16 or fp8. The precision in a DeepSpeed configuration has precedence."""
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
        """Return the DeepSpeed plugin that has a name.

        Args:
            name: The key of the plugin in the dict that was passed to the `Accelerator`.

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
        """Make the DeepSpeed plugin that has a name the active plugin.

        Args:
            name: The key of the plugin in the dict that was passed to the `Accelerator`.

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
    """Return the precision that the launch has set in ACCELERATE_MIXED_PRECISION, or "no"."""
    return check_precision(environ.text("ACCELERATE_MIXED_PRECISION")) or "no"


def _by_name(plugin: Any) -> dict[str, Any] | None:
    """Return DeepSpeed plugins by name, after making sure that one of them is selected."""
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
    """Return the name of the plugin that determines the distributed type, or "" if there is no such plugin.

    Raises:
        ValueError: There are several of these plugins, which contradict each other.
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


# ---- the parallel layout: plugins that the launch requests, and the device mesh

# These functions import the plugins when they are used, because importing the modules takes milliseconds.


def _deepspeed() -> dict[str, Any]:
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    plugin.select(_from_accelerator_state=True)
    return {"default": plugin}


def _fsdp(**settings: Any) -> Any:
    from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**settings)


def _megatron_lm() -> Any:
    from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin

    return MegatronLMPlugin()


_FROM_ENVIRON: dict[str, tuple[str, Callable[[], Any]]] = {
    "deepspeed_plugins": ("ACCELERATE_USE_DEEPSPEED", _deepspeed),
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", _fsdp),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", _megatron_lm),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", ParallelismConfig),
}


def plugins_from_environ(requested: Slots) -> Slots:
    """Create the plugins that the launch requests through environment variables and the user has not passed.

    Args:
        requested: The user's plugins by name.

    Returns:
        The new plugins by name.
    """
    return {
        name: create()
        for name, (variable, create) in _FROM_ENVIRON.items()
        if requested.get(name) is None and environ.flag(variable)
    }


def offloads_gradients(requested: Slots) -> bool:
    """Return whether FSDP 2 offloads gradients, so that clipping them needs collectives on the CPU (pytorch#148532).

    Args:
        requested: The plugins by name.
    """
    plugin = requested.get("fsdp_plugin")
    if plugin is not None:
        from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin

        check_type("fsdp_plugin", plugin, FullyShardedDataParallelPlugin)
    if plugin is None:  # A parallel layout may imply a plugin, which then takes its settings from the environment.
        return requested.get("parallelism_config") is not None and environ.flag("FSDP_OFFLOAD_PARAMS")
    return plugin.fsdp_version == 2 and bool(getattr(plugin, "offloads", False))


def arrange_ranks(slots: Slots) -> Slots:
    """Check the parallel layout against the world size and create its mesh; every rank must call this.

    Args:
        slots: The state's settings.

    Returns:
        The layout, the mesh, and the FSDP plugin, which the layout may imply if the user has not passed one.

    Raises:
        ValueError: The degrees do not match the world size, or need another plugin.
    """
    layout, tp_plugin = slots.get("parallelism_config"), slots.get("torch_tp_plugin")
    if layout is None and tp_plugin is not None and tp_plugin.tp_size > 1:
        layout = ParallelismConfig(tp_size=tp_plugin.tp_size)
        layout.device_mesh = tp_plugin.torch_device_mesh
    if layout is None:
        return {}
    check_type("parallelism_config", layout, ParallelismConfig)
    layout.check_world_size(slots["num_processes"])
    if layout.sp_enabled:
        return _arrange_sequence_ranks(layout, slots)
    if layout.pp_enabled:
        return _arrange_pipeline_ranks(layout, slots)
    _check_no_engine(layout, slots)
    fsdp = slots.get("fsdp_plugin")
    shards = layout.dp_shard_enabled or layout.cp_enabled
    if shards and fsdp is None:
        fsdp = _fsdp(fsdp_version=2)
    if fsdp is not None and layout.total_size > 1:
        if fsdp.fsdp_version != 2:
            raise ValueError(
                f"fsdp_plugin has fsdp_version={fsdp.fsdp_version}, but parallelism_config needs FSDP 2; pass "
                "FullyShardedDataParallelPlugin(fsdp_version=2), or omit parallelism_config (FSDP 1 has "
                "sharding_strategy='HYBRID_SHARD' for replicas of shards)"
            )
        if not shards:
            raise ValueError(
                f"fsdp_plugin shards, but {layout!r} has no dimension to shard over; pass dp_shard_size above 1, or "
                "omit fsdp_plugin"
            )
    mesh = layout.get_device_mesh(slots["device"].type)
    return {"parallelism_config": layout, "device_mesh": mesh, "fsdp_plugin": fsdp}


def _check_no_engine(layout: ParallelismConfig, slots: Slots) -> None:
    """Check that the ranks are not arranged by both the layout and the engine of a plugin."""
    given = [name for name in ("deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]
    if given and layout.total_size > 1:
        name = given[0].removesuffix("s")
        instead = {
            "deepspeed_plugin": "DeepSpeedPlugin(zero_stage=3) shards over all ranks",
            "megatron_lm_plugin": "MegatronLMPlugin(tp_degree=..., pp_degree=...) has its own degrees",
        }[name]
        raise ValueError(f"{layout!r} and {name} contradict each other: {instead}; omit {name} or parallelism_config")


def _arrange_sequence_ranks(layout: ParallelismConfig, slots: Slots) -> Slots:
    """Create the mesh of sequence parallel ranks, for DeepSpeed's attention."""
    if layout.tp_enabled:
        raise ValueError(
            f"sp_size={layout.sp_size} with tp_size={layout.tp_size} is not allowed: DeepSpeed's sequence parallelism "
            "needs full tensors; pass tp_size=1"
        )
    given = [name for name in ("fsdp_plugin", "megatron_lm_plugin") if slots.get(name) is not None]
    if given:
        raise ValueError(
            f"sp_size={layout.sp_size} needs DeepSpeed, and {given[0]} contradicts it; omit {given[0]}, or "
            f"pass ParallelismConfig(cp_size={layout.sp_size}), which works with FSDP 2"
        )
    mesh = layout.get_device_mesh(slots["device"].type)
    plugins = slots.get("deepspeed_plugins") or _deepspeed()
    return {"parallelism_config": layout, "device_mesh": mesh, "deepspeed_plugins": plugins}


def _arrange_pipeline_ranks(layout: ParallelismConfig, slots: Slots) -> Slots:
    """Create the mesh of pipeline ranks, for inference."""
    given = [name for name in ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]
    if given:
        raise ValueError(
            f"pp_size={layout.pp_size} is for prepare_pippy, and {given[0].removesuffix('s')} contradicts "
            f"it; omit one of them, or train a pipeline with MegatronLMPlugin(pp_degree={layout.pp_size}) alone"
        )
    return {"parallelism_config": layout, "device_mesh": layout.get_device_mesh(slots["device"].type)}


class GradientState:
    """The state of gradient accumulation: whether gradients are complete, and which loaders are being read.

    Instances share one dictionary. An `Accelerator` whose accumulation settings differ from the previous one's starts a
    new dictionary. Objects that the previous one prepared keep the old dictionary, and `GradientState()` uses the
    latest one.

    Args:
        gradient_accumulation_plugin: A `GradientAccumulationPlugin`; None keeps the current settings.

    Attributes:
        sync_gradients: Whether this step completes a window, so that gradients are reduced and the optimizer steps.
        active_dataloader: The innermost loader that is being read, or None outside of loops.
        dataloader_references: All loaders that are being read, the outermost first, after a leading None.
        plugin_kwargs: The accumulation settings that differ from the defaults.
        is_xla_gradients_synced: Whether gradients have been reduced since the last step (XLA only).
    """

    _shared_state: ClassVar[Slots] = SharedDict()

    sync_gradients: bool
    dataloader_references: list[Any]
    plugin_kwargs: dict[str, Any]
    is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        cls = type(self)
        requested = None if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_kwargs()
        if not cls._shared_state:
            cls._shared_state.update(_initial(requested or {}))
        elif requested is not None and requested != cls._shared_state["plugin_kwargs"]:
            cls._shared_state = _initial(requested)
        self.__dict__ = cls._shared_state

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared dictionary."""
        GradientState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether the shared dictionary has been filled."""
        return bool(type(self)._shared_state)

    @property
    def num_steps(self) -> int:
        """The number of batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler counts the batches that do not complete a window."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader completes the window even if the window is shorter."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged in every batch, not only in the one that completes the window."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being read, or None outside of loops."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.dataloader_references[-1] is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has yielded its last batch."""
        loader = self.dataloader_references[-1]
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples in the active loader's last round that are not padding.

        0 means all samples. -1 means that the number is unknown, or that no loader is being read.
        """
        loader = self.dataloader_references[-1]
        return -1 if loader is None else loader.remainder

    def count_batch(self, step: int) -> int:
        """Count a batch, and set `sync_gradients` to whether it completes its window.

        Args:
            step: The number of batches before this one.

        Returns:
            The number of batches including this one, or 0 if the end of a loader completes the window.
        """
        if self.end_of_dataloader and self.sync_with_dataloader:
            self.sync_gradients = True
            return 0
        self.sync_gradients = (step + 1) % self.num_steps == 0
        return step + 1

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this step completes a window."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        """Register a loader that is being read."""
        # Register a loader only once, even if it is read again before its end.
        self._remove_dataloader(dataloader)
        self.dataloader_references.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Unregister a loader."""
        self.dataloader_references[:] = [kept for kept in self.dataloader_references if kept is not dataloader]


def _initial(plugin_kwargs: dict[str, Any]) -> Slots:
    return {
        "sync_gradients": True,
        "dataloader_references": [None],
        "plugin_kwargs": plugin_kwargs,
        "is_xla_gradients_synced": False,
    }


# ---- resetting the state, so that new and inline workers start afresh


def reset_shared_state() -> None:
    """Clear this process's state, so that the next `Accelerator` or `PartialState` reads the environment again.

    A process group that this process started is destroyed. A group that was inherited by a fork is only dropped,
    because its threads and sockets belong to the parent.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    # Start a new dictionary instead of clearing it: objects that are already prepared keep the old one.
    GradientState._shared_state = {}
    process_group.forget_group()
    reset_warnings()


def replace_shared_state(with_: tuple[Slots, Slots, Slots] | None = None) -> tuple[Slots, Slots, Slots]:
    """Replace the dictionaries of the state classes; existing objects keep the previous dictionaries.

    Args:
        with_: The dictionaries of `PartialState`, `AcceleratorState` and `GradientState`; None means empty ones.

    Returns:
        The previous dictionaries.
    """
    before = PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state
    after = with_ or (SharedDict(), SharedDict(), SharedDict())
    PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state = after
    return before


def start_afresh() -> None:
    """Discard the state that an inline run has left behind if it was the first to import this package."""
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
