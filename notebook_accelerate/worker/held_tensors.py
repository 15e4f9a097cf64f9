"""Find tensors held by variables of the running functions at a step boundary, and the graphs behind them."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from inspect import CO_OPTIMIZED
from itertools import islice, takewhile
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accelerate.telemetry.tracebacks import callers, is_user_code, main_frame
from notebook_accelerate.worker import stacks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

MAX_NAMES, MAX_ITEMS, MAX_FOUND, MAX_NODES, MAX_READ_NODES = 500, 100_000, 50, 20_000, 200
MANY, NESTED = 1000, 2
"""Limits for containers. Only ``MANY`` items of a long list, or of a container without tensors among them, are read.

Nested containers are inspected down to the depth ``NESTED``.
"""
_CONTAINERS = (list, tuple, set, dict)
_PLAIN = {int, float, str, bool, bytes, type(None), type, ModuleType, FunctionType, BuiltinFunctionType}
"""Types of values that hold no tensors, or only tensors that the user has not named, such as those in a module."""
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")
_UNSHARED = 3
"""The number of references to ``f_locals`` if nothing else uses it. The frame, the variable, and the call that counts
them each hold one."""


def user_frames() -> list[FrameType]:
    """Return the frames of the user's code on the main thread, innermost first."""
    inside = takewhile(stacks.in_function, callers(main_frame()))
    return [frame for frame in islice(inside, 100) if is_user_code(frame.f_code.co_filename)]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables in a dictionary to which only the caller has a reference.

    Before Python 3.13, a function's frame keeps the dictionary ``f_locals`` with all values until it is read again.
    """
    shared = frame.f_locals
    found = dict(shared)
    function = sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED
    # More references would mean that the function has called locals() and uses the dictionary itself.
    if function and sys.getrefcount(shared) == _UNSHARED:
        shared.clear()
    return found


class Held(NamedTuple):
    """A value that a variable or an attribute holds.

    Attributes:
        name: The name of the variable or attribute, such as "losses" or "self.losses".
        function: The function it belongs to, or "globals" for the variables of a module.
        value: The value that it holds.
        kept: Whether the value is kept from one step to the next, because the running loop does not assign the
            variable.
    """

    name: str
    function: str
    value: Any
    kept: bool = True


def variables() -> Iterator[Held]:
    """Yield the variables of the user's frames and modules, and the attributes of objects and modules among these."""
    seen: set[int] = set()
    modules: set[int] = set()
    for frame in user_frames():
        function, assigned = frame.f_code.co_name, assigned_in_loops(frame)
        yield from _named(variables_of(frame), function, seen, assigned)
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            yield from _named(frame.f_globals, "globals", seen, assigned or ())


def _named(names: dict[str, Any], function: str, seen: set[int], assigned: Collection[str] | None) -> Iterator[Held]:
    for name, value in islice(list(names.items()), MAX_NAMES):
        if type(value) not in _PLAIN and not name.startswith("__") and id(value) not in seen:
            yield Held(name, function, value, assigned is not None and name not in assigned)
            yield from _attributes(name, function, value, seen)


def assigned_in_loops(frame: FrameType) -> set[str] | None:
    """Return the names that a frame's running loops assign, or None if no loop is running.

    Without a running loop, each step has a new frame. A loop is the code between a backward jump and its target. It is
    running if it contains the frame's current instruction.
    """
    loops, stores = _loops_and_stores(frame.f_code)
    running = [(start, end) for start, end in loops if start <= frame.f_lasti <= end]
    if not running:
        return None
    first, last = min(start for start, _ in running), max(end for _, end in running)
    return {name for offset, name in stores if first <= offset <= last}


@lru_cache(maxsize=100)
def _loops_and_stores(code: CodeType) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, str], ...]]:
    """Return the loops of a code object, and the offsets at which it stores names.

    A loop extends from the target of a backward jump to the jump. The result is cached, because reading the
    instructions takes milliseconds.
    """
    jumps = {*dis.hasjrel, *dis.hasjabs}
    loops: list[tuple[int, int]] = []
    stores: list[tuple[int, str]] = []
    for each in dis.get_instructions(code):
        if each.opcode in jumps and each.argval < each.offset:
            loops.append((each.argval, each.offset))
        elif each.opname.startswith(_STORES):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            stores.extend((each.offset, name) for name in names)
    return tuple(loops), tuple(stores)


def prepare() -> None:
    """Analyse the code of the running functions in advance, to save time on the main thread. Works on any thread."""
    for frame in user_frames():
        _loops_and_stores(frame.f_code)


def _attributes(name: str, function: str, value: object, seen: set[int]) -> Iterator[Held]:
    torch: Any = sys.modules["torch"]
    if isinstance(value, (type, *_CONTAINERS)) or not hasattr(value, "__dict__") or isinstance(value, torch.Tensor):
        return
    if id(value) in seen or (not is_user_class(type(value)) and not isinstance(value, torch.nn.Module)):
        return
    seen.add(id(value))
    modules = value.named_modules() if isinstance(value, torch.nn.Module) else [("", value)]
    for path, module in islice(modules, MAX_NAMES):
        seen.add(id(module))
        for key, held in list(vars(module).items()):
            if type(held) not in _PLAIN and not key.startswith("_") and not isinstance(held, torch.nn.Module):
                yield Held(".".join(filter(None, [name, path, key])), function, held)


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_user_code(getattr(module, "__file__", None) or "<string>")


