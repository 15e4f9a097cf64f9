"""Transfer return values from a rank to the kernel: large ones in anonymous files, which the kernel maps.

A file without a name needs neither a folder nor a cleanup: the system removes it when the last process that has it open
exits, however that happens.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.hardware.detection import machine_memory
from notebook_accelerate.telemetry.pickling import Pickler, anonymous_file, pickle_in_band
from notebook_accelerate.telemetry.tracebacks import describe_error

COPIED_BYTES = 1 << 16
"""Buffers below this size are copied when a value is read, so that no small tensor keeps the whole file in memory."""
RESERVED_PART = 16
"""One sixteenth of the memory, but at most `RESERVED_BYTES`, is kept free, so that the system kills no process."""
RESERVED_BYTES = 1 << 30
_WRITE_BYTES = 1 << 26
_ALIGN = 64
Bytes = bytes | bytearray | memoryview


class PickledResult(NamedTuple):
    """A pickled return value, either in ``payload`` or in files.

    Attributes:
        payload: The bytes for `load_bytes`, or b"" if the value is in files.
        sizes: The size in bytes of each buffer in the second file, or None if the value is in the payload.
        descriptors: The files with the pickle and with its buffers, which the holder must close.
    """

    payload: bytes
    sizes: list[int] | None = None
    descriptors: tuple[int, ...] = ()


# ---- in the rank


def dump_result(value: object, what: str, in_channel: int | None) -> PickledResult:
    """Pickle a return value, with tensors as CPU tensors.

    Args:
        value: Any value that cloudpickle supports.
        what: The description of the value in errors.
        in_channel: The maximum size in bytes of a pickle that is not written to files. If None, files are never used.

    Raises:
        SerializationError: A part of ``value`` cannot be pickled, or it takes more memory than is available.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = _Spool(in_channel, what)
    try:
        Pickler(stream, buffers.append, keep_device=False, purpose="values").dump(value)
        raw = [buffer.raw() for buffer in buffers]
        size = stream.size + sum(buffer.nbytes for buffer in raw)
        if in_channel is None or size <= in_channel:
            return PickledResult(pickle_in_band(stream.contents(), raw))
        return PickledResult(b"", [buffer.nbytes for buffer in raw], (stream.spill(), _write_buffers(raw, what)))
    except (SerializationError, KeyboardInterrupt):
        stream.close()
        raise
    except BaseException as error:  # The user's __reduce__ may even raise SystemExit.
        stream.close()
        text = f"{what} cannot be pickled: {describe_error(error)}; {advice(value)}"
        raise SerializationError(text) from error


class _Spool:
    """A file for the pickler, whose contents stay in memory up to a limit.

    Args:
        limit: The number of bytes to keep in memory, or None for no limit.
        what: The description of the value in errors.
    """

    def __init__(self, limit: int | None, what: str) -> None:
        self._limit, self._what = limit, what
        self._memory = io.BytesIO()
        self._file: _File | None = None
        self.size = 0

    def write(self, data: Bytes) -> int:
        count = memoryview(data).nbytes
        self.size += count
        if self._limit is not None and self.size > self._limit:
            self.spill()
        if self._file is not None:
            self._file.write(data)
        else:
            self._memory.write(data)
        return count

    def contents(self) -> bytes:
        """Return the data written so far. Call this only while the data is in memory."""
        return self._memory.getvalue()

    def spill(self) -> int:
        """Move the data written so far to a file. Return the file's descriptor."""
        if self._file is None:
            self._file = _File(self._what)
            self._file.write(self._memory.getbuffer())
        return self._file.descriptor

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


def _write_buffers(buffers: Sequence[memoryview], what: str) -> int:
    file = _File(what)
    file.require(sum(buffer.nbytes for buffer in buffers))
    for buffer in buffers:
        file.write(b"\0" * (-file.size % _ALIGN))
        file.write(buffer)
    return file.descriptor


