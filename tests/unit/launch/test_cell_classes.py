"""Classes from cells are compared by their definition, and functions take the names that they use with them."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import gc
import math
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cloudpickle import cloudpickle

from notebook_accelerate._collection import gc_paused
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.telemetry import cells, pickling
from notebook_accelerate.telemetry.pickling import dump, dump_bytes, load_bytes

SOURCES = {
    "dataclass": "@dataclasses.dataclass\nclass Kind:\n    x: float = 1.0\n    def f(self): return {self.x: 'a'}",
    "slots": "@dataclasses.dataclass(slots=True, frozen=True)\nclass Kind:\n    x: float = 1.0",
    "enum": "class Kind(enum.Enum):\n    A = 1\n    B = 'b'\n    def f(self): return self.A",
    "flag": "class Kind(enum.IntFlag):\n    A = 1\n    B = 2",
    "named tuple": "class Kind(typing.NamedTuple):\n    x: int = 3",
    "typed dict": "class Kind(typing.TypedDict):\n    x: int",
    "generic": "class Kind(typing.Generic[T]):\n    y: T\n    def f(self): return lambda: self.y",
    "abstract": "class Kind(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...",
    "decorated": "class Kind:\n    @torch.no_grad()\n    @functools.wraps(len)\n    def f(self, *, y={2, 'a'}): pass",
    "lazy": "class Kind:\n    @functools.cached_property\n    def f(self): return 1",
    "values": "class Kind:\n    x = [{1: torch.ones(2), 'a': {'b', 'c'}}, torch.nn.Linear, math.sin, enum.Enum]",
    "property": "class Kind:\n    @property\n    def f(self): return 1",
    "module": "class Kind(torch.nn.Module):\n    def forward(self, x): return x in {1, 2, 3}",
    "nested": "class Kind:\n    class Inner: z = (1, 'a')\n    @classmethod\n    def f(cls): return cls",
    "child": "class Kind(Base):\n    def f(self): return super().f() + 1",
}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names in a ``__main__`` module that runs cells."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    names = vars(module)
    for each in (abc, dataclasses, enum, functools, math, threading, torch, typing):
        names[each.__name__] = each
    names["T"] = typing.TypeVar("T")
    exec(compile("class Base:\n    def f(self): return 1", "<cell>", "exec", dont_inherit=True), names)
    return names


def _run(source: str, names: dict[str, Any]) -> Any:
    exec(compile(source, "<cell>", "exec", dont_inherit=True), names)
    return names["Kind"]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_cell_that_runs_again_has_the_same_definition(main: dict[str, Any], source: str) -> None:
    first = _run(source, main)
    dump_bytes(first, "the class")  # Pickling leaves caches in the class, which must not affect the digest.
    assert cells.definition_digest(first) == cells.definition_digest(_run("\n\n" + source, main))


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("class Kind:\n    def f(self): return 1", ("return 1", "return 2")),
        ("class Kind:\n    def f(self): return self.a", ("self.a", "self.b")),
        ("class Kind:\n    def f(self): return [i + 1 for i in ()]", ("i + 1", "i + 2")),
        ("class Kind:\n    x = 1", ("x = 1", "x = True")),
        ("class Kind:\n    x: int", ("x: int", "y: int")),
        ("class Kind:\n    @property\n    def f(self): return 1", ("return 1", "return 2")),
        ("class Kind:\n    @staticmethod\n    def f(): return 1", ("return 1", "return 2")),
        ("class Kind(enum.Enum):\n    A = 1", ("A = 1", "A = 2")),
        ("class Kind(Base): pass", ("(Base)", "")),
        ("class Kind:\n    def f(self, by=1): return by", ("by=1", "by=2")),
        ("class Kind:\n    def f(self, *, by=1): return by", ("by=1", "by=2")),
        ("class Kind:\n    @torch.no_grad()\n    def f(self): return 1", ("return 1", "return 2")),
        ("class Kind:\n    @functools.lru_cache\n    def f(self): return 1", ("return 1", "return 2")),
        ("class Kind:\n    @functools.cached_property\n    def f(self): return 1", ("return 1", "return 2")),
        ("class Kind:\n    f = functools.partialmethod(print, 1)", ("print, 1", "print, 2")),
        (
            "def make(x):\n    class Kind:\n        f = lambda self: x\n    return Kind\nKind = make(1)",
            ("make(1)", "make(2)"),
        ),
        ("class Kind:\n    x = [1, {'a': 2}]", ("2}", "3}")),
        ("class Kind:\n    x = {1, 2}", ("2}", "3}")),
        ("class Kind:\n    x = torch.ones(2)", ("ones", "zeros")),
        ("class Kind:\n    x: int", ("x: int", "x: str")),
        ("@dataclasses.dataclass\nclass Kind:\n    x: int = 1", ("= 1", "= 2")),
        ("class Kind(metaclass=abc.ABCMeta): pass", ("(metaclass=abc.ABCMeta)", "")),
        ("class Kind:\n    lock = threading.Lock()", ("", "")),  # Locks can only be compared by identity.
    ],
)
def test_an_edited_cell_has_another_definition(main: dict[str, Any], source: str, change: tuple[str, str]) -> None:
    first, second = _run(source, main), _run(source.replace(*change), main)
    assert cells.definition_digest(first) != cells.definition_digest(second)


def test_a_class_with_a_changed_base_has_another_definition(main: dict[str, Any]) -> None:
    first = _run(SOURCES["child"], main)
    exec(compile("class Base:\n    def f(self): return 2", "<cell>", "exec", dont_inherit=True), main)
    assert cells.definition_digest(first) != cells.definition_digest(_run(SOURCES["child"], main))


def test_classes_are_found_by_name_in_another_process(main: dict[str, Any], tmp_path: Path) -> None:
    cells = "import abc, dataclasses, enum, functools, math, pathlib, torch, typing\nT = typing.TypeVar('T')\n"
    cells += "class Base:\n    def f(self): return 1\n"
    for number, source in enumerate(SOURCES.values()):
        (tmp_path / str(number)).write_bytes(dump_bytes(_run(source, main), "the class"))
        cells += f"{source}\n"
        cells += f"found = load_bytes(pathlib.Path({str(tmp_path / str(number))!r}).read_bytes())\n"
        cells += "assert found is Kind, found.mro()\n"
    cells = f"from notebook_accelerate.telemetry.pickling import load_bytes\n{cells}"
    done = subprocess.run([sys.executable, "-c", cells], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes all classes lose their tokens, as happens in another process."""

    def clear() -> None:
        monkeypatch.setattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
        monkeypatch.setattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", weakref.WeakKeyDictionary())

    return clear


