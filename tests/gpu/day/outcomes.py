"""Write the outcome of each test as soon as it finishes, so that an item killed at its limit keeps its results.

The runner loads this module as a plugin of pytest: ``-p tests.gpu.day.outcomes``.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

FILE = "GPU_DAY_OUTCOMES"
"""The environment variable that names the file to write."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        test: The file and name of the test function.
        outcome: "passed", "failed" or "skipped".
        seconds: The duration of the test.
        why: The failure, or the reason why the test was skipped.
        figures: The names and values of its measurements.
    """

    test: str
    outcome: str
    seconds: float
    why: str = ""
    figures: tuple[tuple[str, str], ...] = ()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line to the file for each test, and for each fixture that failed or skipped one."""
    if report.when != "call" and report.outcome == "passed":
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    figures = tuple((name, str(value)) for name, value in report.user_properties)
    _write(Outcome(report.nodeid.removeprefix("tests/gpu/"), report.outcome, round(report.duration, 2), why, figures))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a line for each file that could not be imported."""
    if report.outcome == "failed":
        _write(Outcome(report.nodeid.removeprefix("tests/gpu/"), "failed", 0.0, str(report.longrepr)))


def _write(outcome: Outcome) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> list[Outcome]:
    """Return the outcomes in a file, or an empty list if it does not exist. A truncated last line is ignored."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_outcome(json.loads(line)) for line in lines if line.endswith("}")]


def _outcome(fields: dict[str, Any]) -> Outcome:
    return Outcome(**{**fields, "figures": tuple((name, value) for name, value in fields["figures"])})
