"""Runs a suite's groups of tests, a few at a time, each in a pytest of its own with its own log.

``python -m tests.support.groups everyday lint`` is what `make test` runs: the groups of the suite, and a target of make
as one more group. Long groups run in parts, so that no lane is left alone at the end. The last line is pytest's closing
line over all groups.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".build" / "test-logs"
# The longest first, so that the last ones to finish are short.
SUITES = {
    "everyday": {
        "notebook": ["notebook"],
        "distributed": ["distributed"],
        "browser": ["browser"],
        "unit": ["unit"],
        "faults": ["faults"],
        "rules": ["architecture", "parity/surface", "docs/static"],
        "devices": ["gpu", "tpu", "xla"],
    },
    "integrations": {
        "deepspeed": ["deepspeed"],
        "strategies": ["parity/strategies", "parity/training"],
        "ray": ["ray"],
        "megatron": ["megatron"],
        "s3": ["s3"],
        "cuda": ["cuda"],
        "parity": ["parity/behaviour", "parity/random_programs", "parity/checkpoints", "parity/commands"],
        "clients": ["clients"],
        "docs": ["docs"],
    },
}
"""What `make test` and `make test-integrations` run: folders of tests by group."""
PARTS = {"notebook": 3, "distributed": 2, "browser": 2, "unit": 4, "faults": 3}
"""How many processes share the files of a long group."""
# Groups with an environment of their own: what make is asked for instead.
OWN_ENVIRONMENT = {
    name: f"test-{name}" for name in ("clients", "cuda", "deepspeed", "docs", "megatron", "parity", "ray", "s3")
}
LANES = {"everyday": 4, "integrations": 3}
"""Groups at a time, more than the cores of the smallest machine: a group waits half of its time."""
SECONDS_PER_GROUP = 5400
LONG_EXPLANATION = 24
"""Lines of a test's failure that are printed; its log has all."""
_KINDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")
_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Outcome:
    """How one group ended."""

    name: str
    code: int
    log: Path
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """The numbers of pytest's closing line by kind."""
        lines = self.log.read_text(errors="replace").rstrip().splitlines()
        # Others write after it: make after a failure, libraries at the end of the interpreter.
        closing = next((line for line in reversed(lines) if re.search(r"\d+ \w+.* in \d+(\.\d+)?s\b", line)), "")
        pairs = re.findall(rf"(\d+) ({'|'.join(_KINDS)}|warning|error)\b", closing)
        plural = {"warning": "warnings", "error": "errors"}
        return Counter({plural.get(kind, kind): int(number) for number, kind in pairs})

    @property
    def failed(self) -> bool:
        """Whether a test failed, or pytest did not come to its end."""
        return self.code not in (0, _NOTHING_COLLECTED)


def main(suite: str, *targets: str) -> int:
    """Run a suite's groups that have tests, and these targets of make before them; return 1 when one failed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    outcomes = []
    with ThreadPoolExecutor(LANES[suite]) as pool:
        groups = {**dict.fromkeys(targets, ()), **present(suite)}
        for done in as_completed([pool.submit(run, name, folders) for name, folders in groups.items()]):
            outcomes.append(done.result())
            report(outcomes[-1])
    total: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    failed = [outcome.name for outcome in outcomes if outcome.failed]
    if failed:
        print(f"\nfailed groups: {', '.join(failed)}; logs in {LOGS.relative_to(ROOT)}")
    text = ", ".join(f"{total[kind]} {kind}" for kind in _KINDS if total[kind])
    print(f"\n{f' {text} in {time.monotonic() - begin:.2f}s ':=^120}", flush=True)
    return int(bool(failed) or not total["passed"])


def present(suite: str) -> dict[str, list[str]]:
    """Return a suite's groups that have tests in this tree, with their folders or files relative to it.

    The parts of a group are groups of their own: the first parts of all, the second ones, and so on; then the others.
    """
    found: list[tuple[int, str, list[str]]] = []
    for name, folders in SUITES[suite].items():
        having = {f"tests/{folder}": sorted((ROOT / "tests" / folder).rglob("test_*.py")) for folder in folders}
        if name in PARTS:
            shares = shared_out([file for files in having.values() for file in files], PARTS[name])
            found += [(number, f"{name}-{number}", files) for number, files in shares.items()]
        elif any(having.values()):
            found.append((1 + max(PARTS.values()), name, [folder for folder, files in having.items() if files]))
    return {name: paths for _, name, paths in sorted(found, key=lambda entry: entry[0])}


def shared_out(files: Sequence[Path], parts: int) -> dict[int, list[str]]:
    """Return files by the number of the part that runs them: neighbours together, about as much text in each part."""
    sizes = [file.stat().st_size for file in files]
    shares: dict[int, list[str]] = {}
    for index, file in enumerate(files):
        middle = sum(sizes[:index]) + sizes[index] / 2
        number = min(parts, 1 + int(parts * middle / max(1, sum(sizes))))
        shares.setdefault(number, []).append(str(file.relative_to(ROOT)))
    return shares


def run(
    group: str,
    folders: Sequence[str],
    *,
    executable: str = sys.executable,
    root: Path | None = None,
    logs: Path | None = None,
) -> Outcome:
    """Run one group, everything it prints into its log; one without folders is a target of make.

    Args:
        group: Its name, which is the log's.
        folders: pytest's arguments.
        executable: The interpreter.
        root: The tree whose tests run; None: this one.
        logs: The folder of the log; None: .build/test-logs.
    """
    log = (logs or LOGS) / f"{group}.log"
    command = [executable, "-m", "pytest", "-m", "not benchmark", "-o", f"cache_dir=.build/pytest-{group}"]
    command.extend(folders)
    if group in OWN_ENVIRONMENT or not folders:
        command = ["make", OWN_ENVIRONMENT.get(group, group)]
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --tb=short --durations=10"  # make's, too
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": options.strip()}
    if root is not None:
        env.pop("PYTHONPATH", None)
    for name in ("CI", "BUILD_NUMBER"):  # pytest writes comparisons out in full where they are set: pages, here
        env.pop(name, None)
    begin = time.monotonic()
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command,
                cwd=root or ROOT,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=SECONDS_PER_GROUP,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            out.write(f"\ngroup killed after {SECONDS_PER_GROUP} s\n")
            code = -1
    return Outcome(group, code, log, time.monotonic() - begin)


def report(outcome: Outcome) -> None:
    """Print the end of a group's log: more of it where the group failed."""
    lines = outcome.log.read_text(errors="replace").rstrip().splitlines()
    if outcome.failed:
        tail = abridged(lines)[-200:]
    else:
        tail = [line for line in lines[-40:] if line.startswith(("=", "SKIPPED"))]
    print(f"\n--- {outcome.name}: {outcome.seconds:.1f} s, exit status {outcome.code}")
    print("\n".join(tail), flush=True)


def abridged(lines: list[str]) -> list[str]:
    """Return a log with only the first and last lines of long explanations: what a page shows, a worker's log."""
    found: list[str] = []
    for explains, block in groupby(lines, key=lambda line: line.startswith("E  ")):
        several = list(block)
        if explains and len(several) > LONG_EXPLANATION:
            half = LONG_EXPLANATION // 2
            several[half:-half] = [f"E   [{len(several) - 2 * half} lines: see the log]"]
        found += several
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
