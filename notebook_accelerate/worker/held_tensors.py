"""Tensors that the variables of the running functions hold at a step boundary, and the graphs behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice, takewhile
from types import FrameType
from typing import TYPE_CHECKING, Any

from notebook_accelerate.telemetry.tracebacks import is_user_code
from notebook_accelerate.worker import stacks

if TYPE_CHECKING:
    from torch import Tensor

MAX_NAMES, MAX_ITEMS, MAX_FOUND, MAX_NODES, MAX_READ_NODES = 500, 100_000, 50, 20_000, 200
_CONTAINERS = (list, tuple, set, dict)


def user_frames() -> list[FrameType]:
    """Return the frames of the user's code on the main thread, innermost first."""
    inside = takewhile(stacks.in_function, stacks.callers(stacks.main_frame()))
    return [frame for frame in islice(inside, 100) if is_user_code(frame.f_code.co_filename)]


def variables() -> Iterator[tuple[str, str, Any]]:
    """Yield the variables of the user's frames, of their modules, and the attributes of modules and objects in them.

    Each as its name, its function, and its value.
    """
    seen: set[int] = set()
    for frame in user_frames():
        places = [(frame.f_locals, frame.f_code.co_name), (frame.f_globals, "globals")]
        for names, function in places:
            if id(names) in seen:
                continue
            seen.add(id(names))
            for name, value in islice(list(names.items()), MAX_NAMES):
                if not name.startswith("__") and id(value) not in seen:
                    yield name, function, value
                    yield from _attributes(name, function, value, seen)


def _attributes(name: str, function: str, value: object, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    torch: Any = sys.modules["torch"]
    if isinstance(value, (type, *_CONTAINERS)) or not hasattr(value, "__dict__") or isinstance(value, torch.Tensor):
        return
    if id(value) in seen or (not is_own(type(value)) and not isinstance(value, torch.nn.Module)):
        return
    seen.add(id(value))
    modules = value.named_modules() if isinstance(value, torch.nn.Module) else [("", value)]
    for path, module in islice(modules, MAX_NAMES):
        seen.add(id(module))
        for key, held in list(vars(module).items()):
            if not key.startswith("_") and not isinstance(held, torch.nn.Module):
                yield ".".join(filter(None, [name, path, key])), function, held


def is_own(kind: type) -> bool:
    """Whether a class is the user's."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_user_code(getattr(module, "__file__", None) or "<string>")


def held_graphs() -> dict[str, Any]:
    """Return, by name of a variable, the tensors with a graph that it holds.

    For a container, or an attribute: how many, and their bytes; for a variable that is a tensor: the bytes that its
    graph keeps after backward.
    """
    torch: Any = sys.modules["torch"]
    found: dict[str, Any] = {}
    for name, function, value in variables():
        row = None
        if isinstance(value, torch.Tensor):
            row = _of_tensor(value, attribute="." in name)
        elif isinstance(value, _CONTAINERS) or type(value).__name__ in ("deque", "defaultdict", "OrderedDict"):
            row = _of_container(value)
        if row is not None and len(found) < (MAX_FOUND if row["count"] else MAX_FOUND // 2):
            found[name] = {**row, "function": function}
    return found


def _of_container(value: Any) -> dict[str, Any] | None:
    torch: Any = sys.modules["torch"]
    items = value.values() if isinstance(value, dict) else value
    tensors = [each for each in islice(items, MAX_ITEMS) if isinstance(each, torch.Tensor) and _has_graph(each)]
    if not tensors and value:
        return None
    return {"count": len(tensors), "bytes": sum(each.nbytes for each in tensors), "kind": "container", "id": id(value)}


def _of_tensor(value: Tensor, *, attribute: bool) -> dict[str, Any] | None:
    if not _has_graph(value):
        return None
    saved, nodes = graph_size(value)
    if attribute:
        return {"count": 1, "bytes": value.nbytes + saved, "kind": "attribute", "nodes": nodes}
    return {"count": 1, "bytes": saved, "kind": "tensor", "nodes": nodes}


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def graph_size(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of activations that a tensor's graph still keeps, and the number of its nodes, both bounded."""
    torch: Any = sys.modules["torch"]
    pending: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    kept: dict[int, int] = {}
    freed = False
    while pending and len(seen) < MAX_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(each for each, _ in node.next_functions)
        if freed or len(seen) > MAX_READ_NODES:
            continue
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed by backward, as usual
                freed = True
                break
            if isinstance(saved, torch.Tensor) and not saved.is_leaf:
                kept[saved.data_ptr()] = saved.nbytes
    return sum(kept.values()), len(seen)


def compiled_variable() -> str:
    """Return the name of a variable that holds a compiled module; "" where there is none."""
    for frame in user_frames():
        for name, value in list(frame.f_locals.items()):
            if type(value).__name__ == "OptimizedModule":
                return name
    return ""


__all__ = ["compiled_variable", "graph_size", "held_graphs", "user_frames", "variables"]
