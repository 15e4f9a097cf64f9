"""Checkpoints of Megatron-LM in its own folders: its tools read them, and its checkpoints load here.

    latest_checkpointed_iteration.txt     the newest_iteration iteration, as a number
    iter_0000003/                         one iteration, in one of two formats:
      metadata.json, common.pt, *.distcp    torch_dist: megatron-core's, which loads with other degrees too
      mp_rank_00/model_optim_rng.pt         torch: a file for each part of the model; mp_rank_00_001 with stages

MegatronLMPlugin(other_megatron_args={"ckpt_format": "torch"}) writes the second; both are read.
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
from notebook_accelerate.strategies.megatron import megatron_models
from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine
from notebook_accelerate.strategies.megatron.megatron_models import named_parts, rng_tracker

LATEST = "latest_checkpointed_iteration.txt"
"""The file that names the newest_iteration iteration."""
FORMATS = ("torch_dist", "torch")
VERSION = 3.0
"""Version of the order of queries, keys and values in Megatron-LM's files."""


def _checkpoints() -> Any:
    return import_module("megatron.core.dist_checkpointing")


def _in_process_writer() -> Any:
    """Return a writer of megatron-core's format that works in this process.

    megatron-core's own writer forks a process for each file and keeps a manager process, which runs a script without
    `if __name__ == "__main__"` again.
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


def _optimizer_metadata(engine: MegatronEngine) -> dict[str, Any]:
    distributed = engine.plugin.use_distributed_optimizer
    return {"distrib_optim_sharding_type": "fully_reshardable"} if distributed else {}


def _sharded_state(
    engine: MegatronEngine, with_optimizer: bool, is_loading: bool, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sharded state dict of megatron-core's checkpoints."""
    metadata = _optimizer_metadata(engine) if metadata is None else metadata
    state = {name: part.sharded_state_dict(metadata=dict(metadata)) for name, part in named_parts(engine).items()}
    if with_optimizer:
        _initialize_states(engine.optimizer, is_loading)
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading, metadata=dict(metadata))
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    return state


def _initialize_states(optimizer: Any, is_loading: bool) -> None:
    """Initialize the states of torch's optimizers, which a checkpoint fills; Megatron-LM does so for Apex only."""
    for item in single_optimizers(optimizer):
        if item.init_state_fn is None:
            item.init_state_fn = _initialize_momentum
        if is_loading and isinstance(item.optimizer, torch.optim.Adam):  # AdamW is one too
            _initialize_moments(item.optimizer)


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the optimizer itself.

    Args:
        optimizer: Megatron's optimizer.
    """
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load a checkpoint's state of Megatron's optimizer."""
    items = single_optimizers(optimizer)
    distributed = [item for item in items if type(item).__name__ == "DistributedOptimizer"]
    if not any(isinstance(item.optimizer, torch.optim.Adam) for item in distributed):
        optimizer.load_state_dict(state)
        return
    # Its load_state_dict expects the steps of torch's Adam among the shards, which do not have them (0.16.1).
    states = [state] if len(items) == 1 else [one for _, one in sorted(state.items())]
    for item, one in zip(items, states, strict=True):
        item.load_state_dict({name: value for name, value in one.items() if not name.startswith("param_state")})
        with _steps_removed(item.optimizer):
            getattr(item, _SHARD_LOADERS[one["param_state_sharding_type"]])(one["param_state"])


_SHARD_LOADERS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "fully_sharded_model_space": "load_parameter_state_from_fs_model_space",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
}


@contextmanager
def _steps_removed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Remove the steps from the state of torch's Adam inside a with block."""
    steps = {p: state.pop("step") for p, state in optimizer.state.items() if "step" in state}
    try:
        yield
    finally:
        for parameter, step in steps.items():
            optimizer.state[parameter]["step"] = step.clone()  # the shards shared one tensor


def _initialize_momentum(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _initialize_moments(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))


