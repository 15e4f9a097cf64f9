"""The parallel layout of ranks: plugins that the launch requests or the layout implies, and the device mesh.

Plugin classes are only imported when they are used, because importing their modules takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.parallelism_config import ParallelismConfig
from notebook_accelerate.config.plain_values import check_type
from notebook_accelerate.state.partial_state import Slots
from notebook_accelerate.state.warn_once import warn_once, warn_user


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
    """Create the plugins that the launch requests in environment variables, unless the user has passed them.

    Args:
        requested: The plugins that the user has passed, by name.

    Returns:
        The new plugins, by name.
    """
    return {
        name: create()
        for name, (variable, create) in _FROM_ENVIRON.items()
        if requested.get(name) is None and environ.flag(variable)
    }


def offloads_gradients(requested: Slots) -> bool:
    """Return whether FSDP 2 offloads gradients, so that clipping them needs collectives on the CPU (pytorch#148532).

    Args:
        requested: The plugins that the user has passed, by name.
    """
    plugin = requested.get("fsdp_plugin")
    if plugin is not None:
        from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin

        check_type("fsdp_plugin", plugin, FullyShardedDataParallelPlugin, "FullyShardedDataParallelPlugin(...)")
    if plugin is None:  # A layout may imply a plugin with settings from the environment.
        return requested.get("parallelism_config") is not None and environ.flag("FSDP_OFFLOAD_PARAMS")
    return plugin.fsdp_version == 2 and bool(getattr(plugin, "offloads", False))


def arrange_ranks(slots: Slots) -> Slots:
    """Check that the parallel layout fits the number of ranks, and create its mesh; every rank must call this.

    Args:
        slots: The settings of the `AcceleratorState`.

    Returns:
        The layout, the mesh, and the FSDP plugin, which the layout may imply if the user has not passed one.

    Raises:
        ValueError: The sizes in the layout do not match the number of ranks, or need another plugin.
    """
    layout, tp_plugin = slots.get("parallelism_config"), slots.get("torch_tp_plugin")
    if tp_plugin is not None:
        warn_once(
            "torch_tp_plugin is deprecated: write "
            f"Accelerator(parallelism_config=ParallelismConfig(tp_size={tp_plugin.tp_size}))",
            FutureWarning,
        )
    if layout is None and tp_plugin is not None and tp_plugin.tp_size > 1:
        layout = ParallelismConfig(tp_size=tp_plugin.tp_size)
        layout.device_mesh = tp_plugin.torch_device_mesh
    if layout is None:
        return {}
    check_type("parallelism_config", layout, ParallelismConfig, "ParallelismConfig(...)")
    engines = _engines(slots)
    if layout.total_size == 1 and _arrange_data_parallel_ranks(layout, slots, engines):
        return {"parallelism_config": layout}
    layout.check_world_size(slots["num_processes"])
    _warn_about_unused_handlers(layout, slots)
    if layout.sp_enabled:
        return _arrange_sequence_ranks(layout, slots)
    if layout.pp_enabled:
        return _arrange_pipeline_ranks(layout, slots)
    _check_no_engine(layout, engines)
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
                f"fsdp_plugin shards models, but {layout!r} has no dimension to shard along; pass dp_shard_size above "
                "1, or omit fsdp_plugin"
            )
    mesh = layout.get_device_mesh(slots["device"].type)
    return {"parallelism_config": layout, "device_mesh": mesh, "fsdp_plugin": fsdp}


def _arrange_data_parallel_ranks(layout: ParallelismConfig, slots: Slots, engines: list[str]) -> bool:
    """Set the size of data parallelism. As in Accelerate, a layout whose sizes are all 1 does not limit it.

    Returns:
        Whether another plugin arranges the ranks, without a mesh.
    """
    fsdp = slots.get("fsdp_plugin")
    if fsdp is not None and fsdp.fsdp_version == 2:
        layout.dp_shard_size = slots["num_processes"]
        return False
    layout.dp_replicate_size = slots["num_processes"]
    return fsdp is not None or bool(engines)


def _engines(slots: Slots) -> list[str]:
    """Return the names of the plugins whose engines arrange the ranks themselves."""
    return [name for name in ("deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]


def _warn_about_unused_handlers(layout: ParallelismConfig, slots: Slots) -> None:
    unused = [
        name
        for name in ("tp", "cp", "sp")
        if getattr(layout, f"{name}_size") == 1 and getattr(layout, f"{name}_handler") is not None
    ]
    if unused and slots["num_processes"] > 1 and slots["process_index"] == 0:
        found = " and ".join(f"{name}_handler, because {name}_size is 1" for name in unused)
        warn_user(f"ParallelismConfig ignores its {found}")


def _check_no_engine(layout: ParallelismConfig, engines: list[str]) -> None:
    """Check that no plugin is used whose engine arranges the ranks itself, because the layout already arranges them."""
    if engines and layout.total_size > 1:
        name = engines[0].removesuffix("s")
        instead = {
            "deepspeed_plugin": "DeepSpeedPlugin(zero_stage=3) shards over all ranks",
            "megatron_lm_plugin": "MegatronLMPlugin(tp_degree=..., pp_degree=...) has its own degrees",
        }[name]
        raise ValueError(f"{layout!r} and {name} contradict each other: {instead}; omit {name} or parallelism_config")


def _arrange_sequence_ranks(layout: ParallelismConfig, slots: Slots) -> Slots:
    """Create the mesh of sequence-parallel ranks for DeepSpeed's attention."""
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
    """Create the mesh of pipeline ranks for inference."""
    given = [name for name in ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin") if slots.get(name) is not None]
    if given:
        raise ValueError(
            f"pp_size={layout.pp_size} is for prepare_pippy, and {given[0].removesuffix('s')} contradicts "
            f"it; omit one of them, or train a pipeline with MegatronLMPlugin(pp_degree={layout.pp_size}) alone"
        )
    return {"parallelism_config": layout, "device_mesh": layout.get_device_mesh(slots["device"].type)}
