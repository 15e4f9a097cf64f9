"""Read weights (in safetensors and torch's format) and their indexes, and reject file names outside the folder."""

from __future__ import annotations

import codecs
import errno
import functools
import json
import os
import pickle
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.files.tensor_sources import FileSource
from notebook_accelerate.files.untrusted_files import (
    MALFORMED,
    UNREADABLE,
    ZIP_BEGIN,
    PlainUnpickler,
    UnsafePickleError,
    broken_file,
    check_expansion,
    load_plain,
    naming_file,
    read_json,
)
from notebook_accelerate.torch_internals import weights_only_globals

_LOG = accelerate_logger("utils.modeling")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
_MAX_PART = 255
"""The maximum length of a file name in bytes. For longer names, systems raise different errors."""
_CALLERS = (TypeError, AttributeError, ValueError)
_MAX_HEADER_BYTES = 100_000_000
"""The maximum size of a header, which is also the limit of safetensors' own reader."""


def inside(folder: Path, name: str) -> Path:
    """Resolve a file name from an index or a manifest, and reject names that lead out of the folder.

    Args:
        folder: The folder of the checkpoint.
        name: The name of the file, a path relative to the folder.

    Returns:
        The path to the file.

    Raises:
        CheckpointError: The name is absolute, or leads out of the folder through ".." or a link.
    """
    path = folder / name
    try:
        within = not Path(name).is_absolute() and path.resolve().is_relative_to(folder.resolve())
        within = within and all(len(os.fsencode(part)) <= _MAX_PART for part in path.parts)
    except (OSError, ValueError, RuntimeError):  # The name is too long or has a null character, or links are circular.
        within = False
    if not within:
        raise CheckpointError(
            f"Refused: {folder} lists the file {name!r}, which is outside the folder. A checkpoint may only list its "
            "own files; download it again from a source that you trust."
        )
    return path


