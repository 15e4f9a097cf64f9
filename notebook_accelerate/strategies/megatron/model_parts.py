"""The parts of a model of Megatron-LM: a file for each, in its older format, and all of them put together."""

from __future__ import annotations

import random
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.megatron import megatron_setup

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine

FILE = "model_optim_rng.pt"


def bare(chunk: Any) -> Any:
    """Take off what Megatron-LM has put around a part of a model.

    Args:
        chunk: The part.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def parts_of(engine: MegatronEngine) -> dict[str, Any]:
    """Return this rank's parts of a model, by their names in files.

    Args:
        engine: The engine.
    """
    chunks = [bare(chunk) for chunk in engine.module]
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": part for index, part in enumerate(chunks)}


def tracker() -> Any:
    """Return Megatron's generators, which ranks that share a layer's tensors draw from."""
    return import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


# ---- a file for each part


def part_name(engine: MegatronEngine) -> str:
    """Return the folder of this rank's part, as mp_rank_01 or, with stages, mp_rank_01_000.

    Args:
        engine: The engine.
    """
    groups = megatron_setup.load()
    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if engine.plugin.pp_degree > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if (engine.plugin.expert_model_parallel_size or 1) > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    return name


def save(engine: MegatronEngine, target: Path, common: dict[str, Any], with_optimizer: bool) -> None:
    """Write this rank's part, where it is the first of those that hold the same; every rank must call this.

    Args:
        engine: The engine.
        target: The folder of an iteration.
        common: What every file holds.
        with_optimizer: Whether the optimizer's state belongs to it.

    Raises:
        ValueError: The optimizer's state is shared out over ranks.
    """
    if with_optimizer and engine.plugin.use_distributed_optimizer:
        raise ValueError(
            "use_distributed_optimizer=True shares the optimizer's state out over ranks, which a file for each part of "
            "the model cannot hold; leave other_megatron_args={'ckpt_format': 'torch'} out"
        )
    groups = megatron_setup.load()
    if groups.get_data_parallel_rank() and (engine.plugin.expert_model_parallel_size or 1) == 1:
        return
    state = dict(common, rng_state=[_generators()])
    state.update({name: part.state_dict_for_save_checkpoint() for name, part in parts_of(engine).items()})
    if with_optimizer:
        state["optimizer"] = engine.optimizer.state_dict()
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    place = target / part_name(engine)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(state, place / FILE)


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the one that Megatron-LM's data are drawn from
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": cuda,
        "rng_tracker_states": tracker().get_states(),
    }


def load(engine: MegatronEngine, source: Path, strict: bool = True) -> None:
    """Read this rank's part; every rank must call this.

    Args:
        engine: The engine.
        source: The folder of an iteration, written with the same degrees.
        strict: Whether the names must be those of the model.

    Raises:
        CheckpointMismatchError: The folder holds no such part, or objects that must not be loaded unseen.
    """
    file = source / part_name(engine) / FILE
    if not file.exists():
        there = ", ".join(sorted(path.name for path in source.glob("mp_rank_*"))) or "nothing"
        raise CheckpointMismatchError(
            f"{source} holds {there}, and this rank's part is {part_name(engine)}: files of this format load with the "
            f"degrees that they were written with (now tp_degree={engine.plugin.tp_degree}, "
            f"pp_degree={engine.plugin.pp_degree}). Load it with those, and save it in the format torch_dist"
        )
    state = _read(file)
    for name, part in parts_of(engine).items():
        if name not in state:
            raise CheckpointMismatchError(f"{file} holds no {name!r}: the stages of the model were others")
        part.load_state_dict(state[name], strict=strict)
    if "optimizer" in state and not engine.plugin.no_load_optim:
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration = int(state.get("iteration", 0))
    generators = state.get("rng_state") or []
    if generators and generators[0].get("rng_tracker_states"):
        tracker().set_states(generators[0]["rng_tracker_states"])


def _read(file: Path) -> dict[str, Any]:
    """Read a file, of which nothing but tensors, plain values and Megatron's own settings is made."""
    known: list[Any] = list(import_module("megatron.core.safe_globals").SAFE_GLOBALS)
    core: Any = getattr(np, "_core", None)  # where numpy 2 has what numpy 1 wrote by another name
    if core is not None:
        known.append((core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"))
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointMismatchError(
            f"{file} holds objects that are not loaded, for loading them could run code: {error}"
        ) from error


# ---- the whole


def whole_state(engine: MegatronEngine) -> dict[str, Any]:
    """Put a model's whole state together, as one rank with degrees of 1 has it; every rank must call this.

    Args:
        engine: The engine.

    Returns:
        The state: where the degrees are 1, on every rank; else in main memory on rank 0, and nothing on other ranks.
    """
    if engine.plugin.tp_degree * engine.plugin.pp_degree == 1 and len(engine.module) == 1:
        return bare(engine.module[0]).state_dict()  # type: ignore[no-any-return]
    groups = megatron_setup.load()
    if groups.get_data_parallel_rank():
        return {}
    group, mine = groups.get_model_parallel_group(), _pieces(engine)
    first = dist.get_global_rank(group, 0)
    found: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    dist.gather_object(mine, found, dst=first, group=group)
    if found is None or dist.get_rank() != 0:
        return {}
    return _put_together([piece for pieces in found for piece in pieces], _rows(engine))


Piece = tuple[str, tuple[int, ...], tuple[int, ...], bool, torch.Tensor | None]
"""Name, shape of the whole, where the piece begins, whether it may be filled up, and the piece; None: there is none."""


def _pieces(engine: MegatronEngine) -> list[Piece]:
    """Return what this rank holds, each with its place in the whole model."""
    mapping: Any = import_module("megatron.core.dist_checkpointing.mapping")
    pieces: list[Piece] = []
    for part in parts_of(engine).values():
        layers = {name: module for name, module in part.named_modules() if hasattr(module, "layer_number")}
        empty = [name for name, value in part.state_dict().items() if value is None]
        pieces += [(_name_in_whole(name, layers), (), (), False, None) for name in empty]
        for name, described in part.sharded_state_dict().items():
            if name == "output_layer.weight" and described.key.endswith("word_embeddings.weight"):
                continue  # the last stage's copy of the embedding
            whole = [described.build()] if isinstance(described, mapping.ShardedTensorFactory) else [described]
            for tensor in _flat(whole):
                if isinstance(tensor, mapping.ShardedTensor) and tensor.data is not None:
                    skip = tensor.prepend_axis_num
                    shape, begin = tensor.global_shape[skip:], tensor.global_offset[skip:]
                    spare, data = tensor.allow_shape_mismatch, tensor.data.detach().cpu()
                    pieces.append((_name_in_whole(name, layers), shape, begin, spare, data))
    return pieces


def _flat(nested: Any) -> list[Any]:
    if isinstance(nested, dict):
        nested = list(nested.values())
    return [item for inner in nested for item in _flat(inner)] if isinstance(nested, (list, tuple)) else [nested]


def _name_in_whole(name: str, layers: dict[str, Any]) -> str:
    """Return the name that a parameter has where all layers are in one place."""
    found = re.match(r"(.*?\.?layers\.)(\d+)(\..*)", name)
    if found is None or (layer := layers.get(f"{found[1]}{found[2]}")) is None:
        return name
    return f"{found[1]}{layer.layer_number - 1}{found[3]}"


def _rows(engine: MegatronEngine) -> int:
    """Return how many rows the embedding of one rank would have."""
    models: Any = import_module("notebook_accelerate.strategies.megatron.megatron_models")
    arguments = {**vars(engine.args), "tensor_model_parallel_size": 1, "padded_vocab_size": None}
    return int(models.padded_vocabulary(arguments)) if arguments.get("orig_vocab_size") else 0


def _put_together(pieces: list[Piece], rows: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    spares = set()
    for name, shape, begin, spare, data in pieces:
        if data is None:
            state[name] = None
            continue
        if name not in state:
            state[name] = torch.empty(shape, dtype=data.dtype)
        place = tuple(slice(start, start + length) for start, length in zip(begin, data.shape, strict=True))
        state[name][place] = data
        spares |= {name} if spare else set()
    for name in spares:
        if rows and state[name].shape[0] > rows:
            state[name] = state[name][:rows].clone()
    return state


__all__ = ["FILE", "bare", "load", "part_name", "parts_of", "save", "tracker", "whole_state"]
