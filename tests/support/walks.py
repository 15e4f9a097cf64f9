"""The walks of docs/architecture.md, and traces of real runs to compare them with."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"


class Step(NamedTuple):
    """One step of a walk: the number of its sentence, the file within the package, and the function."""

    number: int
    file: str
    function: str


class Call(NamedTuple):
    """A call of a function: its process, file and name, and its time on ``time.monotonic``, which processes share."""

    time: float
    process: int
    file: str
    function: str


def steps_of(walk: str) -> list[Step]:
    """Return the steps of a walk in the document, in order.

    Each step must cause the next, because a test cannot know the order of simultaneous events in two threads or
    processes.

    Args:
        walk: The heading of the walk, such as "A launch".
    """
    section = DOCUMENT.read_text().partition(f"\n## {walk}\n")[2].partition("\n## ")[0]
    found = []
    for sentence in re.split(r"^(?=\d+\. )", section, flags=re.MULTILINE)[1:]:
        number = int(sentence.partition(".")[0])
        found += [Step(number, file, function) for file, function in re.findall(r"`([\w/]+\.py):(\w+)`", sentence)]
    return found


class Trace:
    """A context manager that records calls to the package's functions.

    It traces the calling thread, every thread started inside the block, and their forks. A forked rank has a
    copy of the trace: it returns `own_calls`, and the test passes them to `merged`.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._files: dict[CodeType, str] = {}

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def own_calls(self) -> list[Call]:
        """Return the calls that this process has made."""
        return [call for call in self.calls if call.process == os.getpid()]

    def merged(self, *of_ranks: Iterable[Any]) -> list[Call]:
        """Return the calls that this process and the ranks made, ordered by time."""
        return sorted([*self.own_calls(), *(Call(*call) for calls in of_ranks for call in calls)])

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if (file := self._files.get(code)) is None:
            file = self._files[code] = _file_of(code)
        if file:
            self.calls.append(Call(time.monotonic(), os.getpid(), file, code.co_name))


def _file_of(code: CodeType) -> str:
    """Return the file of a function of the package, as the document names it, or "" for other code."""
    path = Path(code.co_filename).resolve()
    if path.is_relative_to(ROOT / "widgets"):
        return path.relative_to(ROOT).as_posix()
    package = ROOT / "notebook_accelerate"
    return path.relative_to(package).as_posix() if path.is_relative_to(package) else ""


def first_missing(steps: Iterable[Step], calls: Iterable[Call]) -> Step | None:
    """Return the first step that no call matches in the order of the walk, or None if calls match all steps."""
    left = iter(calls)
    for step in steps:
        if not any((call.file, call.function) == (step.file, step.function) for call in left):
            return step
    return None
