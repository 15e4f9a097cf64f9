"""Helpers for plain values: sizes, names, nested dicts and settings as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import notebook_accelerate
from notebook_accelerate.config.plain_values import (
    convert_bytes,
    format_setting,
    merge_dicts,
    size_text,
)
from notebook_accelerate.utils import AutocastKwargs, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from notebook_accelerate.utils.other import get_pretty_name, recursive_getattr


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


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.54 kB"),
        (9_996, "10.0 kB"),
        (64e6, "64.0 MB"),
        (999_600_000, "1.00 GB"),
        (340e9, "340 GB"),
        (2.5e15, "2,500 TB"),
        (-2e6, "-2.00 MB"),
    ],
)
def test_sizes_have_three_digits_and_decimal_units(size: float | None, text: str) -> None:
    assert size_text(size) == text


def _sizes(source: str) -> Iterator[str]:
    """Yield the units of bytes that follow a value in an f-string."""
    for node in ast.walk(ast.parse(source)):
        for part in node.values[1:] if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant) and (found := re.match(r" ?[kKMGT]i?B\b", str(part.value))):
                yield found[0]


def test_one_function_turns_sizes_into_text() -> None:
    assert list(_sizes('f"{size / 2**20:.0f} MiB of {size:.1f} GB"')) == [" MiB", " GB"]
    package = Path(notebook_accelerate.__file__).parent
    files = [*package.rglob("*.py"), *(package / "widgets").resolve().rglob("*.py")]
    found = {file.name: units for file in files if (units := list(_sizes(file.read_text())))}
    assert found == {}, "use size_text"


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


def test_settings_show_only_fields_that_differ_from_their_defaults() -> None:
    assert format_setting(3) == "3"
    assert format_setting("gloo") == "'gloo'"
    given = {"dataloader_config": DataLoaderConfiguration(data_seed=1), "gradient_accumulation_steps": 2}
    expected = "dataloader_config=DataLoaderConfiguration(data_seed=1), gradient_accumulation_steps=2"
    assert format_setting(given) == expected
    assert format_setting([AutocastKwargs(enabled=False)]) == "[AutocastKwargs(enabled=False)]"
    text = format_setting({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)})
    assert text.startswith("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2")
    assert "forward_prefetch" not in text
