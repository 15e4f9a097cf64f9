"""Reads and writes single files: safetensors, and torch's zip format with `weights_only` loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from notebook_accelerate.big_modeling.weight_files import read_torch
from notebook_accelerate.checkpointing.tied_tensors import clean_state_dict_for_safetensors
from notebook_accelerate.errors import BrokenCheckpointError

METADATA = {"format": "pt"}
"""The metadata that Accelerate and transformers expect in a safetensors file."""


def write_safetensors(value: Mapping[str, Any], path: Path) -> None:
    """Write named tensors as safetensors; tensors that share memory are written once."""
    safetensors.torch.save_file(clean_state_dict_for_safetensors(dict(value)), path, metadata=METADATA)


def write(value: Any, path: Path) -> None:
    """Write `value` as safetensors if the file has that suffix, otherwise in torch's format."""
    (write_safetensors if path.suffix == ".safetensors" else torch.save)(value, path)


def read(path: Path, **options: Any) -> Any:
    """Read a file in the format of its suffix, into CPU memory.

    Args:
        path: The file.
        options: Arguments of torch.load; ignored for safetensors, which contain only tensors.

    Raises:
        BrokenCheckpointError: The file is truncated or damaged.
        CheckpointError: The file contains objects that `weights_only` loading refuses.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise BrokenCheckpointError(f"{path} is broken: {error}") from error
    return read_torch(path, **options)
