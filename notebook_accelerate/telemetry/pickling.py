"""Pickling of functions, arguments, return values and answers for another process.

cloudpickle supports notebook classes, closures and lambdas. The bytes of tensors and arrays are stored outside the
pickle, in one anonymous file that every rank maps privately: they are copied once for any number of ranks, and a rank's
writes to its tensors change no other rank's.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any, Protocol

import cloudpickle

from notebook_accelerate.errors import SerializationError
from notebook_accelerate.torch_internals import storage_key

_HEADER = struct.Struct("!QQ")
_ALIGN = 64
MAX_ANSWER_BYTES = 16 << 20
"""Of a larger value that the user evaluates on a rank, only the ``repr`` is sent."""


@dataclass(frozen=True)
class Payload:
    """A pickle and its out-of-band buffers."""

    pickled: bytes
    buffers: tuple[memoryview, ...]

    def to_file(self) -> int:
        """Write everything to an anonymous file and return its descriptor, owned by the caller."""
        sizes = [buffer.nbytes for buffer in self.buffers]
        index = json.dumps(sizes).encode()
        descriptor = anonymous_file()
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(_HEADER.pack(len(self.pickled), len(index)) + self.pickled + index)
            for buffer in self.buffers:
                file.write(b"\0" * (-file.tell() % _ALIGN))
                file.write(buffer)
        return descriptor


def load_file(descriptor: int) -> Any:
    """Return the object of a ``Payload``, with its buffers mapped privately; closes ``descriptor``."""
    size = os.fstat(descriptor).st_size
    view = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(descriptor)
    pickled_size, index_size = _HEADER.unpack_from(view)
    position = _HEADER.size + pickled_size
    sizes = json.loads(bytes(view[position : position + index_size]))
    pickled = view[_HEADER.size : position]
    position += index_size
    buffers = []
    for length in sizes:
        position += -position % _ALIGN
        buffers.append(pickle.PickleBuffer(view[position : position + length]))
        position += length
    return pickle.loads(pickled, buffers=buffers)


def anonymous_file() -> int:
    """Return the descriptor of an unnamed file, which is deleted when its last descriptor is closed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("notebook-accelerate-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _StorageHandle:
    """Represents one torch storage, so that its views stay views and it is copied once."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        flat = self.storage if self.storage.device.type == "cpu" else self.storage.cpu()
        if flat.nbytes() == 0:
            return _rebuild_storage, (bytearray(),)
        torch: Any = importlib.import_module("torch")  # typed as Any: its arrays are no buffers to a type checker
        data = torch.empty(0, dtype=torch.uint8).set_(flat).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(data),)


def _rebuild_storage(buffer: Any) -> Any:
    torch: Any = importlib.import_module("torch")  # typed as Any: its storages have no type information
    if memoryview(buffer).nbytes == 0:
        return torch.UntypedStorage(0)
    view = memoryview(buffer)
    return torch.frombuffer(view if not view.readonly else bytearray(view), dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(
    kind: type, storage: Any, dtype: Any, layout: tuple[Any, ...], requires_grad: bool, extra: dict[str, Any]
) -> Any:
    import torch

    offset, size, stride, device = layout
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if device != "cpu":
        tensor = tensor.to(device)
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    tensor.__dict__.update(extra)
    return tensor


class Writer(Protocol):
    """Receives a pickle."""

    def write(self, data: bytes, /) -> int:
        """Write all of ``data``."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with plain dense tensors out of band, and code with the file names that tracebacks show.

    Args:
        file: Receives the pickle; has ``write``.
        buffers: Receives the buffers.
        keep_device: Whether tensors are restored on their device; results are restored on the CPU, so that the kernel
            starts no accelerator runtime.
    """

    def __init__(self, file: Writer, buffers: list[pickle.PickleBuffer], *, keep_device: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._storages: dict[int, _StorageHandle] = {}
        self._keep_device = keep_device

    def reducer_override(self, obj: Any) -> Any:
        """Reduce plain tensors, and names that only a kernel has."""
        torch: Any = sys.modules.get("torch")
        ours = torch is not None and hasattr(torch, "nn") and type(obj) in (torch.Tensor, torch.nn.Parameter)
        if ours and _is_dense(torch, obj):
            return self._reduce_tensor(obj)
        if type(obj) is CodeType:
            _, arguments = self.dispatch_table[CodeType](obj)
            return _code, (obj.co_filename, arguments)
        if (name := _of_the_kernel(obj)) is not None:
            return _attribute, name
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> tuple[Any, ...]:
        if tensor.requires_grad and not tensor.is_leaf:
            raise SerializationError(
                "a tensor that is part of an autograd graph cannot travel between processes; pass tensor.detach()"
            )
        plain = tensor.detach()
        device = str(plain.device) if self._keep_device else "cpu"
        if plain.device.type != "cpu":
            plain = plain.cpu()
        storage = plain.untyped_storage()
        handle = self._storages.setdefault(storage_key(storage), _StorageHandle(storage))
        layout = (plain.storage_offset(), tuple(plain.shape), plain.stride(), device)
        return _rebuild_tensor, (
            type(tensor), handle, plain.dtype, layout, bool(tensor.requires_grad), dict(tensor.__dict__),
        )  # fmt: skip


def _of_the_kernel(value: Any) -> tuple[str, str] | None:
    """Return the module and name of what replaces a name of cells that only a kernel has; None for other values."""
    kind = type(value)
    if kind is MethodType and value.__name__ == "get_ipython" and hasattr(value.__self__, "user_ns"):
        return "notebook_accelerate.worker.rank_shell", "get_ipython"  # by name: this package must not import it
    if kind.__name__.endswith("ExitAutocall") and kind.__module__.startswith(("IPython", "ipykernel")):
        return "sys", "exit"
    return None


def _code(filename: str, arguments: tuple[Any, ...]) -> CodeType:
    """Return a code object with its own file name, for lines of cells; cloudpickle 3.1.3 gives all the same."""
    return CodeType(*arguments).replace(co_filename=filename)


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _is_dense(torch: Any, tensor: Any) -> bool:
    return bool(
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type not in ("meta", "xla")
    )


def dump(value: Any, what: str, *, keep_device: bool = True) -> Payload:
    """Pickle ``value`` with its tensors and arrays out of band.

    Args:
        value: Any value that cloudpickle supports.
        what: Name of the value in an error, as "the function or its arguments".
        keep_device: Whether tensors are restored on their device, or on the CPU.

    Raises:
        SerializationError: A part of ``value`` cannot be pickled; the message says which and why.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        Pickler(file, buffers, keep_device=keep_device).dump(value)
        return Payload(file.getvalue(), tuple(buffer.raw() for buffer in buffers))
    except SerializationError:
        raise
    except Exception as error:
        raise SerializationError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error


def dump_bytes(value: Any, what: str) -> bytes:
    """Pickle ``value`` in band, tensors as CPU tensors; raises ``SerializationError`` like ``dump``."""
    payload = dump(value, what, keep_device=False)
    return pickle_in_band(payload.pickled, payload.buffers)


def pickle_in_band(pickled: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Return a pickle and its buffers as the bytes that ``load_bytes`` reads."""
    return pickle.dumps((pickled, [bytearray(buffer) for buffer in buffers]), protocol=5)


def load_bytes(data: bytes) -> Any:
    """Return the value that ``dump_bytes`` pickled."""
    pickled, buffers = pickle.loads(data)
    return pickle.loads(pickled, buffers=buffers)


def dump_answer(value: Any) -> bytes:
    """Pickle a value that the user evaluates on a rank; b"" when it cannot be pickled, or is too large."""
    try:
        data = dump_bytes(_detached(value), "the value")
    except Exception:  # noqa: BLE001 - its repr is sent in any case
        return b""
    return data if len(data) <= MAX_ANSWER_BYTES else b""


def _detached(value: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)
    return value.detach() if is_tensor else value
