"""Checkpoints in Megatron-LM's formats. Megatron-LM's tools can read them, and its own checkpoints can be loaded.

    latest_checkpointed_iteration.txt     the newest iteration, as a number
    iter_0000003/                         one iteration, in one of two formats:
      metadata.json, common.pt, *.distcp    torch_dist: megatron-core's format, which also loads with other degrees
      mp_rank_00/model_optim_rng.pt         torch: a file for each part of the model; mp_rank_00_001 with stages

The format torch_dist is written by default, and MegatronLMPlugin(other_megatron_args={"ckpt_format": "torch"}) writes
the other one. Both can be read.
"""

from __future__ import annotations

import random
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine
from notebook_accelerate.strategies.megatron.megatron_setup import padded_vocabulary_size

LATEST = "latest_checkpointed_iteration.txt"
"""The file that names the newest iteration."""
FORMATS = ("torch_dist", "torch")
VERSION = 3.0
"""The version number of Megatron-LM's files, which determines the order of queries, keys and values in them."""


def save_engine(engine: MegatronEngine, folder: Path) -> None:
    """Save an engine to a folder; every rank must call this.

    Args:
        engine: The engine to save.
        folder: A folder that all ranks share.

    Raises:
        ValueError: The format in Megatron's arguments is unknown.
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
        save_part(engine, target, _common_state(engine), with_optimizer)
    else:
        state = {**_sharded_state(engine, with_optimizer, is_loading=False), **_common_state(engine)}
        _checkpoints().save(
            state, str(target), sharded_strategy=_in_process_writer(), content_metadata=_optimizer_metadata(engine)
        )
        torch.save(rng_tracker().get_states(), target / _rng_file(engine))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / LATEST).write_text(str(engine.iteration))


def load_engine(engine: MegatronEngine, folder: Path, strict: bool = True) -> None:
    """Load an engine from a folder; every rank must call this.

    Args:
        engine: The engine to load.
        folder: A checkpoint written by Accelerate or by Megatron-LM. In the format torch_dist, it may have been written
            with other degrees.
        strict: Whether all names must match the model's.

    Raises:
        CheckpointMismatchError: The folder does not contain a checkpoint of this engine.
    """
    source = newest_iteration(folder)
    if (source / "metadata.json").exists():
        _load_torch_dist(engine, source, strict)
    else:
        load_part(engine, source, strict)
    engine.pending = False


def newest_iteration(folder: Path) -> Path:
    """Return the folder of the newest iteration.

    Args:
        folder: A folder of iterations, or the folder of a single iteration.

    Raises:
        CheckpointMismatchError: The folder does not contain any iteration.
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


def iteration_name(iteration: int) -> str:
    """Return the name of an iteration's folder.

    Args:
        iteration: The number of steps taken.
    """
    return f"iter_{iteration:07d}"


def _common_state(engine: MegatronEngine) -> dict[str, Any]:
    """Return the entries that are the same in all of Megatron-LM's files.

    Arguments that are not plain values are left out.
    """
    plain = {
        name: value for name, value in vars(engine.args).items() if isinstance(value, (str, int, float, type(None)))
    }
    return {"args": Namespace(**plain), "checkpoint_version": VERSION, "iteration": engine.iteration}


def _rng_file(engine: MegatronEngine) -> str:
    return f"generators_tp{engine.plugin.tp_degree}_pp{engine.plugin.pp_degree}_rank{dist.get_rank()}.pt"


def named_parts(engine: MegatronEngine) -> dict[str, Any]:
    """Return this rank's parts of the model, by the names that they have in files.

    Args:
        engine: The engine to save or load.
    """
    chunks = [unwrap_chunk(chunk) for chunk in engine.module]
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": part for index, part in enumerate(chunks)}


def unwrap_chunk(chunk: Any) -> Any:
    """Return a part of a model without Megatron-LM's wrappers.

    Args:
        chunk: The wrapped part of the model.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def rng_tracker() -> Any:
    """Return Megatron's random number generators for layers whose tensors are split across ranks."""
    return import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


# ---- torch_dist


def _checkpoints() -> Any:
    return import_module("megatron.core.dist_checkpointing")


def _load_torch_dist(engine: MegatronEngine, source: Path, strict: bool) -> None:
    """Read a checkpoint in megatron-core's format torch_dist."""
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


