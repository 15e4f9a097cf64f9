"""Read and write single files in safetensors' or torch's format. Files are written completely, or left unchanged."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.checkpointing.snapshot import is_plain_tensor
from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.files.temporary_folders import scratch_folder
from notebook_accelerate.files.untrusted_files import MALFORMED, broken_file
from notebook_accelerate.files.weight_files import read_torch

if TYPE_CHECKING:
    from notebook_accelerate.state.rank_execution import RankExecution

_LOG = accelerate_logger("utils.other")
_PARTIAL = ".partial"
_DISK_FULL = (28, 122)
"""The error codes of a full disk: ENOSPC (no space left) and EDQUOT (quota exceeded)."""
_NEARLY_FULL = 1 << 20
METADATA = {"format": "pt"}
"""The metadata that Accelerate and transformers expect in safetensors files."""
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""The names of dtypes in safetensors files. The format sorts the tensors in a file by dtype, in reverse order."""
_ORDER = {dtype: -place for place, dtype in enumerate(_DTYPES)}
_MAX_CALL = 1 << 30
"""The maximum number of bytes to write in one system call, because macOS rejects 2 GiB."""
_JOINED = 1 << 18
"""Tensors of at most this many bytes are joined before they are written."""


def write_file(value: Any, path: Path) -> None:
    """Write a value to a file, as safetensors if the file's suffix says so, otherwise in torch's format."""
    (write_safetensors if path.suffix == ".safetensors" else torch.save)(value, path)


def read_file(path: Path, **options: Any) -> Any:
    """Read a file into CPU memory, in the format that its suffix indicates.

    Args:
        path: The file to read.
        options: Arguments for `torch.load`. They are ignored for safetensors files, which contain only tensors.

    Raises:
        BrokenCheckpointError: The file is truncated or damaged.
        CheckpointError: The file contains objects that `weights_only` loading rejects.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise BrokenCheckpointError(f"{path} is broken: {error}") from error
        except MALFORMED as error:  # For example, a dtype is unknown.
            raise broken_file(path, error) from error
    return read_torch(path, **options)


# ---- writing files completely, or leaving them unchanged


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end of the block. If the block raises, `path` is unchanged.

    Args:
        path: The destination. If it is a URL, the file is uploaded at the end of the block.

    Raises:
        CheckpointError: The file could not be written or uploaded.
    """
    if not isinstance(path, Path):
        with scratch_folder() as folder:
            with _as_checkpoint_error(folder):
                yield folder / path.name
            path.upload(folder / path.name)
        return
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _as_checkpoint_error(path):
            yield partial
            sync_file(partial)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, AttributeError, TypeError, pickle.PicklingError):
        raise  # These errors are caused by the object, not by the disk.
    except Exception as error:
        raise write_error(path, error) from error