def indexed_files(index: AnyPath, folder: Path) -> dict[str, Path]:
    """Return the file for each name in an index.

    Args:
        index: The index file. It contains a map from names to files, or an object with the map as its `weight_map`.
        folder: The folder of the files, which do not have to exist.

    Raises:
        CheckpointError: The index lists a file outside its folder.
        BrokenCheckpointError: The file is not an index.
    """
    try:
        content = read_json(index)
        weight_map = content.get("weight_map", content) or content["weight_map"]
        return {name: inside(folder, file) for name, file in weight_map.items()}
    except (BrokenCheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpointError(f"{index} is broken: it contains no weight_map ({error}).") from error


def read_index(path: Path) -> dict[str, Path]:
    """Read an index file.

    Args:
        path: The index, such as ``model.safetensors.index.json``.

    Returns:
        The file for each name.

    Raises:
        CheckpointError: The index lists a file outside its folder.
        BrokenCheckpointError: The file is not an index, or a listed file is missing.
    """
    files = indexed_files(path, path.parent)
    if missing := sorted({file.name for file in files.values() if not file.is_file()}):
        raise BrokenCheckpointError(f"{path.parent} lacks files that {path.name} lists: {', '.join(missing)}.")
    return files


def safetensors_sources(path: Path) -> Mapping[str, FileSource]:
    """Return the source of each tensor in a safetensors file. Only the header is read.

    Args:
        path: The safetensors file.

    Raises:
        BrokenCheckpointError: The file is corrupt, truncated or missing.
    """
    try:
        stat = path.stat()
        return _sources(path, stat.st_mtime_ns, stat.st_size)
    except _OtherFrameworkError:
        raise
    except UNREADABLE as error:
        raise BrokenCheckpointError(f"{path} is broken: {error}") from error


class _OtherFrameworkError(BrokenCheckpointError, OSError, ValueError):
    """Raised when a file's weights have another framework's layout. Accelerate raises OSError or ValueError."""


def _check_framework(path: Path, metadata: Mapping[str, str] | None) -> None:
    """Refuse the weights of other frameworks, whose layouts differ even if names and shapes match."""
    if metadata is None:
        _LOG.warning("%s does not name the framework that saved it; it is read as a file saved by PyTorch", path)
    framework = (metadata or {}).get("format", "pt")
    if framework != "pt":
        raise _OtherFrameworkError(
            f"{path} was saved for {framework!r}, and may have another layout of weights; convert it to PyTorch, and "
            'save it with the metadata {"format": "pt"}'
        )


@functools.lru_cache(maxsize=64)
def _sources(path: Path, _modified: int, size: int) -> dict[str, FileSource]:
    # Don't use safetensors' own reader, which maps the whole file as writable just to read the header.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header has {length:,} bytes, but the file has {size:,}")
        header = json.loads(file.read(length))
    _check_framework(path, header.pop("__metadata__", None))
    sources, end = {}, 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = info["data_offsets"]
        if info["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the dtype {info['dtype']}, which is unknown; known: {', '.join(_DTYPES)}")
        source = FileSource(path, 8 + length + begin, tuple(info["shape"]), _DTYPES[info["dtype"]])
        if begin != end or stop - begin != source.nbytes:
            raise ValueError(f"{name} has shape {source.shape}, which does not fit bytes {begin:,} to {stop:,}")
        sources[name], end = source, stop
    if 8 + length + end != size:
        raise ValueError(f"it should have {8 + length + end:,} bytes, but has {size:,}")
    return sources


def read_torch(file: str | Path | BinaryIO, map_location: Any = "cpu", **options: Any) -> Any:
    """Read a file in torch's format. With `weights_only=True`, only tensors, numpy arrays and plain data are read.

    Args:
        file: The file, in any form that `torch.load` accepts.
        map_location: The device to put the tensors on.
        options: Further arguments for `torch.load`, such as ``weights_only=False`` for a file that you trust.

    Raises:
        BrokenCheckpointError: The file cannot be read completely.
        CheckpointError: The file contains objects that `weights_only` rejects.
    """
    options.setdefault("weights_only", True)
    check_expansion(file)
    try:
        return (
            _read_plain(file, map_location, options) if options["weights_only"] else _load(file, map_location, options)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise CheckpointError(_refusal(file, error)) from error
        detail = next(iter(str(error).splitlines()), "it ends too early")
        raise BrokenCheckpointError(f"{file} is broken: {detail}") from error
    except MALFORMED as error:
        if isinstance(error, _CALLERS) and (not options["weights_only"] or options.keys() - {"weights_only", "mmap"}):
            raise  # A class in the file, or an option, caused the error.
        raise broken_file(file, error) from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise broken_file(file, error) from error  # torch has followed a wrong offset in the file.


_torch_load = torch.load


def _load(file: Any, map_location: Any, options: dict[str, Any]) -> Any:
    return _torch_load(file, map_location=map_location, **options)


def _read_plain(file: Any, map_location: Any, options: dict[str, Any]) -> Any:
    """Read plain data with torch or, if torch rejects it, with `PlainUnpickler`."""
    start = 0 if isinstance(file, (str, Path)) else file.tell()
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            return _load(file, map_location, options)
    except pickle.UnpicklingError:
        with Path(file).open("rb") if isinstance(file, (str, Path)) else nullcontext(file) as opened:
            opened.seek(start)
            readable = _is_zip_of_torch_save(opened)
            opened.seek(start)
        if not readable:
            raise
    own = SimpleNamespace(
        __name__=__name__, Unpickler=type("Unpickler", (PlainUnpickler,), {"known": _known_to_torch()})
    )
    return _load(file, map_location, {**options, "weights_only": False, "pickle_module": own})


def _is_zip_of_torch_save(file: BinaryIO) -> bool:
    """Return whether torch reads a file as a single pickle, unlike files in the old format and TorchScript programs."""
    if file.read(len(ZIP_BEGIN)) != ZIP_BEGIN:
        return False
    with zipfile.ZipFile(file) as archive:
        return not any(name.rpartition("/")[2] == "constants.pkl" for name in archive.namelist())


def _known_to_torch() -> dict[str, Any]:
    """Return the names that torch accepts with `weights_only`, including those from `add_safe_globals`."""
    known = dict(weights_only_globals())
    for entry in (*numpy_globals(), *torch.serialization.get_safe_globals()):
        found, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        known[name] = found
    return known


# ---- restricting what other libraries load

_loading = threading.RLock()
_trusted = threading.local()


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Make other libraries (torch's distributed checkpoint, DeepSpeed, Megatron-LM) read only plain data.

    These libraries pass ``weights_only=False``, and unpickle metadata, so a checkpoint could run its author's code.
    Inside the block, torch.load and torch's metadata reader in this thread reject the same objects as `read_torch`.
    """
    reader: Any = import_module("torch.distributed.checkpoint.filesystem")
    if getattr(_trusted, "files", False):
        yield
        return
    with _loading:
        before, thread = (torch.load, reader.pickle), threading.get_ident()

        def load(f: Any, map_location: Any = None, *args: Any, weights_only: bool | None = None, **options: Any) -> Any:
            if weights_only or threading.get_ident() != thread:
                return before[0](f, map_location, *args, weights_only=weights_only, **options)
            return read_torch(f, map_location, **options)

        def load_metadata(file: BinaryIO) -> Any:
            return read_metadata(file) if threading.get_ident() == thread else pickle.load(file)

        torch.load = load
        reader.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)
        try:
            yield
        finally:
            torch.load, reader.pickle = before


@contextmanager
def trusted_files() -> Iterator[None]:
    """Let this thread read any object inside the block, because the user has passed ``weights_only=False``."""
    _trusted.files = True
    try:
        yield
    finally:
        _trusted.files = False


def read_metadata(file: BinaryIO) -> Any:
    """Read the metadata of torch's distributed checkpoint, which is a pickle of instances of a few torch classes.

    Args:
        file: The file ``.metadata``, open for reading.

    Raises:
        CheckpointError: The file contains objects of other classes.
        BrokenCheckpointError: The file cannot be read.
    """
    from torch.distributed.checkpoint import metadata

    from notebook_accelerate.torch_internals import StorageInfo

    classes = (
        metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta, StorageInfo,
    )  # fmt: skip
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
    name = getattr(file, "name", ".metadata")
    with naming_file(name):
        try:
            found = load_plain(file, {**weights_only_globals(), **known})
        except UnsafePickleError as error:
            raise CheckpointError(_refusal(name, error)) from error
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it contains {type(found).__name__} instead of the metadata of a distributed checkpoint")
        return found


def _refusal(file: Any, error: Exception) -> str:
    detail = next(line.strip() for line in str(error).splitlines() if "GLOBAL" in line)
    return (
        f"{file} contains more than data and was not loaded ({detail}) If you trust its source, allow the class: "
        "torch.serialization.add_safe_globals([TheClass]), or everything: "
        'accelerator.load_state(folder, load_kwargs={"weights_only": False}).'
    )


def numpy_globals() -> list[Any]:
    """List the globals that pickled numpy arrays and numbers refer to, by the names in numpy 1 and 2."""
    core = np._core if hasattr(np, "_core") else np.core
    multiarray: Any = core.multiarray
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdFDUS"}
    found: list[Any] = [np.ndarray, np.dtype, *sorted(dtypes, key=str)]
    for function in (multiarray._reconstruct, multiarray.scalar):
        found += [(function, f"numpy.{package}.multiarray.{function.__name__}") for package in ("core", "_core")]
    return [*found, codecs.encode]  # Pickles of numpy numbers contain their bytes as encoded text.