def _sharded_state(
    engine: MegatronEngine, with_optimizer: bool, is_loading: bool, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sharded state dict that megatron-core saves and loads."""
    metadata = _optimizer_metadata(engine) if metadata is None else metadata
    state = {name: part.sharded_state_dict(metadata=dict(metadata)) for name, part in named_parts(engine).items()}
    if with_optimizer:
        _initialize_states(engine.optimizer, is_loading)
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading, metadata=dict(metadata))
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    return state


def _optimizer_metadata(engine: MegatronEngine) -> dict[str, Any]:
    distributed = engine.plugin.use_distributed_optimizer
    return {"distrib_optim_sharding_type": "fully_reshardable"} if distributed else {}


def _in_process_writer() -> Any:
    """Return a writer for megatron-core's format that does not start other processes.

    megatron-core's own writer forks a process for each file, and keeps a manager process. Starting the manager would
    run a script a second time if the script has no `if __name__ == "__main__"`.
    """
    formats: Any = import_module("megatron.core.dist_checkpointing.strategies.torch")
    torch_checkpoint: Any = import_module("torch.distributed.checkpoint")

    class InProcess(formats.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Writes the plan of megatron-core with torch's distributed checkpoint."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            main = self.keep_only_main_replica
            named, *_ = formats._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, main)
            torch_checkpoint.save(
                formats.mcore_to_pyt_state_dict(named, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
                planner=formats.MCoreSavePlanner(dedup_replicated_tensors=not main, flatten_state_dict=False),
            )

    return InProcess("torch_dist", 1)


def _initialize_states(optimizer: Any, is_loading: bool) -> None:
    """Create the states of torch optimizers for a checkpoint to fill. Megatron-LM itself only does so for Apex."""
    for item in single_optimizers(optimizer):
        if item.init_state_fn is None:
            item.init_state_fn = _initialize_momentum
        if is_loading and isinstance(item.optimizer, torch.optim.Adam):  # AdamW is a subclass of Adam.
            _initialize_moments(item.optimizer)


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the optimizer itself.

    Args:
        optimizer: Megatron's optimizer.
    """
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


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


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load the state of Megatron's optimizer from a checkpoint."""
    items = single_optimizers(optimizer)
    distributed = [item for item in items if type(item).__name__ == "DistributedOptimizer"]
    if not any(isinstance(item.optimizer, torch.optim.Adam) for item in distributed):
        optimizer.load_state_dict(state)
        return
    # DistributedOptimizer.load_state_dict expects the shards to contain the step counts of torch's Adam, but they do
    # not (megatron-core 0.16.1).
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
    """Remove the step counts from the state of torch's Adam inside a `with` block."""
    steps = {p: state.pop("step") for p, state in optimizer.state.items() if "step" in state}
    try:
        yield
    finally:
        for parameter, step in steps.items():
            optimizer.state[parameter]["step"] = step.clone()  # Until here, all parameters share one tensor.


# ---- the older format "torch": a file for each part of the model

FILE = "model_optim_rng.pt"


def part_name(engine: MegatronEngine) -> str:
    """Return the name of this rank's folder: mp_rank_01, or mp_rank_01_000 with pipeline stages.

    Args:
        engine: The engine whose plugin contains the degrees.
    """
    groups = megatron_setup.import_parallel_state()
    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if (engine.plugin.pp_degree or 1) > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if (engine.plugin.expert_model_parallel_size or 1) > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    return name


def save_part(engine: MegatronEngine, target: Path, common: dict[str, Any], with_optimizer: bool) -> None:
    """Write this rank's part; every rank must call this.

    If several ranks have the same part, only the first one writes it.

    Args:
        engine: The engine to save.
        target: The folder of an iteration.
        common: The entries that are the same in all files.
        with_optimizer: Whether to write the optimizer's state.

    Raises:
        ValueError: The optimizer's state is distributed across ranks.
    """
    if with_optimizer and engine.plugin.use_distributed_optimizer:
        raise ValueError(
            "use_distributed_optimizer=True shards the optimizer's state across ranks, but this format has only one "
            "file for each part of the model; leave other_megatron_args={'ckpt_format': 'torch'} out"
        )
    groups = megatron_setup.import_parallel_state()
    if groups.get_data_parallel_rank() and (engine.plugin.expert_model_parallel_size or 1) == 1:
        return
    state = dict(common, rng_state=[_generators()])
    state.update({name: part.state_dict_for_save_checkpoint() for name, part in named_parts(engine).items()})
    if with_optimizer:
        state["optimizer"] = engine.optimizer.state_dict()
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    folder = target / part_name(engine)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / FILE)


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the generator of Megatron-LM's data
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": cuda,
        "rng_tracker_states": rng_tracker().get_states(),
    }


def load_part(engine: MegatronEngine, source: Path, strict: bool = True) -> None:
    """Read this rank's part; every rank must call this.

    Args:
        engine: The engine to load.
        source: The folder of an iteration, written with the same degrees.
        strict: Whether all names must match the model's.

    Raises:
        CheckpointMismatchError: The folder does not contain this part, or it contains objects that are unsafe to load.
    """
    file = source / part_name(engine) / FILE
    if not file.exists():
        present = ", ".join(sorted(path.name for path in source.glob("mp_rank_*"))) or "nothing"
        raise CheckpointMismatchError(
            f"{source} contains {present}, but this rank's part is {part_name(engine)}: files of this format load only "
            f"with the degrees that they were written with (now tp_degree={engine.plugin.tp_degree}, "
            f"pp_degree={engine.plugin.pp_degree}). Load it with those degrees, and save it in the format torch_dist"
        )
    state = _read_safely(file)
    for name, part in named_parts(engine).items():
        if name not in state:
            raise CheckpointMismatchError(f"{file} does not contain {name!r}: the model was split into other stages")
        part.load_state_dict(state[name], strict=strict)
    if "optimizer" in state and not engine.plugin.no_load_optim:
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration = int(state.get("iteration", 0))
    generators = state.get("rng_state") or []
    if generators and generators[0].get("rng_tracker_states"):
        rng_tracker().set_states(generators[0]["rng_tracker_states"])


