"""Sorts the `kwargs_handlers` of an `Accelerator` by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias, TypeVar

from notebook_accelerate.config.fp8_recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)

_Handler = TypeVar("_Handler", bound=KwargsHandler)
Fp8Recipe: TypeAlias = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs
_FIELD_OF_CLASS: tuple[tuple[type[KwargsHandler] | UnionType, str], ...] = (
    (DistributedDataParallelKwargs, "ddp"),
    (GradScalerKwargs, "scaler"),
    (InitProcessGroupKwargs, "init"),
    (AutocastKwargs, "autocast"),
    (ProfileKwargs, "profile"),
    (Fp8Recipe, "fp8"),
)


@dataclass(kw_only=True)
class Handlers:
    """At most one handler of each kind; None for kinds without one."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: Fp8Recipe | None = None


def sort_handlers(handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Sort handlers by kind.

    Args:
        handlers: The argument `kwargs_handlers`.

    Returns:
        The handlers by kind.

    Raises:
        ValueError: An object is no handler, or there are two of a kind.
    """
    if isinstance(handlers, KwargsHandler):
        raise ValueError(f"kwargs_handlers takes a list; write kwargs_handlers=[{type(handlers).__name__}(...)]")
    found: dict[str, Any] = {}
    for handler in handlers or ():
        field = next((name for kind, name in _FIELD_OF_CLASS if isinstance(handler, kind)), None)
        if field is None:
            raise ValueError(
                f"kwargs_handlers holds {handler!r}, which is none of AutocastKwargs, DistributedDataParallelKwargs, "
                "FP8RecipeKwargs (or another recipe), GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs"
            )
        if field in found:
            raise ValueError(f"kwargs_handlers holds two {type(handler).__name__}; pass at most one of a kind")
        found[field] = handler
    return Handlers(**found)


def check_handler(name: str, handler: _Handler | None, kind: type[_Handler]) -> _Handler | None:
    """Return a handler that is assigned to an attribute of an `Accelerator`.

    Args:
        name: The attribute.
        handler: The new value.
        kind: The class of its values.

    Raises:
        ValueError: The value has another type.
    """
    if handler is not None and not isinstance(handler, kind):
        raise ValueError(f"{name} takes {kind.__name__}(...) or None; got {type(handler).__name__} ({handler!r:.60})")
    return handler
