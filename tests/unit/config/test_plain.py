"""Small helpers on plain values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from notebook_accelerate.config.plain_values import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1024, "1.0 KB"),
        (123456789012, "114.98 GB"),
        (1e20, "88817.84 PB"),
        (-2048, "-2.0 KB"),
    ],
)
def test_sizes_are_readable(size: float, text: str) -> None:
    assert convert_bytes(size) == text


def test_names_are_those_of_functions_and_classes() -> None:
    assert get_pretty_name(get_pretty_name) == "get_pretty_name"
    assert get_pretty_name(SimpleNamespace) == "SimpleNamespace"
    assert get_pretty_name(SimpleNamespace()) == "SimpleNamespace"
    assert get_pretty_name(3) == "int"


def test_dicts_merge_at_every_depth() -> None:
    destination = {"a": {"d": 3}, "c": 4, "e": 5}
    merged = merge_dicts({"a": {"b": 1}, "c": 2, "e": {"f": 6}}, destination)
    assert merged is destination
    assert merged == {"a": {"b": 1, "d": 3}, "c": 2, "e": {"f": 6}}


def test_attributes_are_found_by_path() -> None:
    outer = SimpleNamespace(inner=SimpleNamespace(value=7))
    assert recursive_getattr(outer, "inner.value") == 7
    with pytest.raises(AttributeError, match="missing"):
        recursive_getattr(outer, "inner.missing")
