"""Saves and loads single objects and model weights: `save`, `load`, `save_model`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from notebook_accelerate.big_modeling.module_tensors import get_state_dict_offloaded_model, has_offloaded_params
from notebook_accelerate.big_modeling.remote_files import weights_on_disk
from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.big_modeling.weight_files import read_index, read_torch
from notebook_accelerate.checkpointing import sharded_state_dict, tensor_files
from notebook_accelerate.checkpointing.atomic_files import atomic_write, is_writer, local_copy, make_folder
from notebook_accelerate.checkpointing.tied_tensors import clean_state_dict_for_safetensors
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state import PartialState

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_protocol import PreparedObjects


def save(
    obj: Any, f: str | os.PathLike[str] | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, on the main rank only; replaces `torch.save`.

    A path is written under another name first, and a URL (s3://, gs://, ...) is uploaded from this machine's disk: the
    file is complete or unchanged.

    Args:
        obj: The object; a dictionary of named tensors for safetensors.
        f: The path or URL, or an open binary file.
        save_on_each_node: Write on the first rank of every machine; URLs, which all machines see, on the main rank.
        safe_serialization: Write safetensors rather than torch's format.

    Raises:
        ValueError: `safe_serialization` is set and `obj` contains values other than tensors.
        CheckpointError: The file could not be written.
    """
    path = path_of(f) if isinstance(f, (str, os.PathLike)) else Path()
    if not is_writer(path, PartialState(), save_on_each_node):
        return
    if isinstance(f, (str, os.PathLike)):
        _write_file(obj, path, safe_serialization)
    elif safe_serialization:
        import safetensors.torch

        f.write(safetensors.torch.save(clean_state_dict_for_safetensors(obj), metadata=tensor_files.METADATA))
    else:
        torch.save(obj, f)


def _write_file(obj: Any, path: AnyPath, safe: bool) -> None:
    with atomic_write(path) as temporary:
        (tensor_files.write_safetensors if safe else torch.save)(obj, temporary)


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file that `save` or torch.save wrote, with `weights_only=True`; replaces `torch.load`.

    Args:
        f: The path or URL (safetensors files are recognized by their suffix), or an open binary file.
        map_location: Device of the tensors; None means the device they were saved from.
        kwargs: Arguments of torch.load, for instance ``weights_only=False`` for a file you trust.

    Returns:
        The object.

    Raises:
        CheckpointError: The file contains objects that `weights_only` loading refuses, or is broken.
    """
    if isinstance(f, (str, os.PathLike)):
        with local_copy(path_of(f)) as path:
            if path.suffix == ".safetensors":
                return tensor_files.read(path)
            return read_torch(path, map_location=map_location, **kwargs)
    return read_torch(f, map_location=map_location, **kwargs)


def save_model(
    accelerator: PreparedObjects,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model's weights, in several files if they are large; every rank must call this.

    Args:
        accelerator: The Accelerator.
        model: The model, prepared or not; parts of it may be offloaded.
        save_directory: The folder or URL; created if missing.
        max_shard_size: Largest size of a file: bytes, or "10GB".
        safe_serialization: Write safetensors rather than torch's format.

    Raises:
        ValueError: The folder is a file, the size is invalid, or the model has no weights in memory.
        CheckpointError: The files could not be written.
    """
    sharded_state_dict.parse_size(max_shard_size)
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
    # A layer may declare an extra state and leave it empty (None).
    filled = {name: value for name, value in state.items() if value is not None}
    write_weights(filled, folder, max_shard_size, safe_serialization)


def write_weights(state: Mapping[str, Any], folder: AnyPath, max_shard_size: int | str, safe: bool) -> list[str]:
    """Write named tensors into a folder: weights, then the index; then remove the other weights of an earlier save.

    Args:
        state: The tensors.
        folder: An existing folder.
        max_shard_size: Largest size of a file: bytes, or "10GB".
        safe: Write safetensors rather than torch's format.

    Returns:
        The names of the files.
    """
    pattern = constants.SAFE_WEIGHTS_PATTERN_NAME if safe else constants.WEIGHTS_PATTERN_NAME
    index_name = constants.SAFE_WEIGHTS_INDEX_NAME if safe else constants.WEIGHTS_INDEX_NAME
    state = clean_state_dict_for_safetensors(dict(state)) if safe else state
    parts = sharded_state_dict.split_into_shards(state, max_shard_size)
    named = dict(zip(sharded_state_dict.shard_names(pattern, len(parts)), parts, strict=True))
    for name, part in named.items():
        _write_file(part, folder / name, safe)
    written = list(named)
    if len(named) > 1:
        with atomic_write(folder / index_name) as temporary:
            # Formatted as Accelerate and transformers do.
            index = json.dumps(sharded_state_dict.build_index(named), indent=2, sort_keys=True)
            temporary.write_text(f"{index}\n", encoding="utf-8")
        written.append(index_name)
    _remove_stale(folder, pattern, index_name, set(written))
    return written


def _remove_stale(folder: AnyPath, pattern: str, index_name: str, keep: set[str]) -> None:
    """Remove shards of an earlier save: readers would treat them as parts of this one."""
    expression = re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d{5}-of-\d{5})?")
    for path in folder.iterdir():
        weights = path.name == index_name or re.fullmatch(expression, path.name)
        if weights and path.name not in keep:
            path.unlink()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model's weights from a file, an index, or a folder with either of them.

    Args:
        path: The file, the ``.index.json``, or the folder; or its URL.

    Returns:
        The named tensors.

    Raises:
        ValueError: The folder contains no weights.
        CheckpointError: A file is broken, or an index names one outside its folder.
    """
    found = weights_on_disk(_find_weights(path_of(path)))
    if not found.name.endswith(".index.json"):
        return dict(tensor_files.read(found))
    weight_map = read_index(found)
    parts: dict[Path, dict[str, Any]] = {file: tensor_files.read(file) for file in sorted(set(weight_map.values()))}
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
    raise ValueError(f"{path} contains no weights: it has none of {', '.join(names)}; pass the folder of save_model")