@pytest.fixture
def send(forget: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that sends a call to a rank, and returns the function and arguments that the rank receives."""

    def through_file(function: Any, *arguments: Any) -> Any:
        descriptor = dump((function, arguments), "the function").to_file()
        forget()
        cells.renew_main()
        return pickling.load_file(descriptor)[0]

    return through_file


def test_a_large_definition_is_not_sent(main: dict[str, Any], forget: Callable[[], None]) -> None:
    main["table"] = torch.zeros(pickling.MAX_DEFINITION_BYTES)
    kind = _run("class Kind:\n    def f(self): return table", main)
    data = dump_bytes(kind(), "the value")
    assert len(data) < 10_000
    assert type(load_bytes(data)) is kind
    forget()
    del main["Kind"]
    with pytest.raises(SerializationError, match="Run the cell that defines Kind, then read the value again"):
        load_bytes(data)


def test_the_size_of_a_tensor_is_checked_before_copying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Kind", (), {"__module__": "__main__", "table": torch.zeros(pickling.MAX_DEFINITION_BYTES // 4 + 1)})
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda _: pytest.fail("the tensor was read"))
    data, _ = pickling._dump_definition(kind)
    assert isinstance(data, str)
    assert "more than 4.00 MB" in data


def test_a_launch_shares_the_globals_of_main(main: dict[str, Any], send: Callable[..., Any]) -> None:
    source = "count = [0]\nclass Kind:\n    def f(self): return count\ndef train(): return count, Kind().f()"
    _run(source, main)
    train = send(main["train"])
    names = vars(sys.modules["__main__"])
    assert train.__globals__ is names
    assert {"train", "Kind", "count"} <= names.keys()
    assert "Base" not in names
    assert train()[0] is train()[1]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("model.eval(), model.vars(), 'table', 'lock'", set()),
        ("'table' if __name__ == '__main__' else model.modules()", set()),
        ("vars(model), 'table'", set()),
        ("globals()['table']", {"table"}),
        ("[globals()[name] for name in ('table', 'lock')]", {"table", "lock"}),
        ("eval('table + size.lock')", {"table", "size"}),
        ("exec('print(table)') or 'size'", {"table", "size"}),
        ("sys.modules[__name__].table, model.eval()", {"table", "eval"}),
        ("vars(sys.modules['__main__'])['table']", {"table"}),
        ("sys.modules.get('__main__').table", {"table"}),
        ("getattr(import_module('__main__'), 'table')", {"table"}),
        ("__import__('__main__').table, importlib.import_module(__name__).size", {"table", "size"}),
        ("(lambda: globals()['table'])()", {"table"}),
    ],
)
def test_names_that_a_function_looks_up_by_strings_are_found(
    main: dict[str, Any], body: str, expected: set[str]
) -> None:
    _run("def eval(model): ...\ntable = lock = size = 1\ndef Kind(): return " + body, main)
    if not expected or "eval" not in expected:
        del main["eval"]
    assert cells.undetected_names(main["Kind"].__code__) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("from __main__ import table as t, size; model.eval(); t.lock", {"table", "size"}),
        ("import __main__; print('size', __main__.table)", {"table", "size"}),
        ("import __main__ as m; from __main__ import size; m.table", {"table", "size"}),
        ("from os.path import table; import size", set()),
        ("class Inner: x = table", {"table"}),
        ("class Inner:\n  size = 1\n  x = size\n  class Deeper: y = lock", {"lock"}),
    ],
)
def test_names_in_statements_of_a_function_are_found(main: dict[str, Any], lines: str, expected: set[str]) -> None:
    _run("def eval(model): ...\ntable = lock = size = 1\ndef Kind():\n " + lines, main)
    assert cells.undetected_names(main["Kind"].__code__) == expected


def test_a_function_of_the_user_named_eval_looks_up_no_names_in_strings(main: dict[str, Any]) -> None:
    _run("def eval(model, name): ...\ntable = 1\ndef Kind(): return eval(1, 'table')", main)
    assert cells.undetected_names(main["Kind"].__code__) == set()


def test_names_in_strings_that_cannot_be_pickled_are_omitted(main: dict[str, Any], send: Callable[..., Any]) -> None:
    source = """
lock, table = threading.Lock(), [1]
def helper(): return globals()["lock"]
def Kind(name):
    names = "helper", "lock", "table"
    return globals()[name], names
"""
    _run(source, main)
    function = send(main["Kind"], "table")
    assert function("table")[0] == [1]
    assert {"helper", "table"} < vars(sys.modules["__main__"]).keys()
    with pytest.raises(KeyError, match="'lock'") as found:
        function("helper")[0]()
    cells.explain_omitted(found.value)
    assert found.value.__notes__ == [
        "The notebook has 'lock', but it could not be sent to this rank: TypeError: cannot pickle '_thread.lock' object"
    ]


def test_an_error_about_another_name_gets_no_explanation(main: dict[str, Any], send: Callable[..., Any]) -> None:
    _run("lock = threading.Lock()\ndef Kind(): return globals()['lock']", main)
    send(main["Kind"])
    for error in (NameError("name 'block' is not defined"), ValueError("lock"), AttributeError("no lock")):
        cells.explain_omitted(error)
        assert not hasattr(error, "__notes__")


def test_different_classes_with_the_same_name_stay_different_in_a_launch(
    main: dict[str, Any], send: Callable[..., Any]
) -> None:
    source = """
def make(scale):
    return type("Scale", (torch.nn.Module,), {"forward": lambda self, x: x * scale})
scales = [make(2)(), make(3)(), make(2)()]
class Kind:
    def __call__(self, x=1): return x
first = Kind()
class Kind:
    def __call__(self, x=1): return x
second = Kind()
def train(): return [scale(1) for scale in scales], first(), type(first) is type(second), type(second) is Kind
"""
    _run(source, main)
    expected = main["train"]()
    train = send(main["train"])
    assert train() == expected == ([2, 3, 2], 1, False, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        lambda: FileNotFoundError(2, "no such file", "a.txt"),
        lambda: ImportError("no", name="x", path="y"),
        lambda: StopIteration(3),
        lambda: KeyError("k"),
        lambda: ValueError("a", 1),
    ],
)
def test_python_exceptions_keep_their_fields(make: Callable[[], BaseException]) -> None:
    error, back = make(), load_bytes(dump_bytes(make(), "the error"))
    fields = ("args", "errno", "filename", "reason", "object", "end", "name", "path", "msg", "value")
    assert type(back) is type(error)
    assert [getattr(back, name, None) for name in fields] == [getattr(error, name, None) for name in fields]


def test_an_exception_is_restored_without_its_constructor(main: dict[str, Any]) -> None:
    source = """
class Kind(ValueError):
    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code
"""
    error = _run(source, main)(3, where="here")
    error.add_note("a note") if hasattr(error, "add_note") else None
    back = load_bytes(dump_bytes(error, "the error"))
    assert (type(back), str(back), back.code) == (type(error), "code 3 at here", 3)
    assert vars(back) == vars(error)


def test_an_exception_with_its_own_reduction_keeps_it(main: dict[str, Any]) -> None:
    source = """
class Kind(Exception):
    def __init__(self, code):
        super().__init__()
        self.code = code
    def __reduce__(self):
        return Kind, (self.code + 1,)
"""
    assert load_bytes(dump_bytes(_run(source, main)(3), "the error")).code == 4


class _Equal(type):
    """A metaclass that defines equality but no hash, like those of some libraries."""

    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


def test_a_class_that_cannot_be_hashed_is_accepted(main: dict[str, Any]) -> None:
    odd = _Equal("Odd", (), {"__module__": "__main__"})
    plain = type("Plain", (), {"__module__": "__main__"})
    cells.note_classes()
    assert cells.known(cells.token_of(plain)) is plain
    assert odd is not plain


_FORKED = """
import os, signal
from cloudpickle import cloudpickle
from notebook_accelerate.telemetry import cells
with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
    child = os.fork()
    if not child:
        signal.alarm(10)  # The signal ends the process if it waits for the lock.
        os._exit(len(cells.token_of(type("Kind", (), {}))))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forked_while_the_lock_is_held_can_create_tokens() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, check=True)
    assert done.stdout == "32\n"


def _create_many() -> object:
    return [[] for _ in range(2 * cells._MANY)]


@pytest.mark.parametrize("happens", [None, gc.collect, gc.freeze, _create_many])
def test_all_classes_are_searched_if_new_ones_were_moved_or_there_are_too_many_new_objects(
    main: dict[str, Any], happens: Callable[[], object] | None
) -> None:
    searched: list[str] = []

    def count(_: object, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "__subclasses__":
            searched.append(called.__name__)

    gc.collect()
    with gc_paused():
        try:
            cells.note_classes()
            kind = type("Kind", (), {"__module__": "__main__"})
            created = happens() if happens is not None else None
            sys.setprofile(count)
            cells.note_classes()
        finally:
            sys.setprofile(None)
    assert kind in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    assert bool(searched) is (happens is not None or sys.version_info >= (3, 14))
    del created
