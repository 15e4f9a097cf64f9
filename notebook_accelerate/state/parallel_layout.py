"""The parallel layout of a state: plugins that the launch asked for, and the mesh of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.parallelism_config import ParallelismConfig
from notebook_accelerate.state.shared_dict import Slots

# The plugins' modules take milliseconds to import: only who asks for one waits.


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


def plugins_from_environ(asked: Slots) -> Slots:
    """Make the plugins that the launch asked for and the user did not give.

    Args:
        asked: What the user gave, by name.

    Returns:
        The new plugins by name.
    """
    return {
        name: kind()
        for name, (variable, kind) in _FROM_ENVIRON.items()
        if asked.get(name) is None and environ.flag(variable)
    }


def offloads_gradients(asked: Slots) -> bool:
    """Tell whether gradients are clipped in main memory, by collectives of the CPU (pytorch#148532): FSDP 2 offloads.

    Args:
        asked: The plugins by name.
    """
    plugin = asked.get("fsdp_plugin")
    if plugin is None:  # a layout may imply one, with the settings of the environment
        return asked.get("parallelism_config") is not None and environ.flag("FSDP_OFFLOAD_PARAMS")
    return plugin.fsdp_version == 2 and bool(getattr(plugin, "offloads", False))


def arrange(slots: Slots) -> Slots:
    """Check the parallel layout against the world, and arrange the ranks in its mesh; every rank must call this.

    Args:
        slots: The state's settings.

    Returns:
        The layout, the mesh, and the FSDP plugin that the layout implies where the user gave none.

    Raises:
        ValueError: The degrees do not make the world, or need another plugin.
    """
    layout, split = slots.get("parallelism_config"), slots.get("torch_tp_plugin")
    if layout is None and split is not None and split.tp_size > 1:
        layout = ParallelismConfig(tp_size=split.tp_size)
        layout._mesh = split.torch_device_mesh
    if not isinstance(layout, ParallelismConfig):
        return {}
    layout.check_world_size(slots["num_processes"])
    if layout.sp_enabled:
        return _share_sequences(layout, slots)
    if layout.pp_enabled:
        return _share_layers(layout, slots)
    _refuse_engines(layout, slots)
    fsdp = slots.get("fsdp_plugin")
    shards = layout.dp_shard_enabled or layout.cp_enabled
    if shards and fsdp is None:
        fsdp = _fsdp(fsdp_version=2)
    if fsdp is not None and layout.total_size > 1:
        if fsdp.fsdp_version != 2:
            raise ValueError(
                f"a ParallelismConfig arranges FSDP 2, and fsdp_plugin has fsdp_version={fsdp.fsdp_version}; write "
                "FullyShardedDataParallelPlugin(fsdp_version=2), or leave parallelism_config out (FSDP 1 has "
                "sharding_strategy='HYBRID_SHARD' for replicas of shards)"
            )
        if not shards:
            raise ValueError(
                f"fsdp_plugin shards, but {layout!r} shards over nothing; set dp_shard_size above 1, or leave "
                "fsdp_plugin out"
            )
    mesh = layout.get_device_mesh(slots["device"].type)
    return {"parallelism_config": layout, "device_mesh": mesh, "fsdp_plugin": fsdp}


def _refuse_engines(layout: ParallelismConfig, slots: Slots) -> None:
    """Refuse degrees beside a plugin whose engine arranges the ranks itself."""
    given = [name for name in ("deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]
    if given and layout.total_size > 1:
        name = given[0].removesuffix("s")
        instead = {
            "deepspeed_plugin": "DeepSpeedPlugin(zero_stage=3) shards over all ranks",
            "megatron_lm_plugin": "MegatronLMPlugin(tp_degree=..., pp_degree=...) has degrees of its own",
        }[name]
        raise ValueError(
            f"{layout!r} and {name} contradict each other: {instead}; leave {name} or parallelism_config out"
        )


def _share_sequences(layout: ParallelismConfig, slots: Slots) -> Slots:
    """Arrange ranks of which some share sequences; the others, as many as there are sequences, are DeepSpeed's."""
    if layout.tp_enabled:
        raise ValueError(
            f"sp_size={layout.sp_size} with tp_size={layout.tp_size}: DeepSpeed's sequence parallelism takes models "
            "whose tensors are whole; set tp_size=1"
        )
    given = [name for name in ("fsdp_plugin", "megatron_lm_plugin") if slots.get(name) is not None]
    if given:
        raise ValueError(
            f"sp_size={layout.sp_size} is computed by DeepSpeed, and {given[0]} contradicts it; leave {given[0]} out, "
            f"or split sequences by ParallelismConfig(cp_size={layout.sp_size}), which FSDP 2 computes"
        )
    mesh = layout.get_device_mesh(slots["device"].type)
    plugins = slots.get("deepspeed_plugins") or _deepspeed()
    return {"parallelism_config": layout, "device_mesh": mesh, "deepspeed_plugins": plugins}


def _share_layers(layout: ParallelismConfig, slots: Slots) -> Slots:
    """Arrange ranks of which some have a model's layers between them, for inference."""
    given = [name for name in ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]
    if given:
        raise ValueError(
            f"pp_size={layout.pp_size} shares layers out by prepare_pippy, and {given[0].removesuffix('s')} is against "
            f"that; leave one out, or train a pipeline by MegatronLMPlugin(pp_degree={layout.pp_size}) alone"
        )
    return {"parallelism_config": layout, "device_mesh": layout.get_device_mesh(slots["device"].type)}
