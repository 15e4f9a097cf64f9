"""Estimates before the launch whether a training fits the memory of the machine."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain_values import convert_bytes
from notebook_accelerate.hardware import nvml

if TYPE_CHECKING:
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan
    from notebook_accelerate.widgets.training_options import TrainingOptions

_ESTIMATE = "notebook_accelerate.big_modeling.estimate"
"""The module that estimates memory. It is loaded on first use: it belongs to the workers' side and needs torch."""


class MemoryCheck:
    """Compares the estimated memory of a training with the available memory.

    Args:
        model: An argument of `estimate_memory`: a model, a function that returns one, or a configuration of
            transformers.
        memory: More arguments of `estimate_memory`, such as optimizer, sequence_length, inputs.
    """

    def __init__(self, model: Any, memory: Mapping[str, Any] | None = None) -> None:
        self._model, self._options = model, dict(memory or {})
        self._known: dict[str, Any] = {}

    def warning(
        self,
        plan: LaunchPlan,
        training: TrainingOptions,
        machine: HardwareInfo,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Return a sentence if the training does not fit; "" if it fits, or if the devices' memory is not known.

        Args:
            plan: The launch.
            training: The training's options.
            machine: The hardware.
            variables: Environment variables of the launch, which may choose the devices.
        """
        available, where = _available(plan, machine, {**os.environ, **(variables or {})})
        if available is None:
            return ""
        try:
            estimate = self._estimate(plan, training)
        except Exception as error:  # noqa: BLE001 - the model's own code; the launch can still be configured
            return f"The memory of the model could not be estimated ({type(error).__name__}: {error})."
        if where:
            offloaded = estimate.main_memory_total * plan.num_processes
            return _too_much(estimate.training, where, available, available) or _too_much_offloaded(offloaded, machine)
        parts = Counter(estimate.training) + Counter(estimate.main_memory)
        together = f"{convert_bytes(parts.total() * plan.num_processes)} for {plan.num_processes} on this machine"
        return _too_much(parts, together, available // plan.num_processes, available)

    def _estimate(self, plan: LaunchPlan, training: TrainingOptions) -> Any:
        given = {
            **distribution_of(training, plan.world_size, plan.num_processes),
            "num_processes": plan.world_size,
            "batch_size": training.batch_size or 1,
        }
        key = repr(given)
        if key not in self._known:
            estimate = importlib.import_module(_ESTIMATE).estimate_memory
            self._known[key] = estimate(self._model, **{**given, **self._options})
        return self._known[key]


def _too_much(parts: Mapping[str, int], where: str, limit: int, available: int) -> str:
    """Return a sentence if the bytes of one process exceed ``limit``; "" otherwise."""
    needed = sum(parts.values())
    if needed <= limit:
        return ""
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"This will not fit: training needs about {convert_bytes(needed)} per process, most of it for {largest}, "
        f"{where}; available: {convert_bytes(available)}."
    )


def _too_much_offloaded(needed: int, machine: HardwareInfo) -> str:
    """Return a sentence if the offloaded bytes of all processes exceed the main memory; "" otherwise."""
    if needed <= machine.memory_bytes:
        return ""
    return (
        f"This will not fit: offloaded tensors need about {convert_bytes(needed)} of main memory; available: "
        f"{convert_bytes(machine.memory_bytes)}."
    )


def distribution_of(training: TrainingOptions, ranks: int, local: int) -> dict[str, Any]:
    """Return how the model is distributed over ranks, as arguments of `estimate_memory`.

    Args:
        training: The training's options.
        ranks: Processes on all machines.
        local: Processes on this machine.

    Returns:
        "strategy", and if they are not empty "degrees" and "offload".
    """
    degrees = _degrees(training)
    offload: dict[str, str] = {}
    if training.megatron_lm_plugin is not None:
        strategy, offload = _megatron(training.megatron_lm_plugin)
    elif training.deepspeed_plugin is not None:
        strategy, offload = _deepspeed(training.deepspeed_plugin, ranks)
    elif training.fsdp_plugin is not None:
        strategy, offload = _fsdp(training.fsdp_plugin, ranks)
        if _HYBRID in _strategy_names(training.fsdp_plugin):
            degrees["dp_replicate"] = ranks // local
    elif degrees.keys() & {"dp_shard", "cp"}:
        strategy = "fsdp"
    else:
        strategy = next((name for name in ("tp", "ep", "pp") if name in degrees), _plain(ranks))
    found = {"strategy": strategy, "degrees": {name: size for name, size in degrees.items() if size > 1}}
    return {name: value for name, value in {**found, "offload": offload}.items() if value}


_HYBRID = "HYBRID"


def _plain(ranks: int) -> str:
    return "ddp" if ranks > 1 else "single"


def _degrees(training: TrainingOptions) -> dict[str, int]:
    if (plugin := training.megatron_lm_plugin) is not None:
        given = {"tp": plugin.tp_degree, "pp": plugin.pp_degree, "cp": plugin.context_parallel_size}
        return {name: int(degree) for name, degree in given.items() if degree}
    if (config := training.parallelism_config) is not None:
        return {name: int(getattr(config, f"{name}_size")) for name in config.active_mesh_dims}
    return {"tp": training.torch_tp_plugin.tp_size} if training.torch_tp_plugin is not None else {}


def _megatron(plugin: Any) -> tuple[str, dict[str, str]]:
    strategy = "megatron_distributed_optimizer" if plugin.use_distributed_optimizer else "megatron"
    return strategy, {"optimizer": "cpu"} if plugin.optimizer_cpu_offload else {}


def _deepspeed(plugin: Any, ranks: int) -> tuple[str, dict[str, str]]:
    """Return the stage and the offloaded tensors; gradients are offloaded with the optimizer that consumes them."""
    stage = int(plugin.zero_stage or 0)
    devices = {"cpu": "cpu", "nvme": "disk"}
    offload = {}
    if (device := devices.get(str(plugin.offload_optimizer_device))) and stage:
        offload = {"optimizer": device, **({"gradients": "cpu"} if stage > 1 else {})}
    if (device := devices.get(str(plugin.offload_param_device))) and stage == 3:
        offload["weights"] = device
    return (f"zero{stage}" if stage else _plain(ranks)), offload


def _fsdp(plugin: Any, ranks: int) -> tuple[str, dict[str, str]]:
    offload = dict.fromkeys(("weights", "gradients", "optimizer"), "cpu") if plugin.offloads else {}
    named = _strategy_names(plugin)
    if "NO_SHARD" in named:
        return _plain(ranks), offload
    gathered = "SHARD_GRAD_OP" in named or f"{_HYBRID}_SHARD_ZERO2" in named
    gathered = gathered or (plugin.fsdp_version == 2 and plugin.reshard_after_forward is False)
    return ("shard_grad_op" if gathered else "fsdp"), offload


def _strategy_names(plugin: Any) -> str:
    return f"{plugin.sharding_strategy} {plugin.reshard_after_forward}".upper()


def _available(plan: LaunchPlan, machine: HardwareInfo, variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the available bytes, and the device if each process has its own; "" if the processes share them."""
    if plan.accelerator in ("cpu", "mps"):
        return machine.memory_bytes, ""
    if plan.accelerator == "cuda":
        gpus = [nvml.visible_gpu(rank, variables) for rank in range(plan.num_processes)]
        if known := [gpu.memory_bytes for gpu in gpus if gpu is not None]:
            return min(known), "on a GPU of its own"
    return None, ""
