"""Work that makes many objects and no garbage, such as imports, without Python's automatic garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave automatic collections out inside the block, which makes objects and drops few.

    The collector runs after a number of new objects. A full collection then looks at all objects of the process: beside
    torch's, that takes 0.1 s. Where collections are off already they stay off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
