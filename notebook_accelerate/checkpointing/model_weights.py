"""Save and load single objects and model weights: `save`, `load` and `save_model`."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from notebook_accelerate.big_modeling.checkpoint_shards import weights_on_disk
from notebook_accelerate.big_modeling.module_tensors import get_state_dict_offloaded_model, has_offloaded_params
from notebook_accelerate.checkpointing.single_files import (
    METADATA,
    atomic_write,
    clean_state_dict_for_safetensors,
    is_writer,
    local_copy,
    make_folder,
    memory_key,
    read_file,
    write_safetensors,
)
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath, path_of
from notebook_accelerate.files.temporary_folders import scratch_folder
from notebook_accelerate.files.weight_files import inside, plain_data_only, read_index, read_torch
from notebook_accelerate.state import PartialState
from notebook_accelerate.strategies.sharding.sharded_checkpoint import read_metadata_in

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties


def save(
    obj: Any, f: str | os.PathLike[str] | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file on the main rank. Use this instead of `torch.save`.

    The file is never incomplete, because the object is first written under a temporary name or, for a URL (s3://,
    gs://, ...), to this machine's disk. The complete file is then renamed or uploaded.

    Args:
        obj: The object to write. For safetensors, it must be a dictionary of named tensors.
        f: A path, a URL, or an open binary file.
        save_on_each_node: Whether to write on the first rank of each machine. If `f` is a URL, only the main rank
            writes, because all machines see the same store.
        safe_serialization: Whether to write safetensors instead of torch's format.

    Raises:
        ValueError: `safe_serialization` is True, but `obj` contains values other than tensors.
        CheckpointError: The file could not be written.
    """
    path = path_of(f) if isinstance(f, (str, os.PathLike)) else Path()
    if not is_writer(path, PartialState(), save_on_each_node):
        return
    if isinstance(f, (str, os.PathLike)):
        _write_weights(obj, path, safe_serialization)
    elif safe_serialization:
        import safetensors.torch

        f.write(safetensors.torch.save(clean_state_dict_for_safetensors(obj), metadata=METADATA))
    else:
        torch.save(obj, f)


def _write_weights(obj: Any, path: AnyPath, safe: bool) -> None:
    with atomic_write(path) as temporary:
        (write_safetensors if safe else torch.save)(obj, temporary)


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file written by `save` or `torch.save`. Use this instead of `torch.load`.

    Args:
        f: A path or URL (safetensors files are recognized by their suffix), or an open binary file.
        map_location: The device to put the tensors on. If None, each tensor is put on the device it was saved from.
        kwargs: Further arguments for `torch.load`. `weights_only` is True by default; pass ``weights_only=False`` only
            for a file that you trust.

    Returns:
        The object that was saved.

    Raises:
        CheckpointError: The file is corrupt, or contains objects that `weights_only` loading rejects.
    """
    if isinstance(f, (str, os.PathLike)):
        with local_copy(path_of(f)) as path:
            if path.suffix == ".safetensors":
                return read_file(path)
            return read_torch(path, map_location=map_location, **kwargs)
    return read_torch(f, map_location=map_location, **kwargs)


def save_model(
    accelerator: AcceleratorProperties,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model's weights, split into several files if they are large; every rank must call this.

    Args:
        accelerator: The Accelerator of this rank.
        model: The model to save, prepared or not. Parts of it may be offloaded.
        save_directory: The folder or URL, which is created if it does not exist.
        max_shard_size: The maximum size of a file, in bytes or as a string such as "10GB".
        safe_serialization: Whether to write safetensors instead of torch's format.

    Raises:
        ValueError: The path is an existing file, the size is invalid, or the model has no weights in memory.
        CheckpointError: The files could not be written.
    """
    parse_size(max_shard_size)
    folder = path_of(save_directory)
    if folder.is_file():
        raise ValueError(
            f'Provided path ({folder}) should be a directory, not a file: accelerator.save_model(model, "my_model")'
        )
    offloaded = any(has_offloaded_params(module) for module in model.modules())
    state = get_state_dict_offloaded_model(model) if offloaded else accelerator.get_state_dict(model)
    if state is None or not is_writer(folder, accelerator, accelerator.project_configuration.save_on_each_node):
        return
    if missing := [name for name, tensor in state.items() if getattr(tensor, "is_meta", False)]:
        raise ValueError(
            f"The model has no weights for {', '.join(missing[:5])}: they are on the meta device. Load them before "
            "accelerator.save_model: load_checkpoint_in_model(model, folder)"
        )
    make_folder(folder)
    # A layer may declare an extra state but leave it empty (None).
    filled = {name: value for name, value in state.items() if value is not None}
    write_weights(filled, folder, max_shard_size, safe_serialization)


