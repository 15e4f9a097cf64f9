"""Limits, errors and a restricted unpickler for files that may be damaged or malicious."""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import decimal
import enum
import functools
import json
import pathlib
import pickle
import re
import struct
import sys
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch

from notebook_accelerate.errors import BrokenCheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.telemetry.tracebacks import describe_error

MALFORMED: tuple[type[Exception], ...] = (
    LookupError,  # KeyError, IndexError, an unknown encoding
    TypeError,
    ValueError,  # UnicodeDecodeError, broken JSON
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    MemoryError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""The errors that readers raise for unexpected content, in addition to their own exception classes."""
UNREADABLE: tuple[type[Exception], ...] = (OSError, *MALFORMED)
MAX_JSON_BYTES = 1 << 26
"""The maximum size of an index or manifest. 64 MiB is enough for half a million files."""
_EXPANSION = 1 << 26
"""The maximum difference between the stated size of the content and the file's size. torch does not compress files."""
_ENTRY = re.compile(rb"PK\x01\x02.{20}(.{4})", re.DOTALL)
ZIP_BEGIN = b"PK\x03\x04"
"""The first bytes of a file in torch's format. Files from before torch 1.6 have a different format."""
_END = b"PK\x05\x06"
_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"
_END_BYTES = (1 << 16) + 22
_UNKNOWN = 0xFFFFFFFF
"""The size stated for an entry above 4 GiB. The actual size is in an extension of the directory."""


@contextmanager
def naming_file(path: object, kinds: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Convert all errors caused by malformed content to one class, and add the name of the file.

    Args:
        path: The file or folder that is read in the block.
        kinds: The errors that malformed content causes in this block.

    Raises:
        BrokenCheckpointError: The block raised one of these errors.
    """
    try:
        yield
    except BrokenCheckpointError:
        raise
    except kinds as error:
        raise broken_file(path, error) from error


def broken_file(path: object, error: BaseException) -> BrokenCheckpointError:
    """Return the error for a file with unexpected content.

    Args:
        path: The file or folder with the unexpected content.
        error: The error that the reader raised.
    """
    first_line = describe_error(error).splitlines()[0][:500]
    return BrokenCheckpointError(f"{path} is broken: {first_line}".rstrip(": "))


def read_json(path: AnyPath) -> Any:
    """Read a JSON file of limited size.

    Args:
        path: The file to read.

    Raises:
        BrokenCheckpointError: The file is too large, nested too deeply, or not JSON in UTF-8.
    """
    with naming_file(path):
        if not isinstance(path, Path):
            return json.loads(path.read_text())
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise BrokenCheckpointError(f"{path} is broken: it has more than {MAX_JSON_BYTES:,} bytes.")
        return json.loads(content.decode("utf-8"))


def check_expansion(file: str | Path | BinaryIO) -> None:
    """Reject a zip file whose content is much larger than the file, and accept all other files.

    Before torch reads anything, it allocates the size that the file's directory states. With 2 MB of compressed zeros,
    this took 4 GB of memory.

    Args:
        file: The file, in any form that `torch.load` accepts.

    Raises:
        BrokenCheckpointError: The content is much larger than the file.
    """
    if not isinstance(file, (str, Path)):
        return
    with Path(file).open("rb") as opened:
        if opened.read(4) != ZIP_BEGIN:  # The file is not a zip file.
            return
        size = opened.seek(0, 2)
        directory = _read_directory(opened, size)
    total = _stated_bytes(directory)
    if total is None or total > size:
        with naming_file(file, (*MALFORMED, NotImplementedError)), zipfile.ZipFile(file) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
    if total > size + _EXPANSION:
        raise BrokenCheckpointError(
            f"{file} is broken: it has {size:,} bytes but states {total:,} bytes of content; torch never compresses."
        )


def _read_directory(file: BinaryIO, size: int) -> bytes:
    """Return the directory of a zip file, whose location is in the last bytes, or b"" if the file has no directory."""
    file.seek(max(size - _END_BYTES, 0))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return b""
    length, start = struct.unpack_from("<II", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR_64:  # torch always writes both kinds of records.
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        file.seek(min(record, size))
        end = file.read(56)
        if len(end) == 56 and end[:4] == _END_64:
            length, start = struct.unpack_from("<QQ", end, 40)
    file.seek(min(start, size))
    return file.read(min(length, size))


def _stated_bytes(directory: bytes) -> int | None:
    """Return an upper bound for the sum of the sizes in a directory, or None if an entry does not state its size."""
    sizes = np.frombuffer(b"".join(_ENTRY.findall(directory)), dtype="<u4")
    return None if (sizes == _UNKNOWN).any() else int(sizes.sum(dtype=np.uint64))


# ---- a restricted unpickler
# The unpickler creates plain values, and never imports or calls anything else that a file names. With pickle, a
# checkpoint could run its author's code. torch.load with `weights_only` reads tensors, numbers and dictionaries, but
# rejects other data in a training state, such as dates, paths, deques and enum members. This unpickler also reads
# those.

_BUILTINS = (
    "set", "frozenset", "complex", "bytearray", "slice", "range",
    "bool", "int", "float", "str", "bytes", "list", "dict", "tuple",
)  # fmt: skip
_CLASSES: tuple[type, ...] = (
    collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque,
    dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone,
    decimal.Decimal, uuid.UUID,
)  # fmt: skip
"""Classes whose instances take time and memory in proportion to the arguments. Fraction is not one of them."""
_PATHS = ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath")
_CONTAINERS = {
    list, tuple, set, frozenset, collections.deque, torch.Size,
    dict, collections.OrderedDict, collections.Counter, collections.defaultdict,
}  # fmt: skip
_COSTLY: dict[Any, tuple[type, ...]] = {bytes: (int,), bytearray: (int,), int: (decimal.Decimal,)}
_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, slice, range, torch.Tensor}
_LEAVES = (
    *_ATOMS, pathlib.PurePath, enum.Enum, torch.dtype, torch.device, torch.layout, np.ndarray, np.generic, np.dtype,
    dt.date, dt.time, dt.timedelta, dt.timezone, decimal.Decimal, uuid.UUID,
)  # fmt: skip


_PythonUnpickler: Any = pickle._Unpickler


class UnsafePickleError(pickle.UnpicklingError):
    """Raised when a file contains more than plain data."""


def load_plain(file: BinaryIO, known: Mapping[str, Any]) -> Any:
    """Unpickle plain data.

    Args:
        file: The pickle, open for reading.
        known: Additional classes and functions that the file may call, by their dotted names in the file. They must be
            harmless, whatever their arguments are.

    Raises:
        UnsafePickleError: The file contains more than plain data.
    """
    return type("Unpickler", (PlainUnpickler,), {"known": known})(file).load()


class PlainUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """The standard library's unpickler in Python, restricted to calling and filling instances of known classes.

    The unpickler in C cannot be restricted in this way: a file could assign attributes to the known classes, or make
    the unpickler allocate gigabytes for an index.

    Args:
        file: The pickle, open for reading.
        options: Further arguments for `pickle.Unpickler`.

    Attributes:
        known: The known classes and functions (see `load_plain`), which a subclass sets.
    """

    known: ClassVar[Mapping[str, Any]] = {}
    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._found: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the data.

        Raises:
            UnsafePickleError: The file contains more than plain data.
        """
        value = super().load()
        if any(isinstance(each, _UserClass) for each in self._found.values()) and _UserClass in unreadable_classes(
            value
        ):
            raise UnsafePickleError("GLOBAL: the file contains a class, which is not plain data.")
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return a known class or function, or a stand-in for a class in the user's code.

        Args:
            module: The module that the file names.
            name: The name in the module.

        Raises:
            UnsafePickleError: The name is not allowed.
        """
        full = f"{module}.{name}"
        if full in {"builtins.getattr", "__builtin__.getattr"}:
            return self._allow(self._attribute)
        found = plain_classes().get(full)
        return self._allow(self.known[full] if full in self.known else found or _stand_in(module, name))

    def _allow(self, found: Any) -> Any:
        self._found[id(found)] = found
        return found

    def _attribute(self, owner: Any, name: str) -> Any:
        """Return a nested class or an enum member. Some versions of Python pickle enum members as attributes."""
        if not isinstance(owner, _UserClass):
            raise UnsafePickleError("GLOBAL builtins.getattr is not plain data.")
        found = owner.attribute(name)
        return self._allow(found) if isinstance(found, _UserClass) else found

    def _instantiate(self, function: Any, args: Any) -> None:
        self.append(self._call(function, args))

    def _call(self, function: Any, args: Any, **options: Any) -> Any:
        self._check(function, args)
        return function(*args, **options)

    def _check(self, function: Any, args: Any) -> None:
        if id(function) not in self._found:
            raise UnsafePickleError(f"GLOBAL: the file calls {function!r:.100}.")
        for argument in args:
            # With arguments of these types, a small file could create values of any size.
            if type(argument) in _COSTLY.get(function, ()) or type(argument) is range:
                raise UnsafePickleError(
                    f"GLOBAL: the file calls {function!r:.100} with an argument of {type(argument)}."
                )

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def _load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._new(self.stack[-1], args)

    def _load_newobj_ex(self) -> None:
        options = self.stack.pop()
        args = self.stack.pop()
        self.stack[-1] = self._new(self.stack[-1], args, **options)

    def _new(self, cls: Any, args: Any, **options: Any) -> Any:
        self._check(cls, args)
        return cls.__new__(cls, *args, **options) if isinstance(cls, type) else cls(*args, **options)

    def _load_build(self) -> None:
        instance = self.stack[-2]
        if isinstance(instance, type) or not any(id(cls) in self._found for cls in type(instance).__mro__):
            raise UnsafePickleError(f"GLOBAL: the file changes {instance!r:.100}.")
        self.load_build()

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = _load_newobj_ex
    dispatch[pickle.BUILD[0]] = _load_build


@functools.cache
def plain_classes() -> dict[str, Any]:
    """Return the classes of plain data, by their names in the pickles of any protocol and version of Python."""
    found = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _CLASSES}
    for name in _BUILTINS:
        found[f"builtins.{name}"] = found[f"__builtin__.{name}"] = getattr(builtins, name)
    found["__builtin__.xrange"] = range
    for name in _PATHS:
        for module in ("pathlib", "pathlib._local"):
            found[f"{module}.{name}"] = getattr(pathlib, name)
    return found


class _UserClass:
    """A stand-in for a class that this process has imported, so that a file cannot change the class.

    Enum members and named tuples are created without calling the class. Other objects are rejected.

    Args:
        cls: The class to stand in for.
    """

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __call__(self, *args: Any) -> Any:
        cls: Any = self._cls
        if isinstance(cls, enum.EnumMeta):
            return self._member(*args)
        if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
            return tuple.__new__(cls, args)
        raise UnsafePickleError(
            f"GLOBAL {cls.__module__}.{cls.__qualname__} is a class whose objects are not plain data."
        )

    def __repr__(self) -> str:
        return repr(self._cls)

    def _member(self, value: Any) -> Any:
        members: Any = self._cls
        for member in members.__members__.values():
            if type(member.value) is type(value) and member.value == value:
                return member
        if issubclass(self._cls, enum.Flag) and type(value) is int:
            return self._cls(value)  # The value may be a combination of flags.
        raise UnsafePickleError(f"GLOBAL {self._cls.__qualname__} has no member with the value {value!r:.100}.")

    def attribute(self, name: str) -> Any:
        """Return an enum member, or a stand-in for a nested class."""
        if isinstance(self._cls, enum.EnumMeta) and name in self._cls.__members__:
            return self._cls.__members__[name]
        return _stand_in(self._cls.__module__, f"{self._cls.__qualname__}.{name}")


def _stand_in(module: str, name: str) -> _UserClass:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type):
        return _UserClass(found)
    hint = "" if module in sys.modules else f" {module} has not been imported: import it first if it defines an enum."
    raise UnsafePickleError(f"GLOBAL {module}.{name} is not plain data.{hint}")


def unreadable_classes(value: Any) -> set[type]:
    """Return the classes of the values in a state that `load_state` would reject.

    Args:
        value: The state to check.
    """
    allowed = (*_LEAVES, *(each for each in torch.serialization.get_safe_globals() if isinstance(each, type)))
    found, seen, pending = set(), set(), [value]
    while pending:
        each = pending.pop()
        if isinstance(each, allowed) or (isinstance(each, type) and each in plain_classes().values()):
            continue
        if type(each) not in _CONTAINERS and not (isinstance(each, tuple) and hasattr(each, "_fields")):
            found.add(type(each))
        elif id(each) not in seen:
            seen.add(id(each))
            items = [*each, *each.values(), getattr(each, "default_factory", None)] if isinstance(each, dict) else each
            pending += [item for item in items if type(item) not in _ATOMS]
    return found
