"""Work that makes many objects and no garbage, such as imports, without Python's automatic garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_switched_off: list[bool] = []
"""Not empty inside a block that has switched collections off."""


def _switch_on() -> None:
    """Switch collections on in a process forked by another thread meanwhile: the block ends in the parent only."""
    if _switched_off:
        _switched_off.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_on)


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave automatic collections out inside the block, which makes objects and drops few.

    The collector runs after a number of new objects. A full collection then looks at all objects of the process: beside
    torch's, that takes 0.1 s. Where collections are off already they stay off.
    """
    if not gc.isenabled():
        yield
        return
    _switched_off.append(True)  # first, and cleared last: a fork may come in between
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _switched_off.clear()
