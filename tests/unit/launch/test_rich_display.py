"""IPython's display functions in a rank, whatever a front end has replaced them with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from notebook_accelerate.worker.rich_display import replace_function


def _plain(*objects: Any) -> str:
    return f"original {objects}"


def _redirected(*objects: Any, **options: Any) -> tuple[Any, ...]:
    return objects, options


def _wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a closure with three free variables, as marimo does."""
    first, second = ["first"], ["second"]

    @functools.wraps(function)
    def display(*objects: Any, **options: Any) -> Any:
        return first, second, function(*objects, **options)

    return display


def test_a_closure_is_redirected_wherever_it_was_imported() -> None:
    def original(*objects: Any) -> str:
        return f"original {objects}"

    module = SimpleNamespace(display=_wrapper(original))
    imported = module.display
    replace_function(module, "display", _redirected)
    for function in (module.display, imported, original):
        assert function(1, display_id=2) == ((1,), {"display_id": 2})


def test_an_object_that_is_not_a_python_function_is_replaced() -> None:
    module = SimpleNamespace(display=functools.partial(_plain, 0))
    replace_function(module, "display", _redirected)
    assert module.display(1) == ((1,), {})