class _File:
    """Writes to an anonymous file while there is enough memory.

    Args:
        what: The description of the value in errors.
    """

    def __init__(self, what: str) -> None:
        self._what, self._unchecked = what, 0
        self.descriptor = anonymous_file()
        self.size = 0

    def write(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            part = rest[:_WRITE_BYTES]
            self._unchecked += part.nbytes
            if self._unchecked >= _WRITE_BYTES:  # Check again, because other ranks write at the same time.
                self._unchecked = 0
                self.require(part.nbytes)
            try:
                written = os.write(self.descriptor, part)
            except OSError as error:
                self.close()
                raise SerializationError(f"{self._what} cannot be written to memory: {error}; {_SAVE}") from error
            self.size += written
            rest = rest[written:]

    def close(self) -> None:
        """Close the file, which deletes it. Closing twice has no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def require(self, size: int) -> None:
        """Check that there is enough memory to write ``size`` more bytes.

        Raises:
            SerializationError: There is not enough memory. The file is closed.
        """
        total, available = machine_memory()
        if size <= available - min(total // RESERVED_PART, RESERVED_BYTES):
            return
        self.close()
        raise SerializationError(
            f"{self._what} is too large to return: {size_text(self.size + size)} must pass through memory, but "
            f"only {size_text(max(0, available))} is available; {_SAVE}"
        )


_SAVE = "save it in the function and return its path: torch.save(value, path), or accelerator.save_state(folder)"
_UNWRAP = (
    "return the model without its wrapper, accelerator.unwrap_model(model), or its weights, "
    "accelerator.get_state_dict(model)"
)


def advice(value: object) -> str:
    """Return what to return instead of a value that cannot be transferred to the kernel."""
    return _UNWRAP if _holds_model(value, depth=3) else _SAVE


def _holds_model(value: object, depth: int) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return False
    if isinstance(value, torch.nn.Module):
        return True
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif hasattr(type(value), "__dataclass_fields__"):
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    return depth > 0 and any(_holds_model(part, depth - 1) for part in list(parts)[:1000])


# ---- in the kernel


class ResultFiles:
    """A large return value, in the files that a rank has written.

    Args:
        descriptors: The files with the pickle and with its buffers. This object closes them.
        sizes: The size of each buffer in bytes.
    """

    def __init__(self, descriptors: tuple[int, ...], sizes: Sequence[int]) -> None:
        self._descriptors, self._sizes, self._owner = descriptors, sizes, os.getpid()

    @property
    def nbytes(self) -> int:
        """Total size of both files in bytes."""
        return sum(os.fstat(descriptor).st_size for descriptor in self._descriptors)

    def load(self) -> Any:
        """Load the value. Its tensors and arrays keep the mapped file alive."""
        stream, buffers = self._descriptors
        _keep_contents(self._descriptors)
        with io.BufferedReader(_Reader(stream), 1 << 16) as file:
            return pickle.load(file, buffers=_mapped(buffers, self._sizes))

    def in_band(self) -> bytes:
        """Return the value's pickle and buffers as bytes for `load_bytes`. The files are not changed."""
        stream, buffers = self._descriptors
        pickled = os.pread(stream, os.fstat(stream).st_size, 0)
        position, parts = 0, []
        for size in self._sizes:
            position += -position % _ALIGN
            parts.append(memoryview(os.pread(buffers, size, position)))
            position += size
        return pickle_in_band(pickled, parts)

    def close(self) -> None:
        """Close the files. A value that was loaded remains valid.

        Files that no process has read are emptied. Otherwise, forked ranks, which inherit the descriptors, would keep
        the memory in use until they end. Files that were read keep their contents, because the value needs them.
        """
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            if self._owner == os.getpid():
                _empty(descriptor)
            with suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _keep_contents(descriptors: Sequence[int]) -> None:
    """Seal files so that no process can empty them, because reading a mapped page that was removed kills the reader."""
    with suppress(OSError, ImportError, AttributeError):
        import fcntl

        for descriptor in descriptors:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def _empty(descriptor: int) -> None:
    """Remove a file's contents, unless a process has read the file. Do nothing if the system has no seals."""
    with suppress(OSError, ImportError, AttributeError):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == 0:
            os.ftruncate(descriptor, 0)  # This fails if another process has sealed the file to keep its contents.


class _Reader(io.RawIOBase):
    """Reads a file from its start, independently of other processes that share the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position = descriptor, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._position += count
        return count


def _mapped(descriptor: int, sizes: Sequence[int]) -> list[Any]:
    """Return the buffers in a file. Large buffers are mapped privately, and small ones are copied.

    As after a fork, pages are shared with the file until they are written to.
    """
    length = os.fstat(descriptor).st_size
    if not length:
        return [bytearray() for _ in sizes]
    view = memoryview(mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    buffers: list[Any] = []
    position = 0
    for size in sizes:
        position += -position % _ALIGN
        part = view[position : position + size]
        buffers.append(bytearray(part) if size < COPIED_BYTES else pickle.PickleBuffer(part))
        position += size
    return buffers