def save_engine(engine: MegatronEngine, folder: Path) -> None:
    """Write an engine into a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: A folder shared by all ranks.

    Raises:
        ValueError: The format is not known.
    """
    kind = getattr(engine.args, "ckpt_format", None) or FORMATS[0]
    if kind not in FORMATS:
        raise ValueError(
            f"other_megatron_args={{'ckpt_format': {kind!r}}} is not known; pass one of {', '.join(map(repr, FORMATS))}"
        )
    target = folder / iteration_name(engine.iteration)
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with_optimizer = engine.iteration > 0 and not engine.plugin.no_save_optim
    if kind == "torch":
        megatron_models.save_part(engine, target, _common_state(engine), with_optimizer)
    else:
        state = {**_sharded_state(engine, with_optimizer, is_loading=False), **_common_state(engine)}
        _checkpoints().save(
            state, str(target), sharded_strategy=_in_process_writer(), content_metadata=_optimizer_metadata(engine)
        )
        torch.save(rng_tracker().get_states(), target / _rng_file(engine))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / LATEST).write_text(str(engine.iteration))


def iteration_name(iteration: int) -> str:
    """Return the folder of an iteration.

    Args:
        iteration: Number of steps taken.
    """
    return f"iter_{iteration:07d}"


def _common_state(engine: MegatronEngine) -> dict[str, Any]:
    """Return the entries that all files of Megatron-LM share; of the arguments only plain values."""
    plain = {
        name: value for name, value in vars(engine.args).items() if isinstance(value, (str, int, float, type(None)))
    }
    return {"args": Namespace(**plain), "checkpoint_version": VERSION, "iteration": engine.iteration}


def _rng_file(engine: MegatronEngine) -> str:
    return f"generators_tp{engine.plugin.tp_degree}_pp{engine.plugin.pp_degree}_rank{dist.get_rank()}.pt"


def newest_iteration(folder: Path) -> Path:
    """Return the folder of the iteration to read.

    Args:
        folder: A folder of iterations, or of one iteration.

    Raises:
        CheckpointMismatchError: The folder contains no iteration.
    """
    if (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        return folder
    if (folder / LATEST).exists():
        latest = (folder / LATEST).read_text().strip()
        found = folder / (iteration_name(int(latest)) if latest.isdecimal() else latest)
    else:
        found = max(folder.glob("iter_*"), default=folder / "iter_*")
    if not found.is_dir():
        raise CheckpointMismatchError(
            f"{folder} contains no {found.name}/ written by Megatron-LM. Prepare the same model as before saving."
        )
    return found


def load_engine(engine: MegatronEngine, folder: Path, strict: bool = True) -> None:
    """Read an engine from a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: The checkpoint, of Accelerate or of Megatron-LM; in the format torch_dist also with other degrees.
        strict: Whether the names must be those of the model.

    Raises:
        CheckpointMismatchError: The folder contains no such engine.
    """
    source = newest_iteration(folder)
    if (source / "metadata.json").exists():
        _load_torch_dist(engine, source, strict)
    else:
        megatron_models.load_part(engine, source, strict)
    engine.pending = False


def _load_torch_dist(engine: MegatronEngine, source: Path, strict: bool) -> None:
    """Read megatron-core's format torch_dist."""
    checkpoints = _checkpoints()
    common = checkpoints.load_common_state_dict(str(source))
    with_optimizer = "optimizer" in common and not engine.plugin.no_load_optim
    metadata = checkpoints.load_content_metadata(preloaded_state_dict=common)
    try:
        state = checkpoints.load(_sharded_state(engine, with_optimizer, True, metadata), str(source))
    except Exception as error:
        if type(error).__module__.startswith(("megatron.core.dist_checkpointing", "torch.distributed.checkpoint")):
            raise CheckpointMismatchError(f"{source} does not fit the prepared model: {error}") from error
        raise
    for name, part in named_parts(engine).items():
        part.load_state_dict(state[name], strict=strict)
    if with_optimizer:
        _load_optimizer(engine.optimizer, state["optimizer"])
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration = int(common["iteration"])
    generators = source / _rng_file(engine)
    if generators.exists():
        rng_tracker().set_states(torch.load(generators, map_location="cpu", weights_only=True))
