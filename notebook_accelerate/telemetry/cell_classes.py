"""Classes of notebook cells in several processes: which class of one process is which of another.

A class of a cell belongs to ``__main__``, which no other process can import, and its instances are compared with
``isinstance`` and ``==`` on both sides. Three rules keep one class one class:

- The ``__main__`` of a rank holds the names of the kernel's that its function needs, so that pickle finds them there.
- Every class has a token, which is the same in all processes. A class whose token is known here is that class.
- A class of the same name and definition is the same class: the user has run its cell again, perhaps in a new kernel.

Everything else travels by value, and the reader of a value is warned when ``__main__`` has another class of that name.
"""

from __future__ import annotations

import builtins
import enum
import hashlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle

from notebook_accelerate.telemetry.sink import current_sink

Reduced = tuple[Any, ...]
"""What a reducer returns: callable, arguments, state, None, None, and the callable that sets the state."""
_MODULE_NAMES = ("__name__", "__package__", "__file__")
_NOT_DEFINED = frozenset(
    (
        "__doc__",
        "__module__",
        "__qualname__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotate__",
        "__annotate_func__",
    )
)
"""Attributes that differ between a class and its copy in another process."""
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def is_class(value: object) -> bool:
    """Return whether a value is a class; unlike ``isinstance``, this runs no code of the value."""
    return issubclass(type(value), type)


# ---- names


def _main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def renew_main() -> None:
    """Give this process an empty ``__main__`` for the names of the user's cells, in place of its command line's."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def owner_in_main(value: Any) -> Any:
    """Return the value under the first part of a class's or function's name in ``__main__``.

    Returns:
        ``value`` itself, or the class that it is nested in; None if it is not found by its name.
    """
    if getattr(value, "__module__", None) != "__main__":
        return None
    first, *rest = value.__qualname__.split(".")
    owner = found = _main().get(first)
    for name in rest:
        found = vars(found).get(name) if is_class(found) else None
    return owner if found is value else None


def names_in_texts(code: CodeType) -> dict[str, Any]:
    """Return the values that a function looks up by ``globals()["name"]`` or ``from __main__ import name``."""
    codes = [code]
    for each in codes:
        codes += [value for value in each.co_consts if type(value) is CodeType]
    used = {name for each in codes for name in each.co_names}
    texts = {value for each in codes for value in each.co_consts if type(value) is str}
    names = texts if used & {"globals", "vars", "eval"} else set()
    if "__main__" in used | texts:
        names |= used | texts
    return {name: value for name, value in list(_main().items()) if name in names and not name.startswith("__")}


class MainNames(dict[str, Any]):
    """The globals of the functions of cells in a pickle; where it is read, they are those of ``__main__``."""

    def __init__(self) -> None:
        main = _main()
        super().__init__({name: main[name] for name in _MODULE_NAMES if name in main})

    def __reduce__(self) -> Reduced:
        return _names_of_main, (dict(self),)


def _names_of_main(module_names: dict[str, Any]) -> dict[str, Any]:
    names = _main()
    names.update(module_names)
    return names


def put_into_main(value: Any, state: Reduced) -> None:
    """Set the state of a class or function, and enter it in ``__main__``."""
    set_state, inner, owner = state
    set_state(value, inner)
    if value is owner:
        _main()[value.__qualname__] = value


# ---- tokens


def note_classes() -> None:
    """Give each class in ``__main__`` a token, before processes are forked that pickle instances of it."""
    kinds = [value if is_class(value) else type(value) for value in list(_main().values())]
    for kind in {id(kind): kind for kind in kinds}.values():  # a notebook may have 100,000 names, of few classes
        with suppress(Exception):  # metaclasses of the user
            _note(kind)


def _note(kind: type) -> None:
    if kind.__module__ not in ("__main__", "types"):  # make_dataclass names the latter
        return
    token_of(kind)
    for part in vars(kind).values():
        if is_class(part) and part.__qualname__.startswith(f"{kind.__qualname__}."):
            _note(part)


def token_of(kind: type) -> str:
    """Return the token of a class, by which another process finds the same class."""
    return str(cloudpickle._get_or_create_tracker_id(kind))


def known(token: str) -> type | None:
    """Return this process's class of a token; None if there is none, or no longer."""
    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    return found


