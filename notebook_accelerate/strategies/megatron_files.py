"""Checkpoints of Megatron-LM: megatron-core's distributed format, which loads into other degrees too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.megatron_engine import MegatronEngine

FOLDER = "megatron"
"""Where a checkpoint holds model, optimizer and schedule, in megatron-core's files."""


def _checkpoints() -> Any:
    return import_module("megatron.core.dist_checkpointing")


def _writer() -> Any:
    """Return what writes megatron-core's format from within this process.

    Its own writer forks a process for each file and keeps a manager process for good, in which a script without
    `if __name__ == "__main__"` would run once more.
    """
    formats: Any = import_module("megatron.core.dist_checkpointing.strategies.torch")
    torch_checkpoint: Any = import_module("torch.distributed.checkpoint")

    class InProcess(formats.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Write through torch's distributed checkpoint, planned by megatron-core."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            main = self.keep_only_main_replica
            named, *_ = formats._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, main)
            torch_checkpoint.save(
                formats.mcore_to_pyt_state_dict(named, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
                planner=formats.MCoreSavePlanner(dedup_replicated_tensors=not main, flatten_state_dict=False),
            )

    return InProcess("torch_dist", 1)


def _tracker() -> Any:
    return import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


def bare(chunk: Any) -> Any:
    """Take off what Megatron-LM has put around a part of a model.

    Args:
        chunk: The part.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _names(engine: MegatronEngine) -> list[str]:
    return ["model"] if len(engine.module) == 1 else [f"model{index}" for index in range(len(engine.module))]


def _parts(engine: MegatronEngine) -> dict[str, Any]:
    return {name: bare(chunk) for name, chunk in zip(_names(engine), engine.module, strict=True)}


def _describe(engine: MegatronEngine, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """Return what is where, as megatron-core's checkpoints want to be told."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"} if engine.plugin.use_distributed_optimizer else {}
    state = {name: part.sharded_state_dict(metadata=dict(metadata)) for name, part in _parts(engine).items()}
    if with_optimizer:
        _with_initial_state(engine.optimizer, is_loading)
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading, metadata=dict(metadata))
        state["scheduler"] = engine.scheduler.state_dict()
    return state


def _with_initial_state(optimizer: Any, is_loading: bool) -> None:
    """Give torch's optimizers the state that a checkpoint fills; Megatron-LM does it for those of Apex only."""
    for item in getattr(optimizer, "chained_optimizers", [optimizer]):
        if item.init_state_fn is None:
            item.init_state_fn = _start_momentum
        if is_loading and isinstance(item.optimizer, torch.optim.Adam):  # AdamW is one too
            if type(item).__name__ == "DistributedOptimizer":
                # Its state_dict wants the steps of torch's Adam, its load_state_dict stumbles over them (0.16.1).
                raise ValueError(
                    "megatron-core can load the state of use_distributed_optimizer=True only with the optimizers of "
                    "Transformer Engine or Apex: pip install 'transformer-engine[pytorch]'; or load the weights alone: "
                    "MegatronLMPlugin(no_load_optim=True)"
                )
            _start_moments(item.optimizer)


def _start_momentum(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _start_moments(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))


def save(engine: MegatronEngine, folder: Path) -> None:
    """Write an engine into a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: A folder that all ranks share.
    """
    target = folder / FOLDER
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with_optimizer = engine.iteration > 0 and not engine.plugin.no_save_optim
    state = _describe(engine, with_optimizer, is_loading=False)
    state["iteration"], state["has_optimizer"] = engine.iteration, with_optimizer
    _checkpoints().save(state, str(target), sharded_strategy=_writer())
    torch.save(_tracker().get_states(), target / _random_file(engine))
    dist.barrier()


def _random_file(engine: MegatronEngine) -> str:
    return f"generators_tp{engine.plugin.tp_degree}_pp{engine.plugin.pp_degree}_rank{dist.get_rank()}.pt"


def load(engine: MegatronEngine, folder: Path, strict: bool = True) -> None:
    """Read an engine from a folder, written with these or other degrees; every rank must call this.

    Args:
        engine: The engine.
        folder: The checkpoint.
        strict: Whether the names must be those of the model.

    Raises:
        CheckpointMismatchError: The folder holds no such engine.
    """
    source = folder / FOLDER
    if not (source / "metadata.json").exists():
        raise CheckpointMismatchError(
            f"{folder} holds no {FOLDER}/ that megatron-core has written. Prepare the same model as before saving."
        )
    checkpoints = _checkpoints()
    common = checkpoints.load_common_state_dict(str(source))
    with_optimizer = bool(common.get("has_optimizer")) and not engine.plugin.no_load_optim
    try:
        state = checkpoints.load(_describe(engine, with_optimizer, is_loading=True), str(source))
    except Exception as error:
        if type(error).__module__.startswith(("megatron.core.dist_checkpointing", "torch.distributed.checkpoint")):
            raise CheckpointMismatchError(f"{source} does not fit the prepared model: {error}") from error
        raise
    for name, part in _parts(engine).items():
        part.load_state_dict(state[name], strict=strict)
    if with_optimizer:
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.scheduler.load_state_dict(state["scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration, engine.pending = int(common["iteration"]), False
    generators = source / _random_file(engine)
    if generators.exists():
        _tracker().set_states(torch.load(generators, map_location="cpu", weights_only=True))


def whole_state(engine: MegatronEngine) -> dict[str, Any]:
    """Return a model's whole state where this rank has all of it.

    Args:
        engine: The engine.

    Raises:
        ValueError: The ranks have parts.
    """
    if engine.plugin.tp_degree * engine.plugin.pp_degree > 1 or len(engine.module) > 1:
        raise ValueError(
            f"each rank has a part of the model (tp_degree={engine.plugin.tp_degree}, "
            f"pp_degree={engine.plugin.pp_degree}); write it with accelerator.save_state(folder), which one rank with "
            "degrees of 1 can load"
        )
    return bare(engine.module[0]).state_dict()  # type: ignore[no-any-return]


__all__ = ["bare", "load", "save", "whole_state"]
