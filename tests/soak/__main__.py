"""Play random scenes in one kernel and watch it: ``python -m tests.soak [--minutes 60] [--seed N] [--leave 1024]``."""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.soak.scenes import SCENES, SETUP
from tests.support.kernel import Kernel
from tests.support.launching import children, ready_kernel

WARM_UP = 0.2
"""The share of the time during which the kernel may still grow, because it imports modules and fills caches."""
ALLOWED = {"memory": 48, "descriptors": 8, "threads": 2, "folders": 0}
"""The allowed growth of each reading after the warm-up, because the registry keeps a varying number of runs."""


@dataclass(frozen=True)
class Reading:
    """The kernel's resources between two scenes: MiB of memory, descriptors, threads, and locked private folders."""

    memory: float
    descriptors: int
    threads: int
    folders: int


def main() -> int:
    """Play scenes until the time is over. Return 1 if the kernel grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="repeats a run")
    parser.add_argument("--leave", type=int, default=1024, help="MiB of memory that a second process leaves (1024)")
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.minutes:g} minutes, {asked.leave} MiB of memory left", flush=True)
    with _balloon(asked.leave), ready_kernel() as kernel:
        kernel.check(SETUP)
        readings = list(_play(kernel, random.Random(asked.seed), 60 * asked.minutes))
    return _judge(readings)


@contextmanager
def _balloon(leave: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "tests.soak.balloon", str(leave)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _play(kernel: Kernel, chance: random.Random, seconds: float) -> Iterator[Reading]:
    """Play scenes one after the other. Yield the kernel's resources after each of them."""
    begin, number = time.monotonic(), 0
    names = list(SCENES)
    weights = [SCENES[name][0] for name in names]
    while time.monotonic() - begin < seconds:
        number += 1
        (name,) = chance.choices(names, weights)
        start = time.monotonic()
        try:
            SCENES[name][1](kernel, chance)
        except BaseException:
            _explain(kernel, name)
            raise
        took = time.monotonic() - start
        assert children(kernel) == [], f"{name} left processes"
        reading = _read(kernel)
        print(f"{number:4} {name:22} {took:6.1f} s  {reading}", flush=True)
        yield reading


def _explain(kernel: Kernel, name: str) -> None:
    """Print the state of the run in a scene that failed."""
    cell = kernel.run("print(run, run.diagnose(), *run.logs(tail=20), sep='\\n')", 60.0)
    print(f"{name} failed; the last run in the background:\n{cell.stdout}", flush=True)


def _read(kernel: Kernel) -> Reading:
    kernel.check("join_runs(); run = None; _ = gc.collect()")
    process = kernel.process
    return Reading(
        memory=round(process.memory_full_info().uss / 2**20, 1),
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        folders=sum(1 for file in process.open_files() if Path(file.path).name.startswith("notebook_accelerate-")),
    )


def _judge(readings: Sequence[Reading]) -> int:
    """Compare the first readings after the warm-up with the last ones. Return 1 if the kernel grew."""
    settled = readings[int(len(readings) * WARM_UP) :]
    part = max(1, len(settled) // 5)
    first, last = settled[:part], settled[-part:]
    found = 0
    for name, allowed in ALLOWED.items():
        before, after = (statistics.median(getattr(one, name) for one in side) for side in (first, last))
        grew = after - before > allowed
        found += grew
        print(f"{name}: {before:g} -> {after:g}{'  GREW' if grew else ''}")
    print(f"{len(readings)} scenes, {'flat' if not found else 'not flat'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