def write_text(path: AnyPath, text: str) -> None:
    """Write a small file atomically: readers see either all of its text or none.

    Args:
        path: The file to write, local or remote.
        text: The content to write.
    """
    if not isinstance(path, Path):
        path.write_text(text)
        return
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Yield a file on the disk to read: `path` itself, or a temporary copy if it is remote.

    Args:
        path: The file to read, local or remote.
    """
    if isinstance(path, Path):
        yield path
        return
    with scratch_folder() as folder:
        path.download(folder / path.name)
        yield folder / path.name


def make_folder(folder: AnyPath) -> None:
    """Create a folder if it does not exist. Object stores have no folders, so nothing is created there.

    Args:
        folder: The folder to create.

    Raises:
        CheckpointError: The folder cannot be created.
    """
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error


def is_writer(path: AnyPath, state: RankExecution, each_node: bool) -> bool:
    """Return whether this rank writes a file on behalf of other ranks.

    Args:
        path: The file to write. All machines see the same remote store, so only the main rank writes to it.
        state: This process's `PartialState`, or the Accelerator.
        each_node: Whether the first rank of each machine writes, because machines have separate disks.
    """
    return state.is_local_main_process if each_node and isinstance(path, Path) else state.is_main_process


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_error(target: Path, error: BaseException) -> CheckpointError:
    """Return the error for a checkpoint or file that could not be written.

    Args:
        target: The folder of the checkpoint, or the file.
        error: The exception of the writer. For a full disk, torch and safetensors raise exceptions of their own types.
    """
    free = _free_bytes(target)
    wrapped = any(f"os error {number}" in str(error) for number in _DISK_FULL)
    full = getattr(error, "errno", None) in _DISK_FULL or wrapped or free < _NEARLY_FULL
    reason = f"the disk is full, {size_text(free)} are free" if full else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"The checkpoint {target} was not written: {reason}. Its previous content is unchanged."
        + (" Free space, or keep fewer checkpoints: ProjectConfiguration(total_limit=2)." if full else "")
    )


def _free_bytes(target: Path) -> float:
    """Return the number of free bytes on the file system of `target`, or infinity if the number is not available."""
    try:
        return shutil.disk_usage(next(parent for parent in (target, *target.parents) if parent.is_dir())).free
    except OSError:
        return math.inf


# ---- safetensors


def write_safetensors(value: Mapping[str, Any], path: Path) -> None:
    """Write named tensors as safetensors. Tensors that share memory are written only once.

    The files are identical to the ones that `safetensors.torch.save_file` writes. That function spends 30 us in Python
    for each tensor.
    Writing 10,000 tensors of 64 numbers takes 45 ms of CPU time here, instead of 330 ms (safetensors 0.8).

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
    """Return the header of a safetensors file: a length, and a JSON description that is padded to eight bytes."""
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
    """Yield the bytes of contiguous tensors. The bytes of small tensors are joined."""
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
    """Return the values of a tensor as contiguous bytes in CPU memory, resolving a pending conjugation or negation."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().reshape(-1).view(torch.uint8)


def _write_all(file: Any, content: Any) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view[:_MAX_CALL]) :]


# ---- tensors that share memory. They are saved once, and tied again when they are loaded.


def names_of_same_memory(state: Mapping[str, Any]) -> list[list[str]]:
    """List groups of names whose tensors are the same view of the same memory. Names stay in the state's order.

    Args:
        state: The tensors, by name. Other values are ignored.
    """
    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and _has_address(tensor) and tensor.numel():
            names[tensor.data_ptr()].append(name)
    views: dict[Any, list[str]] = defaultdict(list)
    # Compare whole views only for these few tensors, because describing a view takes longer than reading an address.
    for name in (name for group in _groups(names) for name in group):
        tensor = state[name]
        views[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype].append(name)
    return _groups(views)


def _groups(names: Mapping[Any, list[str]]) -> list[list[str]]:
    return [group for group in names.values() if len(group) > 1]


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type not in {"meta", "xla"}


def memory_key(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return a key that is equal for tensors that share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr() if _has_address(tensor) else id(tensor)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make named tensors suitable for safetensors: contiguous, and without shared memory.

    If a tensor has several names, the first one is kept. A model registers its embedding before the head that shares
    the embedding's weight, and the class without the head must find the embedding in the file. Other views of the same
    memory are copied.

    Args:
        state_dict: The tensors, by name.

    Returns:
        A new dictionary. Tensors that need no change are not copied.

    Raises:
        ValueError: A value is not a tensor.
    """
    dropped = {name for group in names_of_same_memory(state_dict) for name in group[1:]}
    if dropped:
        _LOG.warning(
            "Removed shared tensor %s while saving. This should be OK, but check by verifying that you don't receive "
            "any warning while reloading",
            dropped,
        )
    seen: set[tuple[Any, int]] = set()
    clean = {}
    for name, tensor in state_dict.items():
        if name in dropped:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}: safetensors "
                "files contain tensors only; pass safe_serialization=False"
            )
        memory = memory_key(tensor)
        clean[name] = tensor.clone().contiguous() if memory in seen and tensor.numel() else tensor.contiguous()
        seen.add(memory)
    return clean


def add_tied_names(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Add the names that were not saved because their tensors share memory with a saved tensor.

    Args:
        state: The named tensors of a file.
        model: The model to load the tensors into. Its ties determine which names are added.

    Returns:
        The state with the missing names.
    """
    wanted = model.state_dict(keep_vars=True)
    if wanted.keys() <= state.keys():  # No name is missing.
        return state
    for group in (*names_of_same_memory(wanted), *_names_of_same_object(model)):
        source = next((name for name in group if name in state), None)
        if source is not None:
            state.update({name: state[source] for name in group if name not in state})
    return state


def _names_of_same_object(model: torch.nn.Module) -> list[list[str]]:
    """List the names of parameters that are the same object.

    This finds ties even if memory has no address (XLA, meta).
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return _groups(names)
