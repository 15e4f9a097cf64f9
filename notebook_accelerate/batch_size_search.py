"""Find batch sizes that fit in memory, and release cached memory."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from notebook_accelerate.config.plain_values import check_whole_number
from notebook_accelerate.hardware.device_table import ROWS

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_OUT_OF_MEMORY = (
    " out of memory.",  # CUDA, XPU and others
    "out of memory. Tried to allocate",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # HPU
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the memory that torch caches on the devices that this process has used.

    Args:
        garbage_collection: Whether to run Python's garbage collector first, which takes milliseconds to seconds.
    """
    if garbage_collection:
        gc.collect()
    torch = sys.modules.get("torch")
    for row in ROWS:
        module: Any = getattr(torch, row.type, None)
        if row.is_accelerator and _is_in_use(row.type, module) and hasattr(module, "empty_cache"):
            module.empty_cache()


def _is_in_use(device_type: str, module: Any) -> bool:
    """Return whether this process has used devices of this type. If not, emptying the cache would create a context."""
    if module is None:
        return False
    if hasattr(module, "is_initialized"):
        return bool(module.is_initialized())
    if device_type == "mps":
        return bool(module.current_allocated_memory() if module.is_available() else 0)
    return bool(module.is_available()) if hasattr(module, "is_available") else False


def release_memory(*objects: Any) -> list[None]:
    """Delete objects, and release their memory.

    Args:
        objects: The objects to delete. Assign the result to their names: ``a, b = release_memory(a, b)``.

    Returns:
        A list that contains None for each object.
    """
    number = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * number


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception means that memory was exhausted (or that no cuDNN plan fits).

    Args:
        exception: An exception that the training code has raised.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(exception, getattr(torch, "OutOfMemoryError", ())):
        return True
    if not isinstance(exception, RuntimeError):
        return isinstance(exception, MemoryError)
    return any(text in str(exception) for text in _OUT_OF_MEMORY)


def _search(function: Callable[..., Any], start: int, reduce: Callable[[], int] | None) -> Callable[..., Any]:
    """Return a function that calls ``function`` with smaller and smaller batch sizes until one fits in memory."""
    name, batch_size = str(getattr(function, "__name__", function)), start

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _refuse_batch_size(function, name, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Do this outside of the handler, because a traceback inside it would keep the function's tensors alive.
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * 0.9) if reduce is None else int(reduce())
        batch_size = start
        raise RuntimeError(
            f"No executable batch size found, reached zero: {name}() exhausts the memory with a batch size of 1"
        )

    return search


def _refuse_batch_size(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> None:
    """Raise an error if a call passes a batch size itself, and therefore has one argument too many."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    if len(names) < len(args) + 1:
        shown = ", ".join(f"{given}={value!r}" for given, value in zip(names[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called; the decorator passes it: write "
            f"`{name}({shown})`"
        )


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, _Parameters], _Result],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[_Parameters, _Result]: ...


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[[Callable[Concatenate[int, _Parameters], _Result]], Callable[_Parameters, _Result]]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with smaller and smaller batch sizes until it fits in memory.

    Args:
        function: The function, whose first parameter is ``batch_size``. If None, a decorator is returned.
        starting_batch_size: The batch size of the first attempt.
        reduce_batch_size_fn: A function that returns the next size to try. If None, each size is nine tenths of the
            previous one.

    Returns:
        The function without its first parameter. Its next call starts with the size that fit.

    Raises:
        RuntimeError: No size above 0 fits. The call raises this.
        TypeError: The call itself passes a batch size.

    Examples:
        >>> @find_executable_batch_size(starting_batch_size=128)
        ... def train(batch_size, model): ...
        >>> train(model)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    check_whole_number("starting_batch_size", starting_batch_size, least=0)
    return _search(function, starting_batch_size, reduce_batch_size_fn)
