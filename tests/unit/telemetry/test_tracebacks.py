"""Exceptions as plain data, even if their class's attributes, texts and names raise errors."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.tracebacks import describe_error

ODD_CLASSES = {
    "its class raises": "class E(Exception):\n    @property\n    def __class__(self): raise KeyError",
    "its attributes raise": "class E(Exception):\n    def __getattribute__(self, name): raise KeyError(name)",
    "its attributes exit": "class E(Exception):\n    def __getattribute__(self, name): raise SystemExit(name)",
    "its text exits": "class E(Exception):\n    def __str__(self): raise SystemExit(3)",
    "its metaclass raises": (
        "class M(type):\n    def __getattribute__(cls, name): raise KeyError(name)\n"
        "    __name__ = __module__ = property(lambda cls: 1 / 0)\nclass E(Exception, metaclass=M): pass"
    ),
    "it has no module": "del __name__\nE = type('E', (Exception,), {})",
    "its module is a number": "class E(Exception): __module__ = 3",
    "it is a syntax error": "class E(SyntaxError):\n    def __getattribute__(self, name): raise KeyError(name)",
    "its cause is odd": "class E(Exception):\n    __cause__ = __context__ = property(lambda self: 1 / 0)",
}


@pytest.mark.parametrize("what", ODD_CLASSES)
def test_an_exception_of_any_class_keeps_its_line(what: str) -> None:
    names: dict[str, Any] = {"__name__": "made"}
    exec(ODD_CLASSES[what], names)
    try:
        raise names["E"]("the reason")
    except BaseException as error:  # noqa: BLE001 - any class
        (info,), text = tracebacks.chain_of(error), describe_error(error)
    assert text.startswith("E")
    assert info.type.endswith("E")
    assert "the reason" in info.message or "exit" in what
    assert info.frames[-1].source == 'raise names["E"]("the reason")' or "syntax" in what


def _recurse(depth: int) -> None:
    if not depth:
        raise ValueError("deep")
    _recurse(depth - 1)


def _even(depth: int) -> None:
    if not depth:
        raise ValueError("deep")
    _odd(depth - 1)


def _odd(depth: int) -> None:
    _even(depth - 1)


def test_the_frames_of_a_recursion_are_folded() -> None:
    with pytest.raises(ValueError, match="deep") as caught:
        _recurse(200)
    functions = [frame.function for frame in tracebacks.chain_of(caught.value)[-1].frames][1:]
    assert functions == ["_recurse", "_recurse", "… the frame above repeats 197 more times …", "_recurse", "_recurse"]


def test_the_frames_of_functions_that_call_each_other_are_folded() -> None:
    with pytest.raises(ValueError, match="deep") as caught:
        _even(200)
    functions = [frame.function for frame in tracebacks.chain_of(caught.value)[-1].frames][1:]
    pair = ["_even", "_odd"]
    assert functions == [*pair, *pair, "… the 2 frames above repeat 97 more times …", *pair, "_even"]