def _read_safely(file: Path) -> dict[str, Any]:
    """Read a file, creating only tensors, plain values and Megatron's own settings."""
    known: list[Any] = list(import_module("megatron.core.safe_globals").SAFE_GLOBALS)
    core: Any = getattr(np, "_core", None)  # Files written with numpy 1 name this module numpy.core.
    if core is not None:
        known.append((core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"))
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointMismatchError(
            f"{file} contains objects that are not loaded, because loading them could run code: {error}"
        ) from error


# ---- the whole model


def gather_state(engine: MegatronEngine) -> dict[str, Any]:
    """Gather the whole state of a model, as if a single rank had it; every rank must call this.

    Args:
        engine: The engine whose state is gathered.

    Returns:
        The state on every rank if all degrees are 1. Otherwise, the state in CPU memory on rank 0, and {} on other
        ranks.
    """
    if (engine.plugin.tp_degree, engine.plugin.pp_degree, len(engine.module)) == (1, 1, 1):
        return unwrap_chunk(engine.module[0]).state_dict()  # type: ignore[no-any-return]
    groups = megatron_setup.import_parallel_state()
    if groups.get_data_parallel_rank():
        return {}
    group, local = groups.get_model_parallel_group(), _local_pieces(engine)
    first = dist.get_global_rank(group, 0)
    found: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    dist.gather_object(local, found, dst=first, group=group)
    if found is None or dist.get_rank() != 0:
        return {}
    return _assemble([piece for pieces in found for piece in pieces], _embedding_rows(engine))


class _Piece(NamedTuple):
    """A rank's piece of an entry of the whole state."""

    name: str
    shape: tuple[int, ...] = ()
    """The shape of the whole tensor."""
    offset: tuple[int, ...] = ()
    """The index of the piece's first element."""
    padded: bool = False
    """Whether the whole tensor may be padded."""
    data: torch.Tensor | None = None
    """The piece, or None if the entry has no value."""


def _local_pieces(engine: MegatronEngine) -> list[_Piece]:
    """Return this rank's pieces of the whole state."""
    mapping: Any = import_module("megatron.core.dist_checkpointing.mapping")
    pieces: list[_Piece] = []
    for part in named_parts(engine).values():
        layers = {name: module for name, module in part.named_modules() if hasattr(module, "layer_number")}
        empty = [name for name, value in part.state_dict().items() if value is None]
        pieces += [_Piece(_global_name(name, layers)) for name in empty]
        for name, described in part.sharded_state_dict().items():
            if name == "output_layer.weight" and described.key.endswith("word_embeddings.weight"):
                continue  # This is the last stage's copy of the embedding.
            whole = [described.build()] if isinstance(described, mapping.ShardedTensorFactory) else [described]
            for tensor in _flatten(whole):
                if isinstance(tensor, mapping.ShardedTensor) and tensor.data is not None:
                    skip = tensor.prepend_axis_num
                    shape, offset = tensor.global_shape[skip:], tensor.global_offset[skip:]
                    padded, data = tensor.allow_shape_mismatch, tensor.data.detach().cpu()
                    pieces.append(_Piece(_global_name(name, layers), shape, offset, padded, data))
    return pieces


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, dict):
        nested = list(nested.values())
    return [item for inner in nested for item in _flatten(inner)] if isinstance(nested, (list, tuple)) else [nested]


def _global_name(name: str, layers: dict[str, Any]) -> str:
    """Return the name that a parameter has in a model that contains all layers."""
    found = re.match(r"(.*?\.?layers\.)(\d+)(\..*)", name)
    if found is None or (layer := layers.get(f"{found[1]}{found[2]}")) is None:
        return name
    return f"{found[1]}{layer.layer_number - 1}{found[3]}"


def _embedding_rows(engine: MegatronEngine) -> int:
    """Return the number of rows that the embedding of a model on a single rank has."""
    arguments = {**vars(engine.args), "tensor_model_parallel_size": 1, "padded_vocab_size": None}
    return padded_vocabulary_size(arguments) if arguments.get("orig_vocab_size") else 0


def _assemble(pieces: list[_Piece], rows: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    padded_names = set()
    for name, shape, offset, padded, data in pieces:
        if data is None:
            state[name] = None
            continue
        if name not in state:
            state[name] = torch.empty(shape, dtype=data.dtype)
        region = tuple(slice(start, start + length) for start, length in zip(offset, data.shape, strict=True))
        state[name][region] = data
        if padded:
            padded_names.add(name)
    for name in padded_names:
        if rows and state[name].shape[0] > rows:
            state[name] = state[name][:rows].clone()
    return state
