"""Whether a training fits the memory of the machine, estimated before it is launched."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain import convert_bytes
from notebook_accelerate.hardware import nvml

if TYPE_CHECKING:
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan
    from notebook_accelerate.widgets.training_options import TrainingOptions

_ESTIMATE = "notebook_accelerate.big_modeling.estimate"
"""Where memory is estimated; loaded on first use, for it is the workers' side and needs torch."""


class Fit:
    """Compares what a model's training needs with what there is, for every launch that is looked at.

    Args:
        model: What `estimate_memory` takes: a model, a function that makes one, or a configuration of transformers.
        memory: More arguments of `estimate_memory`, such as optimizer, sequence_length, inputs.
    """

    def __init__(self, model: Any, memory: Mapping[str, Any] | None = None) -> None:
        self._model, self._options = model, dict(memory or {})
        self._known: dict[tuple[Any, ...], Any] = {}

    def warning(self, plan: LaunchPlan, training: TrainingOptions, machine: HardwareInfo) -> str:
        """Return a sentence that says what does not fit; "" where it fits, or where the devices' memory is not known.

        Args:
            plan: The launch.
            training: The training's options.
            machine: The hardware.
        """
        available, where = _available(plan, machine)
        if available is None:
            return ""
        strategy = strategy_of(training, plan.world_size)
        try:
            estimate = self._estimate(strategy, plan.world_size, training.batch_size or 1)
        except Exception as error:  # noqa: BLE001 - the model's own code; the launch can be configured all the same
            return f"The model's memory could not be estimated ({type(error).__name__}: {error})."
        needed = estimate.training_total * (1 if where else plan.num_processes)
        if needed <= available:
            return ""
        each = convert_bytes(estimate.training_total)
        largest = max(estimate.training, key=lambda part: estimate.training[part])
        together = where or f"{convert_bytes(needed)} for {plan.num_processes} on this machine"
        return (
            f"This will not fit: training needs about {each} per process ({largest} most of it), {together}; there are "
            f"{convert_bytes(available)}."
        )

    def _estimate(self, strategy: str, ranks: int, batch: int) -> Any:
        key = (strategy, ranks, batch)
        if key not in self._known:
            estimate = importlib.import_module(_ESTIMATE).estimate_memory
            given = {"strategy": strategy, "num_processes": ranks, "batch_size": batch, **self._options}
            self._known[key] = estimate(self._model, **given)
        return self._known[key]


def strategy_of(training: TrainingOptions, ranks: int) -> str:
    """Return how ranks share the model, by `estimate_memory`'s names.

    Args:
        training: The training's options.
        ranks: Processes on all machines.
    """
    plain = "ddp" if ranks > 1 else "single"
    if training.deepspeed_plugin is not None:
        stage = int(training.deepspeed_plugin.zero_stage or 0)
        return f"zero{stage}" if stage else plain
    if (plugin := training.fsdp_plugin) is not None:
        named = f"{plugin.sharding_strategy} {plugin.reshard_after_forward}".upper()
        if "NO_SHARD" in named:
            return plain
        keeps = "SHARD_GRAD_OP" in named or (plugin.fsdp_version == 2 and plugin.reshard_after_forward is False)
        return "shard_grad_op" if keeps else "fsdp"
    return plain


def _available(plan: LaunchPlan, machine: HardwareInfo) -> tuple[int | None, str]:
    """Return the bytes there are, and where each process has so much for itself; "" where they share it."""
    if plan.accelerator in ("cpu", "mps"):
        return machine.memory_bytes, ""
    if plan.accelerator == "cuda" and (gpus := nvml.gpus()):
        return min(gpu.memory_bytes for gpu in gpus), "on a GPU of its own"
    return None, ""


__all__ = ["Fit", "strategy_of"]
