"""Checkpoints of Megatron-LM, in its own folders, so that its own tools read them and its own checkpoints load here.

    latest_checkpointed_iteration.txt     the newest iteration, as a number
    iter_0000003/                         one iteration, in one of two formats:
      metadata.json, common.pt, *.distcp    torch_dist: megatron-core's, which loads into other degrees too
      mp_rank_00/model_optim_rng.pt         torch: a file for each part of the model; mp_rank_00_001 with stages

MegatronLMPlugin(other_megatron_args={"ckpt_format": "torch"}) writes the second one; both are read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.megatron import model_parts
from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine
from notebook_accelerate.strategies.megatron.model_parts import parts_of, tracker

LATEST = "latest_checkpointed_iteration.txt"
"""The file that names the newest iteration."""
FORMATS = ("torch_dist", "torch")
VERSION = 3.0
"""Of the order in which Megatron-LM's files hold queries, keys and values."""


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


def _sharding(engine: MegatronEngine) -> dict[str, Any]:
    shared = engine.plugin.use_distributed_optimizer
    return {"distrib_optim_sharding_type": "fully_reshardable"} if shared else {}


def _describe(
    engine: MegatronEngine, with_optimizer: bool, is_loading: bool, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what is where, as megatron-core's checkpoints want to be told."""
    metadata = _sharding(engine) if metadata is None else metadata
    state = {name: part.sharded_state_dict(metadata=dict(metadata)) for name, part in parts_of(engine).items()}
    if with_optimizer:
        _with_initial_state(engine.optimizer, is_loading)
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading, metadata=dict(metadata))
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    return state


def _with_initial_state(optimizer: Any, is_loading: bool) -> None:
    """Give torch's optimizers the state that a checkpoint fills; Megatron-LM does it for those of Apex only."""
    for item in single_optimizers(optimizer):
        if item.init_state_fn is None:
            item.init_state_fn = _start_momentum
        if is_loading and isinstance(item.optimizer, torch.optim.Adam):  # AdamW is one too
            _start_moments(item.optimizer)


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the one that there is.

    Args:
        optimizer: Megatron's optimizer.
    """
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load what a checkpoint holds of Megatron's optimizer."""
    items = single_optimizers(optimizer)
    stumbles = [item for item in items if _is_shared_out(item) and isinstance(item.optimizer, torch.optim.Adam)]
    if not stumbles:
        optimizer.load_state_dict(state)
        return
    # Its load_state_dict looks for the steps of torch's Adam among the shards, where they are not (0.16.1).
    several = [state] if len(items) == 1 else [one for _, one in sorted(state.items())]
    for item, one in zip(items, several, strict=True):
        item.load_state_dict({name: value for name, value in one.items() if not name.startswith("param_state")})
        with _without_steps(item.optimizer):
            getattr(item, _SHARD_LOADERS[one["param_state_sharding_type"]])(one["param_state"])


_SHARD_LOADERS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "fully_sharded_model_space": "load_parameter_state_from_fs_model_space",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
}


def _is_shared_out(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "DistributedOptimizer"


@contextmanager
def _without_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide the steps in the state of torch's Adam."""
    steps = {p: state.pop("step") for p, state in optimizer.state.items() if "step" in state}
    try:
        yield
    finally:
        for parameter, step in steps.items():
            optimizer.state[parameter]["step"] = step.clone()  # it was one tensor for all, which each would add to


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

    Raises:
        ValueError: The format asked for is not known.
    """
    kind = getattr(engine.args, "ckpt_format", None) or FORMATS[0]
    if kind not in FORMATS:
        raise ValueError(
            f"other_megatron_args={{'ckpt_format': {kind!r}}} is not known here; write one of {', '.join(FORMATS)}"
        )
    target = folder / iteration_name(engine.iteration)
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with_optimizer = engine.iteration > 0 and not engine.plugin.no_save_optim
    if kind == "torch":
        model_parts.save(engine, target, _common(engine), with_optimizer)
    else:
        state = {**_describe(engine, with_optimizer, is_loading=False), **_common(engine)}
        _checkpoints().save(state, str(target), sharded_strategy=_writer(), content_metadata=_sharding(engine))
        torch.save(tracker().get_states(), target / _random_file(engine))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / LATEST).write_text(str(engine.iteration))


def iteration_name(iteration: int) -> str:
    """Return the folder of an iteration.

    Args:
        iteration: How many steps were taken.
    """
    return f"iter_{iteration:07d}"


def _common(engine: MegatronEngine) -> dict[str, Any]:
    """Return what every file of Megatron-LM holds; of the arguments those that are plain values."""
    plain = {
        name: value for name, value in vars(engine.args).items() if isinstance(value, (str, int, float, type(None)))
    }
    return {"args": Namespace(**plain), "checkpoint_version": VERSION, "iteration": engine.iteration}


def _random_file(engine: MegatronEngine) -> str:
    return f"generators_tp{engine.plugin.tp_degree}_pp{engine.plugin.pp_degree}_rank{dist.get_rank()}.pt"


def newest(folder: Path) -> Path:
    """Return the folder of the iteration that is to be read.

    Args:
        folder: A folder of iterations, or one iteration.

    Raises:
        CheckpointMismatchError: There is none.
    """
    if (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        return folder
    if (folder / LATEST).exists():
        said = (folder / LATEST).read_text().strip()
        found = folder / (iteration_name(int(said)) if said.isdecimal() else said)
    else:
        found = max(folder.glob("iter_*"), default=folder / "iter_*")
    if not found.is_dir():
        raise CheckpointMismatchError(
            f"{folder} holds no {found.name}/ that Megatron-LM has written. Prepare the same model as before saving."
        )
    return found


def load(engine: MegatronEngine, folder: Path, strict: bool = True) -> None:
    """Read an engine from a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: The checkpoint, of Accelerate or of Megatron-LM. One in the format torch_dist may have been written
            with other degrees.
        strict: Whether the names must be those of the model.

    Raises:
        CheckpointMismatchError: The folder holds no such engine.
    """
    source = newest(folder)
    if (source / "metadata.json").exists():
        _load_shared(engine, source, strict)
    else:
        model_parts.load(engine, source, strict)
    engine.pending = False


def _load_shared(engine: MegatronEngine, source: Path, strict: bool) -> None:
    """Read megatron-core's own format."""
    checkpoints = _checkpoints()
    common = checkpoints.load_common_state_dict(str(source))
    with_optimizer = "optimizer" in common and not engine.plugin.no_load_optim
    metadata = checkpoints.load_content_metadata(preloaded_state_dict=common)
    try:
        state = checkpoints.load(_describe(engine, with_optimizer, True, metadata), str(source))
    except Exception as error:
        if type(error).__module__.startswith(("megatron.core.dist_checkpointing", "torch.distributed.checkpoint")):
            raise CheckpointMismatchError(f"{source} does not fit the prepared model: {error}") from error
        raise
    for name, part in parts_of(engine).items():
        part.load_state_dict(state[name], strict=strict)
    if with_optimizer:
        _load_optimizer(engine.optimizer, state["optimizer"])
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration = int(common["iteration"])
    generators = source / _random_file(engine)
    if generators.exists():
        tracker().set_states(torch.load(generators, map_location="cpu", weights_only=True))


__all__ = ["FORMATS", "LATEST", "iteration_name", "load", "newest", "save", "single_optimizers"]