def write_weights(state: Mapping[str, Any], folder: AnyPath, max_shard_size: int | str, safe: bool) -> list[str]:
    """Write named tensors and their index to a folder, then remove the weights that an earlier save has left there.

    Args:
        state: The tensors, by name.
        folder: The folder to write to, which must exist.
        max_shard_size: The maximum size of a file, in bytes or as a string such as "10GB".
        safe: Whether to write safetensors instead of torch's format.

    Returns:
        The names of the files with weights.
    """
    pattern = constants.SAFE_WEIGHTS_PATTERN_NAME if safe else constants.WEIGHTS_PATTERN_NAME
    index_name = constants.SAFE_WEIGHTS_INDEX_NAME if safe else constants.WEIGHTS_INDEX_NAME
    state = clean_state_dict_for_safetensors(dict(state)) if safe else state
    parts = split_into_shards(state, max_shard_size)
    named = dict(zip(shard_names(pattern, len(parts)), parts, strict=True))
    for name, part in named.items():
        _write_weights(part, folder / name, safe)
    written = list(named)
    if len(named) > 1:
        with atomic_write(folder / index_name) as temporary:
            # Use the same format as Accelerate and transformers.
            index = json.dumps(build_index(named), indent=2, sort_keys=True)
            temporary.write_text(f"{index}\n", encoding="utf-8")
        written.append(index_name)
    _remove_stale(folder, pattern, index_name, set(written))
    return written


