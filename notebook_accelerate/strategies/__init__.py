"""The training strategies, each a class, and a table that maps each `DistributedType` to its strategy."""

from __future__ import annotations

from collections.abc import Callable

from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.ddp_strategy import DDPStrategy
from notebook_accelerate.strategies.strategy import PipelineStrategy, SingleStrategy, Strategy

StrategyFactory = Callable[[Setup], Strategy]


def _fsdp(setup: Setup) -> Strategy:
    """Return the strategy for the plugin's version of FSDP."""
    # Each version is imported only when it is used, because importing torch.distributed.fsdp takes a second.
    if setup.state.num_processes == 1:
        warn_once("fsdp_plugin has no effect with a single process: there are no other ranks to shard across")
        return SingleStrategy(setup)
    if setup.state.fsdp_plugin.fsdp_version == 1:
        from notebook_accelerate.strategies.fsdp.fsdp1 import FSDP1Strategy

        return FSDP1Strategy(setup)
    from notebook_accelerate.strategies.fsdp.fsdp2 import FSDP2Strategy

    return FSDP2Strategy(setup)


def _deepspeed(setup: Setup) -> Strategy:
    layout = setup.state.parallelism_config
    if layout is not None and layout.sp_enabled:
        from notebook_accelerate.strategies.deepspeed.ulysses import UlyssesStrategy

        return UlyssesStrategy(setup)
    from notebook_accelerate.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(setup)


def _xla(setup: Setup) -> Strategy:
    from notebook_accelerate.strategies.xla_strategy import XLAStrategy

    return XLAStrategy(setup)


def _megatron_lm(setup: Setup) -> Strategy:
    from notebook_accelerate.strategies.megatron.megatron_strategy import MegatronLMStrategy

    return MegatronLMStrategy(setup)


def _tensor_parallel(setup: Setup) -> Strategy:
    from notebook_accelerate.strategies.tensor_parallel import TensorParallelStrategy

    return TensorParallelStrategy(setup)


def _expert_parallel(setup: Setup) -> Strategy:
    from notebook_accelerate.strategies.expert_parallel import ExpertParallelStrategy

    return ExpertParallelStrategy(setup)


STRATEGIES: dict[str, StrategyFactory] = {
    DistributedType.NO.value: SingleStrategy,
    **{kind.value: DDPStrategy for kind in DistributedType if kind.value.startswith("MULTI_")},
    DistributedType.FSDP.value: _fsdp,
    "TP": _tensor_parallel,
    "EP": _expert_parallel,
    "PP": PipelineStrategy,
    DistributedType.DEEPSPEED.value: _deepspeed,
    DistributedType.XLA.value: _xla,
    DistributedType.MEGATRON_LM.value: _megatron_lm,
}
"""The function that creates each strategy.

The keys are values of `DistributedType`, and "TP", "EP" and "PP" for ranks that split only tensors, experts or layers,
for which Accelerate has no type.
"""


def register_strategy(kind: str, factory: StrategyFactory) -> None:
    """Register a strategy. It replaces the strategy that was registered for the same kind.

    Args:
        kind: The `DistributedType` that the strategy serves.
        factory: A function that creates the strategy from the settings of an `Accelerator`.
    """
    STRATEGIES[kind] = factory


def make_strategy(setup: Setup) -> Strategy:
    """Create the strategy that an `Accelerator` trains with.

    Args:
        setup: The settings of the `Accelerator`.

    Returns:
        The strategy, ready to prepare objects.

    Raises:
        ValueError: No strategy is registered for the distributed type, or the strategy is not available.
    """
    kind = str(getattr(setup.state.distributed_type, "value", setup.state.distributed_type))
    layout = setup.state.parallelism_config
    if kind.startswith("MULTI_") and layout is not None:
        kind = next((name.upper() for name in ("tp", "ep", "pp") if getattr(layout, f"{name}_enabled")), kind)
    if kind not in STRATEGIES:
        raise ValueError(f"distributed_type={kind!r} has no strategy; allowed: {', '.join(STRATEGIES)}")
    return STRATEGIES[kind](setup)
