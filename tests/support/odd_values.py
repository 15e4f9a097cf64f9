"""JSON with unexpected values, for tests of readers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, -(2**70), 10**400, 1.5, -0.0, 1e18, 1e300, float("nan"), float("inf"),
    -float("inf"), "", "x", "x" * 10_000, "\ud800", "a\0b", "<script>alert(1)</script>", "\x1b[2J", [], {}, [[[]]],
    {"a": {"b": 1}}, "../../etc", "~nobody",
]  # fmt: skip
"""The values that `with_odd_values` inserts."""


def with_odd_values(rng: random.Random, value: Any, depth: int = 1) -> Any:
    """Return a copy of a JSON value, with one to three of the values in it replaced.

    Args:
        rng: The generator that chooses the values.
        value: A list or an object.
        depth: The minimum depth of the replaced values.
    """
    content = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice([place for place in _places(content) if len(place) >= depth])
        inside = content
        for key in way:
            inside = inside[key]
        inside[last] = rng.choice(ODD_VALUES)
    return content


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))
