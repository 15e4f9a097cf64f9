"""Report what a rank's memory holds: parameters, gradients, optimizer state and other tensors."""

from __future__ import annotations

import resource
import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from traceback import walk_tb
from types import FrameType
from typing import Any

from notebook_accelerate._collection import instances
from notebook_accelerate.batch_size_search import should_reduce_batch_size
from notebook_accelerate.telemetry.debug_protocol import memory_table
from notebook_accelerate.telemetry.sharding import KINDS, states_per_parameter
from notebook_accelerate.telemetry.tracebacks import is_user_code
from notebook_accelerate.torch_internals import local_tensor
from notebook_accelerate.worker.held_tensors import user_frames, variables_of

MAX_ROWS = 20
_NO_MEMORY = ("can't allocate memory", "not enough memory")


class _StorageCounter:
    """Adds up the sizes of storages, and counts each storage only once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def add(self, tensors: Iterable[Any]) -> int:
        """Return the total size in bytes of the storages that were not counted before."""
        total = 0
        for tensor in tensors:
            with suppress(Exception):  # The tensor may be of a subclass without storage.
                local = local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor
                storage = local.untyped_storage()
                key = str(local.device), storage.data_ptr()
                if key[1] and key not in self._seen:
                    self._seen.add(key)
                    total += storage.nbytes()
        return total


def take_memory_report(frames: Sequence[FrameType] | None = None) -> dict[str, Any]:
    """Return the memory report of this rank. The main thread must not run Python code during the call.

    Args:
        frames: The frames whose variables are inspected. If None, these are the frames of the user's code on the main
            thread.

    Returns:
        The report for JSON, with all sizes in bytes: ``parts``, the sizes by kind; ``expected``, the sizes by kind that
            parameters and optimizers should need; ``modules``, rows of name, parameters, gradients and optimizer state;
            ``variables``, rows of name, function and size; ``process``, the sizes of the process; ``devices``, the
            sizes by device; ``lines``, rows of file, line and size.
    """
    torch: Any = sys.modules["torch"]
    modules, optimizers, tensors = _instances(torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
    roots = _roots(modules)
    state = {id(p): held for each in optimizers for p, held in list(each.state.items())}
    held = _StorageCounter()
    rows: list[list[Any]] = []
    totals = dict.fromkeys(KINDS, 0)
    for root in roots:
        for name, module in list(root.named_modules()):
            row = _module_row(module, state, held)
            for kind, size in zip(KINDS, row, strict=False):
                totals[kind] += size
            if any(row):
                rows.append([name or type(module).__name__, *row])
    totals["parameters"] += held.add(p for root in roots for p in root.parameters())
    totals["optimizer state"] += held.add(t for each in state.values() for t in _tensors(each))
    variables = _variables(held, user_frames() if frames is None else frames)
    totals["activations now"] = held.add(each for each in tensors if each.grad_fn is not None)
    totals["other tensors"] = sum(size for _, _, size in variables) + held.add(tensors)
    rows.sort(key=lambda row: -sum(row[1:]))
    return {
        "parts": totals, "expected": _expected(roots, optimizers), "modules": rows[:MAX_ROWS],
        "variables": variables[:MAX_ROWS], "process": _process(), "devices": _devices(), "lines": _lines(),
    }  # fmt: skip


def _instances(*kinds: type) -> list[list[Any]]:
    """Return the instances of each class."""
    found = instances(*kinds)
    return [[each for each in found if issubclass(type(each), kind)] for kind in kinds]


def _roots(modules: list[Any]) -> list[Any]:
    """Return the modules that no other module contains."""
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _expected(roots: list[Any], optimizers: list[Any]) -> dict[str, int]:
    """Return the sizes in bytes of the parameters and, as expected, of their gradients and the optimizers' states.

    If the type of any optimizer is unknown, the optimizers' states are left out.
    """
    every = {id(each): each for root in roots for each in (*root.parameters(), *root.buffers())}
    trained: dict[int, int] = {}
    states: dict[int, int] = {}
    known = True
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            count = states_per_parameter(getattr(optimizer, "optimizer", optimizer), group)
            known = known and count is not None
            for each in group["params"]:
                trained[id(each)] = _own_bytes(each) if each.requires_grad else 0
                states[id(each)] = trained[id(each)] * (count or 0)
    found = {"parameters": sum(map(_own_bytes, every.values()))}
    if trained:
        found["gradients"] = sum(trained.values())
    if trained and known:
        found["optimizer state"] = sum(states.values())
    return found


def _own_bytes(tensor: Any) -> int:
    local = local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor
    return int(local.numel() * local.element_size())


def _module_row(module: Any, state: dict[int, Any], held: _StorageCounter) -> list[int]:
    parameters = list(module.parameters(recurse=False))
    grads = [p.grad for p in parameters if p.grad is not None]
    states = [tensor for p in parameters for tensor in _tensors(state.get(id(p), {}))]
    return [held.add([*parameters, *module.buffers(recurse=False)]), held.add(grads), held.add(states)]


def _tensors(value: object) -> list[Any]:
    torch: Any = sys.modules["torch"]
    return [each for each in (value.values() if isinstance(value, dict) else ()) if isinstance(each, torch.Tensor)]


def _variables(held: _StorageCounter, frames: Iterable[FrameType]) -> list[list[Any]]:
    """Return the variables of the user's functions that hold tensors which do not belong to a model."""
    torch: Any = sys.modules["torch"]
    rows = []
    for frame in frames:
        for name, value in variables_of(frame).items():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            size = held.add(each for each in list(items)[:100_000] if isinstance(each, torch.Tensor))
            if size:
                rows.append([name, frame.f_code.co_name, size])
    return sorted(rows, key=lambda row: -row[2])


