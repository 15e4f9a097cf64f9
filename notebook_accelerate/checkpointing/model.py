"""Single objects and model weights on disk: `save`, `load`, `save_model`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from notebook_accelerate.big_modeling.files import read_index, read_torch
from notebook_accelerate.checkpointing import files, shards, staging
from notebook_accelerate.checkpointing.shared import clean_state_dict_for_safetensors
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state import PartialState

_PARTIAL = ".partial"


def save(
    obj: Any, f: str | os.PathLike[str] | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, on the main rank only; in place of `torch.save`.

    A path is written under another name first: the file is complete or what it was before.

    Args:
        obj: The object; named tensors where it goes to safetensors.
        f: The path, or an open binary file.
        save_on_each_node: Write on the first rank of every machine.
        safe_serialization: Write safetensors rather than torch's format.

    Raises:
        ValueError: safetensors are asked for and `obj` holds more than named tensors.
        CheckpointError: The file could not be written.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, (str, os.PathLike)):
        _save_to_stream(obj, f, safe_serialization)
        return
    _write_whole(obj, Path(f), safe_serialization)


def _save_to_stream(obj: Any, stream: BinaryIO, safe: bool) -> None:
    if not safe:
        torch.save(obj, stream)
        return
    import safetensors.torch

    stream.write(safetensors.torch.save(clean_state_dict_for_safetensors(obj), metadata={"format": "pt"}))


def _write_whole(obj: Any, path: Path, safe: bool) -> None:
    """Write beside the place, wait for the disk, rename."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        (files.write_safetensors if safe else files.write_torch)(obj, partial)
        staging.sync_file(partial)
        partial.replace(path)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, (ValueError, AttributeError, TypeError)):  # the object's fault, not the disk's
            raise
        raise staging.write_error(path, error) from error


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file that `save` or torch.save wrote, with `weights_only=True`; in place of `torch.load`.

    Args:
        f: The path (safetensors are known by their suffix), or an open binary file.
        map_location: Where tensors go; None means where they were.
        kwargs: More arguments of torch.load, for instance ``weights_only=False`` for a file you trust.

    Returns:
        The object.

    Raises:
        CheckpointError: The file holds objects that `weights_only` loading refuses, or is broken.
    """
    if isinstance(f, (str, os.PathLike)):
        path = Path(f)
        if path.suffix == ".safetensors":
            return files.read(path)
        return read_torch(path, map_location=map_location, **kwargs)
    return read_torch(f, map_location=map_location, **kwargs)


def save_model(
    accelerator: Any,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model's weights, in shards where they are large; every rank must call this.

    Args:
        accelerator: The Accelerator.
        model: The model, prepared or not.
        save_directory: The folder; made where it does not exist.
        max_shard_size: Largest size of a file: bytes, or "10GB".
        safe_serialization: Write safetensors rather than torch's format.

    Raises:
        ValueError: The folder is a file, the size is none, or the model has no weights in memory.
        CheckpointError: The files could not be written.
    """
    shards.bytes_of(max_shard_size)
    folder = Path(save_directory)
    if folder.is_file():
        raise ValueError(f"Provided path ({folder}) should be a directory, not a file")
    state = accelerator.get_state_dict(model)
    if not (_saves(accelerator) and state is not None):
        return
    if missing := [name for name, tensor in state.items() if getattr(tensor, "is_meta", False)]:
        raise ValueError(f"The model has no weights for {', '.join(missing[:5])}: load them before save_model.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise staging.write_error(folder, error) from error
    write_weights(state, folder, max_shard_size, safe_serialization)


def _saves(accelerator: Any) -> bool:
    project = accelerator.project_configuration
    return bool(accelerator.is_local_main_process if project.save_on_each_node else accelerator.is_main_process)


def write_weights(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, safe: bool) -> list[str]:
    """Write named tensors into a folder; the index last, then files of an earlier save that it does not name go.

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
    parts = shards.split_into_shards(state, max_shard_size)
    named = dict(zip(shards.shard_names(pattern, len(parts)), parts, strict=True))
    for name, part in named.items():
        _write_whole(part, folder / name, safe)
    written = list(named)
    if len(named) > 1:
        _write_text(folder / index_name, shards.index_text(shards.index_of(named)))
        written.append(index_name)
    _remove_others(folder, pattern, index_name, set(written))
    return written


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    try:
        partial.write_text(text, encoding="utf-8")
        staging.sync_file(partial)
        partial.replace(path)
    except OSError as error:
        raise staging.write_error(path, error) from error


def _remove_others(folder: Path, pattern: str, index_name: str, keep: set[str]) -> None:
    """Remove shards of an earlier save: readers take them for parts of this one."""
    expression = re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d{5}-of-\d{5})?")
    for path in folder.iterdir():
        ours = path.name == index_name or re.fullmatch(expression, path.name)
        if ours and path.name not in keep:
            path.unlink()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model's weights from a file, an index, or a folder that holds either.

    Args:
        path: The file, the ``.index.json``, or the folder.

    Returns:
        The named tensors.

    Raises:
        ValueError: There are no weights.
        CheckpointError: A file is broken, or an index names one outside its folder.
    """
    found = _weights_in(Path(path))
    if not found.name.endswith(".index.json"):
        return dict(files.read(found))
    weight_map = read_index(found)
    parts: dict[Path, dict[str, Any]] = {file: files.read(file) for file in sorted(set(weight_map.values()))}
    if missing := [name for name, file in weight_map.items() if name not in parts[file]]:
        raise CheckpointError(f"{found} names weights that its files do not hold: {', '.join(missing[:5])}")
    return {name: parts[file][name] for name, file in weight_map.items()}


def _weights_in(path: Path) -> Path:
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
    raise ValueError(f"{path} holds no weights: none of {', '.join(names)} is there")