def _remove_stale(folder: AnyPath, pattern: str, index_name: str, keep: set[str]) -> None:
    """Remove the shards of an earlier save. Otherwise, readers would mistake the old shards for parts of this save."""
    expression = re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d{5}-of-\d{5})?")
    for path in folder.iterdir():
        weights = path.name == index_name or re.fullmatch(expression, path.name)
        if weights and path.name not in keep:
            path.unlink()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model's weights from a file, an index, or a folder that contains one of them.

    Args:
        path: The path or URL of the file, the ``.index.json``, or the folder.

    Returns:
        The tensors, by name.

    Raises:
        ValueError: The folder contains no weights.
        CheckpointError: A file is corrupt, or an index lists a file outside its folder.
    """
    found = weights_on_disk(_find_weights(path_of(path)))
    if not found.name.endswith(".index.json"):
        return dict(read_file(found))
    weight_map = read_index(found)
    parts: dict[Path, dict[str, Any]] = {file: read_file(file) for file in sorted(set(weight_map.values()))}
    if missing := [name for name, file in weight_map.items() if name not in parts[file]]:
        raise CheckpointError(f"{found} names weights that its files do not contain: {', '.join(missing[:5])}")
    return {name: parts[file][name] for name, file in weight_map.items()}


def _find_weights(path: AnyPath) -> AnyPath:
    if path.is_file():
        return path
    names = (
        constants.SAFE_WEIGHTS_NAME,
        constants.SAFE_WEIGHTS_INDEX_NAME,
        constants.WEIGHTS_NAME,
        constants.WEIGHTS_INDEX_NAME,
    )
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ValueError(f"{path} contains no weights (none of {', '.join(names)}); pass the folder that save_model wrote")


# ---- splitting weights into several files, with an index that maps each name to its file

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
        size: The number of bytes, or a number with a unit: "10GB" (powers of 1000) or "5MiB" (powers of 1024).

    Raises:
        ValueError: The value is not a positive size.
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
    """The names of the tensors in one file, and their total size in bytes."""

    names: list[str] = field(default_factory=list)
    size: int = 0


def split_into_shards(state: Mapping[str, Any], max_shard_size: int | str) -> list[dict[str, Any]]:
    """Split named tensors into files of a limited size, keeping their order. Tensors that share memory stay together.

    Args:
        state: The tensors, by name.
        max_shard_size: The maximum size of a file, in bytes or as a string such as "10GB". A larger tensor gets a
            separate file.

    Returns:
        A dictionary of named tensors for each file. There is at least one dictionary.
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
    """Return the file names of shards, such as ``model-00001-of-00003.safetensors``. A single file has no number.

    Args:
        pattern: A file name with the placeholder ``{suffix}``.
        count: The number of files.
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
    """Split a model's weights into files of a limited size.

    Args:
        state_dict: The model's tensors, by name.
        max_shard_size: The maximum size of a file, in bytes or as a string such as "10GB".
        weights_name: The name of the file if one file is enough. In the names of shards, a number is inserted before
            the suffix.

    Returns:
        The named tensors by file name, and the content of the index, or None if one file is enough.
    """
    stem, dot, suffix = weights_name.rpartition(".")
    parts = split_into_shards(state_dict, max_shard_size)
    shards = dict(zip(shard_names(f"{stem}{{suffix}}{dot}{suffix}", len(parts)), parts, strict=True))
    return shards, (build_index(shards) if len(shards) > 1 else None)


# ---- merging a sharded model into whole files

_METADATA = ".metadata"


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a sharded model to whole files, on the main rank.

    Args:
        checkpoint_dir: The folder or URL of pytorch_model_fsdp_0, or of the checkpoint that contains it.
        output_path: The folder or URL for model.safetensors or pytorch_model.bin, which is created if it does not
            exist.
        safe_serialization: Whether to write safetensors instead of torch's format.
        remove_checkpoint_dir: Whether to remove the sharded folder afterwards.

    Raises:
        ValueError: The folder contains no sharded model, or more than one.
        CheckpointError: The store could not be read, its metadata contains more than plain data, or the files could not
            be written.
    """
    if not PartialState().is_main_process:
        return
    shards, output = _shards_in(path_of(checkpoint_dir)), path_of(output_path)
    make_folder(output)
    # If the output is local, put the temporary file, which is as large as the result, on the same disk.
    scratch: AbstractContextManager[str | Path] = (
        tempfile.TemporaryDirectory(dir=output) if isinstance(output, Path) else scratch_folder()
    )
    with scratch as temporary, _local_folder(shards) as folder:
        whole = Path(temporary) / "whole.bin"
        _write_whole(folder, whole)
        state = read_torch(whole, map_location="cpu")
        write_weights(state.get("model", state), output, "10GB", safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(shards) if isinstance(shards, Path) else shards.remove_tree()


def _write_whole(folder: Path, whole: Path) -> None:
    """Merge the shards in a folder into one file."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    read_metadata_in(folder)
    try:
        with plain_data_only():
            dcp_to_torch_save(folder, whole)
    except CheckpointException as error:  # This class is not derived from Exception.
        raise error.failures[0][0] from error


@contextmanager
def _local_folder(shards: AnyPath) -> Iterator[Path]:
    """Yield a folder on the disk that contains the files: `shards` itself, or a temporary copy of a remote folder."""
    if isinstance(shards, Path):
        yield shards
        return
    with scratch_folder() as folder:
        for name in shards.files():
            (shards / name).download(inside(folder, name))
        yield folder


def _shards_in(folder: AnyPath) -> AnyPath:
    if (folder / _METADATA).is_file():
        return folder
    prefix = f"{constants.FSDP_MODEL_NAME}_"
    entries: list[AnyPath] = sorted(folder.iterdir(), key=str) if folder.is_dir() else []
    inner = [entry for entry in entries if entry.name.startswith(prefix) and (entry / _METADATA).is_file()]
    if len(inner) == 1:
        return inner[0]
    found = ", ".join(path.name for path in inner) or "no sharded model"
    raise ValueError(
        f"{folder} contains {found}; pass the folder of one model, which save_state writes with SHARDED_STATE_DICT: "
        f'merge_fsdp_weights("checkpoint/{constants.FSDP_MODEL_NAME}_0", "merged")'
    )