def _process() -> dict[str, int]:
    from notebook_accelerate.worker.step_profiler import resident_bytes

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resident_bytes()
    # The system updates the peak less often than the size.
    peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    found = {"resident": resident, "peak": peak}
    if tracemalloc.is_tracing():
        found["python"] = tracemalloc.get_traced_memory()[0]
    return found


def _devices() -> dict[str, dict[str, int]]:
    """Return the counters of each CUDA device.

    Unused memory in the cache that cannot be reused counts as fragmented.
    """
    cuda: Any = sys.modules["torch"].cuda
    found = {}
    if cuda.is_available() and cuda.is_initialized():
        for index in range(cuda.device_count()):
            stats = cuda.memory_stats(index)
            if not stats.get("reserved_bytes.all.peak", 0):
                continue
            found[f"cuda:{index}"] = {
                "allocated": stats["allocated_bytes.all.current"],
                "peak": stats["allocated_bytes.all.peak"],
                "cache": stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"],
                "fragmented": stats.get("inactive_split_bytes.all.current", 0),
                "total": cuda.mem_get_info(index)[1],
            }
    return found


def _lines() -> list[list[Any]]:
    """Return the lines that have allocated the most Python memory, if tracemalloc is running."""
    if not tracemalloc.is_tracing():
        return []
    found = tracemalloc.take_snapshot().statistics("lineno")[:MAX_ROWS]
    return [[each.traceback[0].filename, each.traceback[0].lineno, each.size] for each in found]


def note_failure(error: BaseException) -> None:
    """Add the memory report as a note to an error that reports exhausted memory. The note is shown with the error."""
    memory = isinstance(error, Exception) and should_reduce_batch_size(error)
    if "torch" not in sys.modules or not (memory or any(text in str(error) for text in _NO_MEMORY)):
        return
    with suppress(Exception):  # If the report fails, the error itself must still be raised.
        frames = [frame for frame, _ in walk_tb(error.__traceback__) if is_user_code(frame.f_code.co_filename)]
        notes = [*getattr(error, "__notes__", ()), memory_table(take_memory_report(frames[::-1]))]
        error.__notes__ = notes  # type: ignore[attr-defined]  # add_note requires Python 3.11