def find(name: str, token: str, digest: str, *, warn: bool = False) -> type | None:
    """Return this process's class for a class of another process; None if this process has none.

    Args:
        name: Its qualified name.
        token: Its token.
        digest: What ``definition_digest`` returned there.
        warn: Whether to warn if ``__main__`` has another class of that name.
    """
    ours = known(token)
    current: Any = _main().get(name.partition(".")[0])
    for part in name.split(".")[1:]:
        current = vars(current).get(part) if is_class(current) else None
    if current is ours or not is_class(current):
        return ours or _made.get((name, digest))
    if (here := definition_digest(current)) == digest:
        return current  # type: ignore[no-any-return]
    if warn and current_sink() is None:  # not in a rank, which receives new definitions
        _warn_once(name, (token, here))
    return ours or _made.get((name, digest))


_warned: set[tuple[str, str]] = set()
"""The token of each class that users were warned about, with the digest of the class that had its name."""


def _warn_once(name: str, pair: tuple[str, str]) -> None:
    if pair in _warned:
        return
    _warned.add(pair)
    text = (
        f"the rank had another definition of {name} than this notebook has now: values from the rank keep theirs, and "
        f"are not instances of the current {name}. Launch again to get those"
    )
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("notebook_accelerate."):
        frame = frame.f_back
    place = ("notebook_accelerate", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(text, UserWarning, *place, registry={})  # shown again when the class changes again


# ---- definitions


def definition_digest(kind: type) -> str:
    """Return a digest that is equal for two executions of the same class statement, in any process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _described(kind):
        digest.update(repr(part).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _described(kind: type) -> Iterator[object]:
    yield kind.__qualname__
    for base in kind.__bases__:
        yield base.__module__, base.__qualname__
        if base.__module__ == "__main__":
            yield from _described(base)
    with suppress(Exception):  # annotations may be evaluated here
        yield list(getattr(kind, "__annotations__", ()))
    attributes = dict(vars(kind))
    if issubclass(kind, enum.Enum):  # the rest of its attributes are made from these, in another way by each Python
        attributes = {name: member.value for name, member in kind.__members__.items()}
        attributes |= {name: value for name, value in vars(kind).items() if type(value) is FunctionType}
    for name, value in sorted(attributes.items(), key=lambda item: str(item[0])):
        if name not in _NOT_DEFINED and (summary := _summary(value)) is not None:  # libraries keep caches in classes
            yield name, summary


def _summary(value: Any) -> object:
    """Return the code or the constant that an attribute is; None for other attributes."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if type(value) is property:
        return [_summary(part) for part in (value.fget, value.fset, value.fdel)]
    if type(value) is FunctionType:
        return _code(value.__code__)
    if type(value) is tuple:
        return [_summary(part) for part in value]
    return repr(value) if type(value) in _CONSTANTS else None


def _code(code: CodeType) -> object:
    constants: list[object] = []
    for value in code.co_consts:
        if type(value) is CodeType:
            constants.append(_code(value))
        else:  # the order of a set differs between processes
            constants.append(sorted(map(repr, value)) if type(value) is frozenset else repr(value))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_code, names, constants


def reduce_definition(kind: type, reduced: Reduced) -> Reduced:
    """Reduce a class to its definition, from which a process makes it unless it has the class.

    Args:
        kind: The class.
        reduced: What cloudpickle reduces it to.
    """
    make, arguments, state, _, _, set_state = reduced
    found = (kind.__qualname__, token_of(kind), definition_digest(kind))
    return _find_or_make, (found, make, arguments), (set_state, state), None, None, _complete


_incomplete: dict[int, weakref.ref[type]] = {}
"""Classes that were made and have no attributes yet, by id; those that were found have all of them."""


_made: weakref.WeakValueDictionary[tuple[str, str], type] = weakref.WeakValueDictionary()
"""Classes that only ranks have, by name and digest: each rank's has another token, and they are the same class here."""


def _find_or_make(identity: tuple[str, str, str], make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    kind = find(*identity)
    if kind is None:
        kind = make(*arguments)
        kind.__qualname__ = identity[0]
        _incomplete[id(kind)] = weakref.ref(kind)
        if "<locals>" not in identity[0]:  # equal code of local classes may use different variables
            _made[identity[0], identity[2]] = kind
    return kind


def _complete(kind: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    made = _incomplete.pop(id(kind), None)
    if made is not None and made() is kind:
        set_state, attributes = state
        set_state(kind, attributes)


__all__ = [
    "MainNames",
    "definition_digest",
    "find",
    "is_class",
    "known",
    "names_in_texts",
    "note_classes",
    "owner_in_main",
    "put_into_main",
    "reduce_definition",
    "renew_main",
    "token_of",
]
