"""Runs what fits into nine minutes on a machine with one GPU: ``python -m tests.gpu.day``, or ``make test-gpu-day``.

Each item is a pytest in a session of its own, which is killed at its limit. Items of a lane run one after another, the
lanes of a phase next to each other; what measures time or memory has a phase of its own. Results are written after each
item, into the folder OUT (.build/gpu-day): summary.md, results.json, and a log, a JUnit file and figures of each item.

GPU_DAY_SECONDS (540) is the time for all, and GPU_DAY_ONLY=stuck,nccl chooses items. TEST_GPU=dry, or GPU_DAY_DRY=1,
runs the items on the CPU, which shows that they work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OUT = Path(os.environ.get("OUT") or ROOT / ".build" / "gpu-day")
DRY = os.environ.get("GPU_DAY_DRY") == "1" or os.environ.get("TEST_GPU") == "dry"
SECONDS = float(os.environ.get("GPU_DAY_SECONDS") or 540)
ONLY = set(filter(None, os.environ.get("GPU_DAY_ONLY", "").split(",")))
LEAST = 12.0
"""Seconds that must be left to begin an item."""
HERE, TESTS = "tests/gpu/day/check_{}.py", "tests/gpu/test_{}.py"
# DeepSpeed is not on such a machine.
TRAINING = [TESTS.format("training"), "--deselect=tests/gpu/test_training.py::test_zero"]
# What it compares is the memory of the whole device, which other lanes use: `kernel` checks it alone.
LAUNCH = [TESTS.format("launch"), "--deselect=tests/gpu/test_launch.py::test_memory_is_freed_after_the_run"]
SINGLE = [TESTS.format(name) for name in ("big_modeling", "checkpointing", "quantization", "detection")]


@dataclass(frozen=True)
class Item:
    """One pytest.

    Attributes:
        name: Its name.
        limit: Seconds after which it is killed.
        arguments: What pytest runs; empty: the file of checks with this name.
    """

    name: str
    limit: float
    arguments: tuple[str, ...] = ()


PHASES: list[list[list[Item]]] = [
    [[Item("facts", 75)]],
    [[Item("kernel", 100)]],
    [[Item("stuck", 100)]],
    [
        [Item("nccl", 130), Item("memory", 60)],
        [Item("parity", 120), Item("precision", 110)],
        [Item("saving", 90), Item("single", 140, tuple(SINGLE))],
        [Item("training", 200, tuple(TRAINING))],
        [Item("launch", 110, tuple(LAUNCH))],
    ],
    [[Item("profiles", 80)]],
    [[Item("offload", 90)]],
    [[Item("costs", 110)]],
    [[Item("figures", 90, (TESTS.format("costs"),))]],
]
"""Phases in their order; each is a list of lanes."""


@dataclass
class Result:
    """How an item ended.

    Attributes:
        item: Its name.
        ended: pytest's exit code, "killed" at the limit, or "no time left".
        seconds: How long it ran.
        counts: Tests by outcome.
        failed: The failed tests with the first line of what failed.
        figures: What was measured, by name.
    """

    item: str
    ended: int | str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)


class Day:
    """Runs the items and writes their results."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._results: list[Result] = []
        OUT.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Run all items; return 1 if one did not pass."""
        for phase in PHASES:
            lanes = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in phase]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        print((OUT / "summary.md").read_text() if self._results else "no item has this name", flush=True)
        return int(not self._results or any(result.ended != 0 for result in self._results))

    def _run_lane(self, lane: list[Item]) -> None:
        for item in lane:
            if not ONLY or item.name in ONLY:
                self._note(self._run_item(item))

    def _left(self) -> float:
        return SECONDS - (time.monotonic() - self._begin)

    def _run_item(self, item: Item) -> Result:
        if self._left() < LEAST:
            return Result(item.name, "no time left")
        report, figures = OUT / f"{item.name}.xml", OUT / f"{item.name}-figures.json"
        for earlier in (report, figures):
            earlier.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}",
            *(item.arguments or (HERE.format(item.name),)),
        ]  # fmt: skip
        environment = {**os.environ, "TEST_GPU": "dry" if DRY else "", "TEST_GPU_FIGURES": str(figures)}
        begin = time.monotonic()
        with (OUT / f"{item.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
            ended: int | str
            try:
                ended = process.wait(min(item.limit, self._left() - LEAST / 2))
            except subprocess.TimeoutExpired:
                ended = "killed"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = Result(item.name, ended, round(time.monotonic() - begin, 1))
        _read_report(result, report)
        with contextlib.suppress(OSError, ValueError):
            result.figures = json.loads(figures.read_text())
        return result

    def _note(self, result: Result) -> None:
        with self._lock:
            self._results.append(result)
            (OUT / "results.json").write_text(json.dumps([asdict(each) for each in self._results], indent=1))
            (OUT / "summary.md").write_text(_summary(self._results))
            at = time.monotonic() - self._begin
            print(f"[{at:4.0f} s] {result.item}: {result.ended}, {result.seconds:g} s, {result.counts}", flush=True)


def _read_report(result: Result, report: Path) -> None:
    """Read the outcomes of tests; an item that was killed has none."""
    with contextlib.suppress(OSError, ET.ParseError):
        for case in ET.parse(report).iter("testcase"):
            problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if problem is None else problem.tag
            result.counts[outcome] = result.counts.get(outcome, 0) + 1
            if problem is not None and outcome != "skipped":
                text = problem.get("message", "").strip() or "?"
                result.failed[f"{case.get('classname')}::{case.get('name')}"] = text.splitlines()[0][:300]


def _summary(results: list[Result]) -> str:
    lines = ["| item | ended | seconds | tests |", "|---|---|---|---|"]
    for each in results:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in each.counts.items())
        lines.append(f"| {each.item} | {each.ended} | {each.seconds:g} | {counts} |")
    lines += ["", *(f"- FAILED {name}: {text}" for each in results for name, text in each.failed.items())]
    if figures := [row for each in results for row in each.figures.items()]:
        lines += ["", "| figure | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(Day().run())