class GraphWatch:
    """Repeatedly inspects the tensors with graphs that variables hold."""

    def __init__(self) -> None:
        self._roots: dict[str, Any] = {}

    def look(self) -> dict[str, Any]:
        """Return a description of the tensors that each variable holds, by the variable's name.

        The description of a container gives the number of its tensors and their total size in bytes. The description of
        a tensor gives the size in bytes of what its graph keeps after backward (for an attribute, plus the size of the
        tensor itself), the number of nodes in its graph, and how many of them are new since the previous call (0 if the
        graph is a different one).
        """
        torch: Any = sys.modules["torch"]
        found: dict[str, Any] = {}
        for held in variables():
            row = None
            if isinstance(held.value, torch.Tensor):
                row = self._of_tensor(held)
            elif _is_container(held.value):
                row = _of_container(held.value)
            if row is not None and len(found) < (MAX_FOUND if row["count"] else MAX_FOUND // 2):
                found[held.name] = {**row, "function": held.function, "kept": held.kept}
        return found

    def _of_tensor(self, held: Held) -> dict[str, Any] | None:
        tensor: Tensor = held.value
        if not _has_graph(tensor):
            return None
        saved, nodes = graph_size(tensor)
        root = self._roots.pop(held.name, None)
        added = _nodes_above(tensor.grad_fn, root) if root is not None else 0
        # Keep the root only if its graph holds no activations, because the root would keep them alive.
        if not saved and len(self._roots) < MAX_FOUND:
            self._roots[held.name] = tensor.grad_fn
        own = tensor.nbytes if "." in held.name else 0
        return {"count": 1, "bytes": own + saved, "kind": "tensor", "nodes": nodes, "added": added}


def _is_container(value: object) -> bool:
    if type(value) in _PLAIN:
        return False
    return isinstance(value, _CONTAINERS) or type(value).__name__ in ("deque", "defaultdict", "OrderedDict")


def _of_container(value: Any) -> dict[str, Any] | None:
    """Describe the tensors with graphs in a container, or return None if it has items but no such tensors."""
    if isinstance(value, list) and len(value) > MANY:  # The last items represent all of them.
        last = value[-MANY:]
        if not all(_is_tensor(each) and _has_graph(each) for each in last):
            return None
        size = sum(each.nbytes for each in last) * len(value) // MANY
        return {"count": len(value), "bytes": size, "kind": "container", "id": id(value)}
    if _is_plain(value):
        return None
    torch: Any = sys.modules["torch"]
    tensor, number = torch.Tensor, 0
    tensors = []
    for number, each in enumerate(islice(_leaves(value, NESTED), MAX_ITEMS), 1):
        if isinstance(each, tensor):
            tensors.append(each)
        elif number >= MANY and not tensors:  # The container holds something else, such as a vocabulary.
            return None
    held = [each for each in tensors if _has_graph(each)]
    if number and not held:
        return None
    return {"count": len(held), "bytes": sum(each.nbytes for each in held), "kind": "container", "id": id(value)}


def _is_plain(value: object) -> bool:
    """Return whether a container has only plain values, such as a loss history. A loop would take ten times as long."""
    values: Any = value.values() if isinstance(value, dict) else value
    kinds = set(map(type, islice(values, MAX_ITEMS)))
    return bool(kinds) and kinds <= _PLAIN


def _leaves(value: Iterable[object], depth: int) -> Iterator[Any]:
    """Yield the values of a container and of nested containers. A container of plain values yields a single None."""
    for each in value.values() if isinstance(value, dict) else value:
        if depth and _is_container(each) and _is_plain(each):
            yield None
        elif depth and _is_container(each) and isinstance(each, Iterable):
            yield from _leaves(each, depth - 1)
        else:
            yield each


def _is_tensor(value: object) -> bool:
    torch: Any = sys.modules["torch"]
    return isinstance(value, torch.Tensor)


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _nodes_above(node: Node | None, root: Node) -> int:
    """Return the number of a graph's nodes above ``root``, or 0 if the graph does not contain ``root``.

    The search visits at most `MAX_NODES` nodes, nearest first: in a sum of losses, the earlier sum is never far.
    """
    if node is None or node is root:
        return 0
    pending, seen, contained = deque([node]), {node}, False
    while pending and len(seen) < MAX_NODES:
        for each, _ in pending.popleft().next_functions:
            contained = contained or each is root
            if each is not None and each is not root and each not in seen:
                seen.add(each)
                pending.append(each)
    return len(seen) if contained else 0


def graph_size(tensor: Tensor) -> tuple[int, int]:
    """Return the size in bytes of the activations that a tensor's graph still keeps, and the number of its nodes.

    At most `MAX_NODES` nodes are visited, and the activations of at most `MAX_READ_NODES` are read.
    """
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
            except RuntimeError:  # The backward pass has already freed this activation, as it usually does.
                freed = True
                break
            if isinstance(saved, torch.Tensor) and not saved.is_leaf:
                kept[saved.data_ptr()] = saved.nbytes
    return sum(kept.values()), len(seen)


def compiled_variable() -> str:
    """Return the name of a variable, or of a user object's attribute, that holds a compiled module, or ""."""
    for frame in user_frames():
        for name, value in variables_of(frame).items():
            if type(value).__name__ == "OptimizedModule":
                return name
            own = hasattr(value, "__dict__") and is_user_class(type(value))
            for key, held in list(vars(value).items()) if own else ():
                if type(held).__name__ == "OptimizedModule":
                    return f"{name}.{key}"
    return ""
