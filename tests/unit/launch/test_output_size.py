"""The part of a run's text that a notebook file keeps: the first and last lines, and how many were left out."""

from __future__ import annotations

import json
import random

import pytest

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.output.output_budget import HEAD_BYTES, TAIL_BYTES, HeadAndTail


def _file_bytes(texts: list[str]) -> int:
    outputs = [{"output_type": "stream", "text": text.splitlines(keepends=True)} for text in texts]
    return len(json.dumps(outputs, ensure_ascii=False, indent=1).encode())


@pytest.mark.parametrize(
    "line", ["", "x", "[rank 0] " + "x" * 90, "\x1b[31m" * 20, "ä☃𝄞" * 30, '"\\' * 40, "y" * 500_000]
)
def test_the_head_and_the_tail_are_bounded(line: str) -> None:
    parts, rng, count, heads = HeadAndTail(), random.Random(0), 0, []
    while count < (20 if len(line) > 1000 else 100_000):
        lines = rng.randint(1, 5 if len(line) > 1000 else 3_000)
        heads.append(parts.head("".join(f"{count + index} {line}\n" for index in range(lines))))
        count += lines
    head, tail = "".join(heads), parts.tail()
    assert _file_bytes([head, tail]) < HEAD_BYTES + TAIL_BYTES + 10_000
    note, *last = tail.split("\n")
    first = head.count("\n")
    left_out = int(note.split()[1].replace(",", "")) if note.startswith("… ") else 0
    if not left_out:
        last = [note, *last]
    assert first + left_out + len(last) == count
    assert last[-1].startswith(f"{count - 1} {line[:80]}")
    assert not parts.changed


def test_short_text_has_no_tail() -> None:
    parts = HeadAndTail()
    assert parts.head("one\ntwo\n") == "one\ntwo\n"
    assert parts.tail() == ""


def test_output_and_tags_are_validated() -> None:
    with pytest.raises(ValueError, match="output='file' is not allowed; pass one of 'cell', 'panel'"):
        LaunchConfig(output="file")
    with pytest.raises(ValueError, match="output='panel' is not allowed with panel=False"):
        LaunchConfig(output="panel", panel=False)
    with pytest.raises(ValueError, match="tags='a' is not allowed"):
        LaunchConfig(tags="a")
