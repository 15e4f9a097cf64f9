"""Run the tests that fit into nine minutes on one GPU: ``python -m tests.gpu.day``, or ``make test-gpu-day``.

Each item is a pytest process in its own session, and is killed at its limit. Items of a lane run one after another, and
lanes of a phase in parallel. Items that measure time or memory have a separate phase. After each item, the folder OUT
(.build/gpu-day) has summary.md, results.json and logs.tar.gz: few files, because some machines return only a few. While
an item runs, its log is in .build/gpu-day-logs.

- ``GPU_DAY_SECONDS`` (540): the time for all items.
- ``GPU_DAY_ONLY=stuck,nccl``: only these items.
- ``TEST_GPU=dry`` or ``GPU_DAY_DRY=1``: all items run on the CPU, to check the tests themselves. Limits are three
  times as long there, and there is no overall limit unless GPU_DAY_SECONDS is set.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.day import outcomes

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 540.0
LEAST_SECONDS = 12.0
"""The seconds that must be left for an item to start."""
RESERVE_SECONDS = 5.0
"""The seconds reserved for writing the results."""
DRY_FACTOR = 3.0
"""The factor by which an item may take longer on two busy cores than on a machine with a GPU."""
LONGEST = 700
"""The number of characters of a failure that the summary shows, counted from its end, which contains the error."""


@dataclass(frozen=True)
class Item:
    """One run of pytest.

    Attributes:
        name: The name in the summary and in ``GPU_DAY_ONLY``.
        limit: The number of seconds after which it is killed.
        tests: The arguments for pytest: files relative to tests/gpu, and options.
    """

    name: str
    limit: float
    tests: tuple[str, ...]


Lane = Sequence[Item]


def _check(name: str, limit: float) -> Item:
    return Item(name, limit, (f"day/check_{name}.py",))


_FILES = ("big_modeling", "checkpointing", "quantization", "detection")
# DeepSpeed is not installed on machines with a GPU.
_ZERO = "--deselect=tests/gpu/test_training.py::test_zero_has_the_losses_of_one_device"
# This test compares the memory of the whole device, so other lanes would disturb it. The item `kernel` covers it.
_FREED = "--deselect=tests/gpu/test_launch.py::test_memory_is_freed_after_the_run"
PHASES: Sequence[Sequence[Lane]] = (
    [[_check("facts", 75)]],
    [[_check("kernel", 100)]],
    [[_check("stuck", 100)]],
    [
        [_check("nccl", 130), _check("memory", 60)],
        [_check("parity", 120), _check("precision", 110)],
        [_check("saving", 90), Item("single", 140, tuple(f"test_{name}.py" for name in _FILES))],
        [Item("training", 200, ("test_training.py", _ZERO))],
        [Item("launch", 110, ("test_launch.py", _FREED))],
    ],
    [[_check("profiles", 80)]],
    [[_check("offload", 90)]],
    [[_check("costs", 110)]],
    [[Item("figures", 90, ("test_costs.py",))]],
)
"""The phases in order, each with its parallel lanes."""


@dataclass
class Result:
    """The outcome of an item.

    Attributes:
        item: The name of the item that ran.
        ended: pytest's exit status, "killed at its limit", or "no time left".
        begin: When the item started, in seconds since the start of the day.
        seconds: The duration of the item.
        tests: The outcome of each test.
    """

    item: str
    ended: str
    begin: float = 0.0
    seconds: float = 0.0
    tests: list[outcomes.Outcome] = field(default_factory=list)

    @property
    def counts(self) -> str:
        """The numbers of tests by outcome, as text."""
        counted = Counter(test.outcome for test in self.tests)
        return ", ".join(f"{counted[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counted[kind])


class Day:
    """Runs items within a time limit and writes their results.

    Args:
        out: The folder for the results.
        logs: The folder for the logs, which is emptied first.
        seconds: The time limit for all items.
        dry: Whether the items run on the CPU.
    """

    def __init__(self, out: Path, logs: Path, seconds: float = SECONDS, *, dry: bool = False) -> None:
        self.results: list[Result] = []
        self._out, self._logs, self._seconds, self._dry = out, logs, seconds, dry
        self._begin, self._lock = time.monotonic(), threading.Lock()
        shutil.rmtree(logs, ignore_errors=True)
        for folder in (out, logs):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, phases: Iterable[Iterable[Lane]], only: Sequence[str] = ()) -> int:
        """Run the phases one after another, with their lanes in parallel. Return 1 if an item failed or did not run.

        Args:
            phases: The phases to run.
            only: The names of the items to run. If empty, all items run.
        """
        for phase in phases:
            lanes = [[item for item in lane if not only or item.name in only] for lane in phase]
            threads = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in lanes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return int(any(result.ended != "0" for result in self.results))

    def _run_lane(self, lane: Lane) -> None:
        for item in lane:
            result = self._run_item(item)
            with self._lock:
                self.results.append(result)
                self._write()
            said = f"{item.name}: {result.ended}, {result.seconds:.0f} s, {result.counts}"
            print(f"[{self._now():4.0f} s] {said}", flush=True)

    def _run_item(self, item: Item) -> Result:
        begin = self._now()
        left = self._seconds - begin
        if left < LEAST_SECONDS:
            return Result(item.name, "no time left", begin)
        written = self._logs / f"{item.name}.jsonl"
        with (self._logs / f"{item.name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._command(item), cwd=ROOT, env=self._environment(written), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                limit = item.limit * (DRY_FACTOR if self._dry else 1.0)
                ended = str(process.wait(min(limit, left - RESERVE_SECONDS)))
            except subprocess.TimeoutExpired:
                ended = "killed at its limit"
            # Kill the whole process group, including processes that the item left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Result(item.name, ended, round(begin, 1), round(self._now() - begin, 1), outcomes.read(written))

    def _command(self, item: Item) -> list[str]:
        options = ["-v", "-rs", "-p", "no:cacheprovider", "-p", outcomes.__name__, "--durations=15"]
        paths = [each if each.startswith("-") else str(ROOT / "tests" / "gpu" / each) for each in item.tests]
        return [sys.executable, "-m", "pytest", *options, *paths]

    def _environment(self, written: Path) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", outcomes.FILE: str(written.resolve())}
        return {**os.environ, **own, "TEST_GPU": "dry" if self._dry else ""}

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _write(self) -> None:
        rows = [{**asdict(result), "counts": result.counts} for result in self.results]
        (self._out / "results.json").write_text(json.dumps(rows, indent=1))
        (self._out / "summary.md").write_text(summary(self.results, dry=self._dry))
        packed = self._logs.with_suffix(".part")
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self._logs, "logs")
        shutil.move(packed, self._out / "logs.tar.gz")


def summary(results: Sequence[Result], *, dry: bool = False) -> str:
    """Return the results as Markdown: a table of the items, the failed and skipped tests, and the figures.

    Args:
        results: The results of the items so far.
        dry: Whether the items ran on the CPU.
    """
    lines = ["A dry run on the CPU: its figures mean nothing.", ""] if dry else []
    lines += ["| item | exit status | seconds | tests |", "|---|---|---|---|"]
    lines += [f"| {each.item} | {each.ended} | {each.seconds:.0f} | {each.counts} |" for each in results]
    for kind, title in (("failed", "Failed"), ("skipped", "Skipped")):
        found = [(each.item, test) for each in results for test in each.tests if test.outcome == kind]
        lines += ["", f"## {title}", ""] if found else []
        lines += [f"- [{item}] {test.test}: {' '.join(test.why[-LONGEST:].split())}" for item, test in found]
    figures = [(each.item, *figure) for each in results for test in each.tests for figure in test.figures]
    lines += ["", "## Figures", "", "| item | figure | measured |", "|---|---|---|"] if figures else []
    lines += [f"| {item} | {name} | {value} |" for item, name, value in figures]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the day as configured by the environment variables. Return the exit status."""
    dry = os.environ.get("TEST_GPU") == "dry" or os.environ.get("GPU_DAY_DRY") == "1"
    seconds = float(os.environ.get("GPU_DAY_SECONDS") or (86_400 if dry else SECONDS))
    only = [name for name in os.environ.get("GPU_DAY_ONLY", "").split(",") if name]
    known = [item.name for phase in PHASES for lane in phase for item in lane]
    if unknown := sorted(set(only) - set(known)):
        raise SystemExit(f"GPU_DAY_ONLY names {', '.join(unknown)}; the items are {', '.join(known)}")
    out = Path(os.environ.get("OUT") or ROOT / ".build" / "gpu-day").absolute()
    status = Day(out, ROOT / ".build" / "gpu-day-logs", seconds, dry=dry).run(PHASES, only)
    print((out / "summary.md").read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
