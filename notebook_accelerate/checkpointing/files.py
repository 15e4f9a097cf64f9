"""Reading and writing single files: safetensors, and torch's zip format with weights_only loading."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.torch
import torch

from notebook_accelerate.checkpointing.shared import clean_state_dict_for_safetensors
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError

_METADATA = {"format": "pt"}


def write_torch(value: Any, path: Path) -> None:
    """Write any object in torch's zip format."""
    torch.save(value, path)


def write_safetensors(value: Mapping[str, Any], path: Path) -> None:
    """Write named tensors as safetensors; of names that share their memory one is written."""
    safetensors.torch.save_file(clean_state_dict_for_safetensors(dict(value)), path, metadata=_METADATA)


WRITERS: dict[str, Callable[[Any, Path], None]] = {".safetensors": write_safetensors}
"""How a file is written, by its suffix; everything else in torch's format."""


def write(value: Any, path: Path) -> None:
    """Write `value` in the format that the file's suffix names."""
    WRITERS.get(path.suffix, write_torch)(value, path)


def read(path: Path, **options: Any) -> Any:
    """Read a file in the format that its suffix names, into CPU memory.

    Args:
        path: The file.
        options: More arguments of torch.load; ignored for safetensors, which hold nothing but tensors.

    Raises:
        BrokenCheckpointError: The file cannot be read to its end.
        CheckpointError: The file holds objects that `weights_only` loading refuses.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise BrokenCheckpointError(f"{path} is broken: {error}") from error
    return read_torch(path, **options)


def read_torch(file: str | Path | BinaryIO, map_location: Any = "cpu", **options: Any) -> Any:
    """Read a file in torch's format with `weights_only=True`; numpy arrays and numbers count as data.

    Args:
        file: The file, or what torch.load takes.
        map_location: Where tensors go; the CPU by default.
        options: More arguments of torch.load, for instance ``weights_only=False`` for a file you trust.

    Raises:
        BrokenCheckpointError: The file cannot be read to its end.
        CheckpointError: The file holds objects that `weights_only` loading refuses.
    """
    options.setdefault("weights_only", True)
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            return torch.load(file, map_location=map_location, **options)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise CheckpointError(_refusal(file, error)) from error
        detail = next(iter(str(error).splitlines()), "it ends too early")
        raise BrokenCheckpointError(f"{file} is broken: {detail}") from error


def _refusal(file: Any, error: Exception) -> str:
    detail = next(line.strip() for line in str(error).splitlines() if "GLOBAL" in line)
    return (
        f"{file} holds more than data and was not loaded ({detail}) If you trust where it comes from, allow the class: "
        "torch.serialization.add_safe_globals([TheClass]), or everything: "
        'accelerator.load_state(folder, load_kwargs={"weights_only": False}).'
    )


def numpy_globals() -> list[Any]:
    """List what pickled numpy arrays and numbers need, under the names of numpy 1 and 2."""
    core = np._core if hasattr(np, "_core") else np.core
    multiarray: Any = core.multiarray
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdFDUS"}
    plain: list[Any] = [np.ndarray, np.dtype, *sorted(dtypes, key=str)]
    for function in (multiarray._reconstruct, multiarray.scalar):
        plain += [(function, f"numpy.{package}.multiarray.{function.__name__}") for package in ("core", "_core")]
    return [*plain, _encode()]


def _encode() -> Any:
    import _codecs  # numpy numbers carry their bytes as encoded text

    return _codecs.encode
