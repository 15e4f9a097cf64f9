"""A state dict in several files, with an index that maps each name to its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.checkpointing.tied_tensors import memory_key

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Convert a size to bytes.

    Args:
        size: Bytes, or a number with a unit: "10GB" (powers of 1000) or "5MiB" (powers of 1024).

    Raises:
        ValueError: It is not a positive size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(
            f"max_shard_size={size!r} is not a size; pass a positive number of bytes, or a number with a unit (KB, MB, "
            'GB, TB, KiB, MiB, GiB, TiB): max_shard_size="10GB"'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass
class _Shard:
    """Names and total bytes of the tensors of one file."""

    names: list[str] = field(default_factory=list)
    size: int = 0


def split_into_shards(state: Mapping[str, Any], max_shard_size: int | str) -> list[dict[str, Any]]:
    """Divide named tensors among files of a limited size, in order of names; tensors that share memory stay together.

    Args:
        state: Named tensors.
        max_shard_size: Bytes or "10GB"; a tensor above the limit gets a file of its own.

    Returns:
        One dictionary per file; at least one.
    """
    limit = parse_size(max_shard_size)
    shards = [_Shard()]
    shard_of: dict[Any, _Shard] = {}
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        memory = memory_key(tensor) if size else None
        if memory in shard_of:
            shard_of[memory].names.append(name)
            continue
        if shards[-1].names and shards[-1].size + size > limit:
            shards.append(_Shard())
        shards[-1].names.append(name)
        shards[-1].size += size
        if memory is not None:
            shard_of[memory] = shards[-1]
    return [{name: state[name] for name in shard.names} for shard in shards]


def shard_names(pattern: str, count: int) -> list[str]:
    """Return the file names of shards: ``model-00001-of-00003.safetensors``; a single file has no number.

    Args:
        pattern: File name with the placeholder ``{suffix}``.
        count: Number of files.
    """
    if count == 1:
        return [pattern.format(suffix="")]
    return [pattern.format(suffix=f"-{number:05d}-of-{count:05d}") for number in range(1, count + 1)]


def build_index(shards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the index file.

    Args:
        shards: The named tensors of each file, by file name.
    """
    tensors = [tensor for shard in shards.values() for tensor in shard.values()]
    distinct = {(memory_key(tensor), tensor.shape, tensor.storage_offset(), tensor.dtype): tensor for tensor in tensors}
    total = sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def shard_checkpoint(
    state_dict: dict[str, torch.Tensor], max_shard_size: int | str = "10GB", weights_name: str = "pytorch_model.bin"
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any] | None]:
    """Divide a model's weights among files of a limited size.

    Args:
        state_dict: Named tensors.
        max_shard_size: Bytes or "10GB".
        weights_name: Name of the file when one is enough; shards have their number before its suffix.

    Returns:
        The named tensors by file name, and the content of the index; None where one file is enough.
    """
    stem, dot, suffix = weights_name.rpartition(".")
    parts = split_into_shards(state_dict, max_shard_size)
    shards = dict(zip(shard_names(f"{stem}{{suffix}}{dot}{suffix}", len(parts)), parts, strict=True))
    return shards, (build_index(shards) if len(shards) > 1 else None)
