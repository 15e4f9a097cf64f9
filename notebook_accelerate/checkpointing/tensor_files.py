"""Reads and writes single files: safetensors, and torch's zip format with `weights_only` loading."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from notebook_accelerate.big_modeling.untrusted_files import MALFORMED, broken_file
from notebook_accelerate.big_modeling.weight_files import read_torch
from notebook_accelerate.checkpointing.snapshot import is_plain_tensor
from notebook_accelerate.checkpointing.tied_tensors import clean_state_dict_for_safetensors
from notebook_accelerate.errors import BrokenCheckpointError

METADATA = {"format": "pt"}
"""The metadata that Accelerate and transformers expect in a safetensors file."""


_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""Names of dtypes in safetensors files, in the order in which safetensors sorts tensors from the end of a file."""
_ORDER = {dtype: -place for place, dtype in enumerate(_DTYPES)}
_MAX_CALL = 1 << 30
"""Bytes of one system call: macOS rejects 2 GiB."""
_JOINED = 1 << 18
"""Bytes up to which tensors are joined before they are written."""


def write_safetensors(value: Mapping[str, Any], path: Path) -> None:
    """Write named tensors as safetensors; tensors that share memory are written once.

    The files are those of safetensors.torch.save_file, which takes 30 us of Python for each tensor: 10,000 tensors of
    64 numbers take 45 ms here instead of 330 ms of processor time (safetensors 0.8).

    Raises:
        ValueError: The value is not a dictionary of tensors.
    """
    if not isinstance(value, Mapping):
        raise ValueError(
            f"safetensors files contain named tensors; got {type(value).__name__}: pass a dictionary of tensors, or "
            "safe_serialization=False"
        )
    tensors = clean_state_dict_for_safetensors(dict(value))
    known = all(is_plain_tensor(tensor) and tensor.dtype in _DTYPES for tensor in tensors.values())
    if not known or sys.byteorder != "little":
        safetensors.torch.save_file(tensors, path, metadata=METADATA)
        return
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    with path.open("wb", buffering=0) as file:
        for piece in (_header(tensors, names), *_pieces(tensors[name] for name in names)):
            _write_all(file, piece)


def _header(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> bytes:
    """Return the length of the description, and the description: JSON that ends at a multiple of eight bytes."""
    entries: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the bytes of contiguous tensors, small ones joined."""
    small: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        flat = _values(tensor)
        if flat.numel() + size > _JOINED and small:
            yield torch.cat(small).numpy().data
            small, size = [], 0
        if flat.numel() > _JOINED:
            yield flat.numpy().data
        elif flat.numel():
            small.append(flat)
            size += flat.numel()
    if small:
        yield torch.cat(small).numpy().data


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes in main memory; conjugation and negation may be pending."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().reshape(-1).view(torch.uint8)


def _write_all(file: Any, content: Any) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view[:_MAX_CALL]) :]


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
        except MALFORMED as error:  # an unknown dtype, for instance
            raise broken_file(path, error) from error
    return read_torch(path, **options)
