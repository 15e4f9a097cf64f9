"""Pickle functions, arguments, return values and answers for another process.

cloudpickle supports notebook classes, closures and lambdas. The bytes of tensors and arrays are stored outside the
pickle, in one anonymous file that every rank maps privately. The bytes are copied only once for any number of ranks,
and when a rank writes to its tensors, the tensors of other ranks do not change.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import mmap
import os
import pickle
import struct
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Literal, Protocol

import cloudpickle

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.telemetry import cells
from notebook_accelerate.telemetry.tracebacks import describe_error
from notebook_accelerate.torch_internals import storage_key

_HEADER = struct.Struct("!QQ")
_ALIGN = 64
MAX_ANSWER_BYTES = 16 << 20
"""If a value that the user evaluates on a rank is larger than this, only its ``repr`` is sent."""
MAX_DEFINITION_BYTES = 4_000_000
"""Maximum size of a class definition. A larger one, such as one that uses a large table, is not sent.

In that case, only a process that already has the class can read its instances.
"""
Purpose = Literal["launch", "values", "definition"]
"""The purpose of a pickle, which decides how it holds the classes and functions of cells.

- "launch": A function and its arguments for a new process, which gets their names in its ``__main__``.
- "values": Values for a process that has most of the classes already, and creates the others from their definitions.
- "definition": The definition of one class.
"""


@dataclass(frozen=True)
class Payload:
    """A pickle and its out-of-band buffers."""

    pickled: bytes
    buffers: tuple[memoryview, ...]

    def to_file(self) -> int:
        """Write the pickle and its buffers to an anonymous file. Return the descriptor, which the caller must close."""
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
    """Load the object that a ``Payload`` has written, with its buffers mapped privately, and close ``descriptor``."""
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
    """Create a file without a name, which is deleted when its last descriptor is closed. Return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("notebook-accelerate-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _StorageHandle:
    """Represents a torch storage in a pickle, so that the storage is copied only once and its views remain views."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        flat = self.storage if self.storage.device.type == "cpu" else self.storage.cpu()
        if flat.nbytes() == 0:
            return _rebuild_storage, (bytearray(),)
        torch: Any = importlib.import_module(
            "torch"
        )  # Typed as Any, because type checkers do not regard its arrays as buffers
        data = torch.empty(0, dtype=torch.uint8).set_(flat).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(data),)


def _rebuild_storage(buffer: Any) -> Any:
    torch: Any = importlib.import_module("torch")  # Typed as Any, because its storages have no type information
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
        tensor = tensor.to(_own_device(device))
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    tensor.__dict__.update(extra)
    return tensor


def _own_device(device: str) -> str:
    """Return the device of this rank in place of the kernel's.

    Otherwise, every rank would create a context on the kernel's device. An XLA device is kept, because every process
    has the device xla:0.
    """
    local_rank = os.environ.get("LOCAL_RANK", "")
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    kind, _, index = device.partition(":")
    return device if alone or not index or kind == "xla" or not local_rank.isdigit() else f"{kind}:{local_rank}"


class Writer(Protocol):
    """Receives a pickle."""

    def write(self, data: bytes, /) -> int:
        """Write all of ``data``."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that keeps plain dense tensors out of band, and preserves the identity of cell classes.

    Args:
        file: The file-like object whose ``write`` receives the pickle.
        buffers: Called with each out-of-band buffer.
        keep_device: Whether tensors are restored on their devices. Results are restored on the CPU instead, so that the
            kernel does not start an accelerator runtime.
        purpose: The purpose of the pickle; see `Purpose`.
        omitted: Names in ``__main__`` that cannot be pickled and that a function may not need, each with the reason.
    """

    def __init__(
        self,
        file: Writer,
        buffers: Callable[[pickle.PickleBuffer], object],
        *,
        keep_device: bool,
        purpose: Purpose,
        omitted: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)
        self._storages: dict[int, _StorageHandle] = {}
        self._keep_device, self._purpose = keep_device, purpose
        self._definitions: dict[str, bytes | str] = {}
        self.defined: set[str] = set()
        """The tokens of the classes whose definitions are in the pickle."""
        self._omitted = omitted
        self.undetected: dict[str, Any] = {}
        """The values in ``__main__`` that functions may read in ways that cloudpickle does not detect."""
        if purpose == "launch":
            self.globals_ref[id(vars(sys.modules["__main__"]))] = cells.MainNames(dict(omitted))

    def reducer_override(self, obj: Any) -> Any:
        """Reduce plain tensors, classes and functions of cells, exceptions, and names that only a kernel has."""
        torch: Any = sys.modules.get("torch")
        ours = torch is not None and hasattr(torch, "nn") and type(obj) in (torch.Tensor, torch.nn.Parameter)
        if ours and _is_dense(torch, obj):
            return self._reduce_tensor(obj)
        if type(obj) is CodeType:
            _, arguments = self.dispatch_table[CodeType](obj)
            return _code, (obj.co_filename, arguments)
        if type(obj) is FunctionType or cells.is_class(obj):
            return self._reduce_definition(obj, super().reducer_override(obj))
        if issubclass(type(obj), BaseException) and type(obj) not in self.dispatch_table:
            return _reduce_exception(obj)
        if self._purpose != "values" and type(obj) in _NAMED_TYPES and obj.__module__ == "__main__":
            return _reduce_named_type(obj)
        if issubclass(type(obj), ModuleType) and sys.modules.get(module_name := str(vars(obj).get("__name__"))) is obj:
            # cloudpickle recognises only plain modules, not instances of subclasses such as torch's configurations.
            return importlib.import_module, (module_name,)
        if (name := _replacement_of(obj)) is not None:
            return _attribute, name
        return super().reducer_override(obj)

    def _reduce_definition(self, value: Any, reduced: Any) -> Any:
        """Reduce a class or function. ``reduced`` is the result of cloudpickle's reducer."""
        if reduced is NotImplemented or len(reduced) < 6:  # The reader imports the value by its name.
            return reduced
        if cells.is_class(value):
            if self._purpose == "values":
                return self._reduce_to_token(value)
            self.defined.add(cells.token_of(value))
            reduced = cells.reduce_definition(value, reduced, by_digest=self._purpose != "launch")
        if self._purpose != "launch":
            return reduced
        make, arguments, state, _, _, set_state = reduced
        if type(value) is FunctionType and value.__globals__ is vars(sys.modules["__main__"]):
            names = cells.undetected_names(value.__code__) - state[1]["__globals__"].keys() - self._omitted.keys()
            found = {name: value.__globals__[name] for name in sorted(names)}
            self.undetected |= found
            state[1]["__globals__"] |= found
        owner = cells.owner_in_main(value)
        if owner is None:
            return reduced
        return make, arguments, (set_state, state, owner), None, None, cells.put_into_main

    def _reduce_to_token(self, kind: type) -> tuple[Any, ...]:
        token = cells.token_of(kind)
        if token not in self._definitions:
            definition, others = _dump_definition(kind)
            self._definitions |= dict.fromkeys(others - self._definitions.keys(), definition)
            self._definitions[token] = definition
        digest = cells.definition_digest(kind)
        return _find_or_load, (kind.__qualname__, token, digest, self._definitions[token])

    def _reduce_tensor(self, tensor: Any) -> tuple[Any, ...]:
        if tensor.requires_grad and not tensor.is_leaf:
            raise SerializationError(
                "a tensor that is part of an autograd graph cannot be sent to another process; pass tensor.detach()"
            )
        plain = tensor.detach()
        if self._purpose == "definition":
            # Check the size before the tensor is copied from its device.
            _check_definition(plain.numel() * plain.element_size())
        device = str(plain.device) if self._keep_device else "cpu"
        if plain.device.type != "cpu":
            plain = plain.cpu()
        storage = plain.untyped_storage()
        handle = self._storages.setdefault(storage_key(storage), _StorageHandle(storage))
        layout = (plain.storage_offset(), tuple(plain.shape), plain.stride(), device)
        return _rebuild_tensor, (
            type(tensor), handle, plain.dtype, layout, bool(tensor.requires_grad), dict(tensor.__dict__),
        )  # fmt: skip


class _DefinitionFile(io.BytesIO):
    """Receives the definition of a class and its buffers, up to `MAX_DEFINITION_BYTES`."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0
        self.buffers: list[memoryview] = []

    def write(self, data: Any, /) -> int:
        self._count(memoryview(data).nbytes)
        return super().write(data)

    def add(self, buffer: pickle.PickleBuffer) -> None:
        self._count(buffer.raw().nbytes)
        self.buffers.append(buffer.raw())

    def _count(self, size: int) -> None:
        self._size += size
        _check_definition(self._size)


def _check_definition(size: int) -> None:
    if size > MAX_DEFINITION_BYTES:
        limit = size_text(MAX_DEFINITION_BYTES)
        raise SerializationError(f"the class's methods use more than {limit} of other values")


def _dump_definition(kind: type) -> tuple[bytes | str, set[str]]:
    """Return the pickled definition of a class, or the error that prevents it, and the tokens of all its classes."""
    file = _DefinitionFile()
    pickler = Pickler(file, file.add, keep_device=False, purpose="definition")
    try:
        pickler.dump(kind)
    except Exception as error:  # noqa: BLE001 - a process that has the class needs no definition
        return describe_error(error), set()
    return pickle_in_band(file.getvalue(), file.buffers), pickler.defined


def _find_or_load(name: str, token: str, digest: str, definition: bytes | str) -> type:
    """Return this process's class, or a class created from ``definition``."""
    found = cells.find(name, token, digest, warn=True)
    if found is not None:
        return found
    if isinstance(definition, str):
        raise SerializationError(
            f"{name} is a class of a cell that this process does not have, and that could not be sent: {definition}. "
            f"Run the cell that defines {name}, then read the value again"
        )
    made = load_bytes(definition)  # Hold a reference, because this keeps all classes of the definition alive.
    found = cells.known(token) or cells.find(name, token, digest)
    assert found is not None, made
    return found


def _reduce_exception(error: BaseException) -> Any:
    """Reduce an exception so that loading it does not call its constructor, whose arguments are not known."""
    kind: Any = type(error)
    base = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not base.__reduce__:
        return NotImplemented
    reduced = kind.__reduce__(error)
    if kind is base or reduced[0] is not kind:
        return NotImplemented
    return _new_exception, (kind, base, reduced[1]), *reduced[2:]


_HEAP_TYPE = 1 << 9
"""The flag of classes created by a class statement (Py_TPFLAGS_HEAPTYPE)."""


def _new_exception(kind: type[BaseException], base: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    error = base.__new__(kind, *arguments)
    base.__init__(error, *arguments)
    return error


_NAMED_TYPES = tuple(
    getattr(typing, name) for name in ("NewType", "ParamSpec", "TypeVarTuple") if hasattr(typing, name)
)
"""Types whose objects are pickled by name, even though a new process does not have the name in ``__main__``.

cloudpickle handles type variables itself.
"""


def _reduce_named_type(value: Any) -> tuple[Any, ...]:
    options: dict[str, Any] = {}
    if type(value) is typing.NewType:
        options["tp"] = value.__supertype__
    elif isinstance(value, typing.ParamSpec):
        options = {"bound": value.__bound__, "covariant": value.__covariant__, "contravariant": value.__contravariant__}
    return _new_named_type, (type(value), value.__name__, options)


def _new_named_type(kind: Any, name: str, options: dict[str, Any]) -> Any:
    value = kind(name, **options)
    value.__module__ = "__main__"
    return value


def _replacement_of(value: Any) -> tuple[str, str] | None:
    """Return the module and name of the replacement for an IPython-only object, or None for other values."""
    kind = type(value)
    if kind is MethodType and value.__name__ == "get_ipython" and hasattr(value.__self__, "user_ns"):
        # Return the name, because this package must not import the module.
        return "notebook_accelerate.worker.debug_agent", "get_ipython"
    if kind.__name__.endswith("ExitAutocall") and kind.__module__.startswith(("IPython", "ipykernel")):
        return "sys", "exit"
    return None


def _code(filename: str, arguments: tuple[Any, ...]) -> CodeType:
    """Return a code object with its original file name, because cloudpickle 3.1.3 gives all code the same file name."""
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


def dump(value: Any, what: str, *, keep_device: bool = True, purpose: Purpose = "launch") -> Payload:
    """Pickle ``value`` with its tensors and arrays out of band.

    Args:
        value: Any value that cloudpickle supports.
        what: The description of the value in errors, such as "the function or its arguments".
        keep_device: Whether tensors are restored on their devices rather than on the CPU.
        purpose: The purpose of the pickle; see `Purpose`.

    Raises:
        SerializationError: A part of ``value`` cannot be pickled. The message names it and the reason.
    """
    omitted: dict[str, str] = {}
    while True:
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        pickler = Pickler(file, buffers.append, keep_device=keep_device, purpose=purpose, omitted=omitted)
        try:
            pickler.dump(value)
            return Payload(file.getvalue(), tuple(buffer.raw() for buffer in buffers))
        except Exception as error:
            if found := _unpicklable(pickler.undetected, omitted):
                omitted |= found
                continue
            if isinstance(error, SerializationError):
                raise
            name = _unpicklable_name(value)
            part, fix = (f", because of {name!r}", f"; create {name} in the function instead") if name else ("", "")
            raise SerializationError(f"{what} cannot be pickled{part}: {describe_error(error)}{fix}") from error


def _unpicklable_name(value: Any) -> str:
    """Return the name of the user's variable that makes a function and its arguments unpicklable, or "" if unknown."""
    function = value[0] if type(value) is tuple and value else None
    if type(function) is not FunctionType:  # Don't use isinstance, because it runs code of the class, which may fail.
        return ""
    with suppress(Exception):  # The user's value may raise any error.
        used = inspect.getclosurevars(function)
        named = {**used.globals, **used.nonlocals}
        named |= dict(inspect.signature(function).bind_partial(*value[1]).arguments)
        for name, part in named.items():
            if _why_unpicklable(part):
                return name
    return ""


def _unpicklable(values: Mapping[str, Any], omitted: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the values that cannot be pickled on their own, each with the reason."""
    without = {**omitted, **dict.fromkeys(values, "")}
    found = {name: _why_unpicklable(value, without) for name, value in values.items()}
    return {name: reason for name, reason in found.items() if reason}


def _why_unpicklable(value: Any, omitted: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the error that pickling a value raises, or "" if the value can be pickled."""
    try:
        Pickler(io.BytesIO(), id, keep_device=True, purpose="launch", omitted=omitted).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's class may raise any error
        return describe_error(error)
    return ""


def dump_bytes(value: Any, what: str, purpose: Purpose = "values") -> bytes:
    """Pickle ``value`` in band, with tensors as CPU tensors. Like ``dump``, this may raise ``SerializationError``."""
    payload = dump(value, what, keep_device=False, purpose=purpose)
    return pickle_in_band(payload.pickled, payload.buffers)


def pickle_in_band(pickled: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Combine a pickle and its buffers into bytes that ``load_bytes`` can read."""
    return pickle.dumps((pickled, [bytearray(buffer) for buffer in buffers]), protocol=5)


def load_bytes(data: bytes) -> Any:
    """Return the value that ``dump_bytes`` pickled."""
    pickled, buffers = pickle.loads(data)
    return pickle.loads(pickled, buffers=buffers)


def dump_answer(value: Any) -> bytes:
    """Pickle a value that the user evaluates on a rank. Return b"" if the value cannot be pickled or is too large."""
    try:
        data = dump_bytes(_detached(value), "the value")
    except Exception:  # noqa: BLE001 - its repr is always sent
        return b""
    return data if len(data) <= MAX_ANSWER_BYTES else b""


def _detached(value: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)
    return value.detach() if is_tensor else value
