"""Reading and writing single files: safetensors, and torch's zip format with weights_only loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from notebook_accelerate.big_modeling.weight_files import read_torch
from notebook_accelerate.checkpointing.tied_tensors import clean_state_dict_for_safetensors
from notebook_accelerate.errors import BrokenCheckpointError

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
