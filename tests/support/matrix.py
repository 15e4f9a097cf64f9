"""Runs groups of tests on several versions of Python and torch, with the package installed from its wheel.

``python -m tests.support.matrix`` is what `make test-matrix` runs. A cell is a Python and a torch: ``3.10-2.6``. Each
has an environment of its own in .build/matrix: torch alone, then the sdist and the quickstart, then the wheel and the
quickstart, then what the tests import. The tests run in a copy of the tree without the package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import groups

ROOT = groups.ROOT
FOLDER = ROOT / ".build" / "matrix"
TABLE = ROOT / ".build" / "matrix.json"
REQUIREMENTS = ROOT / "requirements" / "matrix.txt"
QUICKSTART = "examples/01_quickstart.ipynb"
QUICKSTART_NEEDS = ("matplotlib", "nbclient", "nbconvert", "scikit-learn")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MAY_BE_MISSING = ("3.14",)
"""The Pythons that the package does not declare yet: tried where an interpreter is found."""
GROUPS: dict[str, list[str]] = {
    "quickstart": [],
    "unit": ["tests/unit", "--ignore=tests/unit/launch"],
    "launch": ["tests/unit/launch"],
    "notebook": ["tests/notebook"],
    "distributed": ["tests/distributed"],
}
"""What runs in each cell: arguments of pytest by group. The quickstart is no group of pytest."""
SECONDS = 5400
"""A limit for each command."""
PACKAGES = ("notebook_accelerate", "widgets")
"""The folders that the copies of the tree do not have."""


@dataclass(frozen=True)
class Cell:
    """A Python and a torch.

    Attributes:
        python: The Python's minor version: ``3.10``.
        torch: torch's minor version: ``2.6``.
        interpreter: The interpreter's path.
        release: The newest release of that minor version of torch for this Python: ``2.6.0``.
    """

    python: str
    torch: str
    interpreter: str
    release: str

    @property
    def name(self) -> str:
        """The cell's name in CELLS and in the table."""
        return f"{self.python}-{self.torch}"

    @property
    def folder(self) -> Path:
        """Its environment, copy of the tree and logs."""
        return FOLDER / self.name

    @property
    def executable(self) -> str:
        """The environment's interpreter."""
        return str(self.folder / "env" / "bin" / "python")

    @property
    def tree(self) -> Path:
        """The tests, without the package."""
        return self.folder / "tree"


def main() -> int:
    """Run the chosen groups in the chosen cells; return 1 if one failed or a declared Python is missing."""
    options = _options()
    interpreters = {version: found for version in PYTHONS if (found := find_interpreter(version))}
    missing = [version for version in PYTHONS if version not in interpreters]
    for version in missing:
        print(f"no interpreter for Python {version}: not in PATH, pyenv's versions or uv's; its cells are left out")
    cells = choose(interpreters, options.cells)
    if options.list:
        print("\n".join(f"{cell.name}  torch {cell.release}  {cell.interpreter}" for cell in cells))
        return 0
    sdist, wheel = build()
    failed = [cell.name for cell in cells if not run_cell(cell, options.groups, sdist, wheel)]
    text = table(json.loads(TABLE.read_text()))
    TABLE.with_suffix(".md").write_text(text)
    print(f"\n{text}\nfailed: {', '.join(failed) or 'none'}; logs in {FOLDER.relative_to(ROOT)}/CELL/logs")
    incomplete = not options.cells and bool(set(missing) - set(MAY_BE_MISSING))
    return int(bool(failed) or incomplete)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.matrix", description=__doc__)
    parser.add_argument(
        "--cells", type=_names, default=[], help="PYTHON-TORCH,... as 3.10-2.6 or 3.10-oldest; default: all"
    )
    parser.add_argument("--groups", type=_names, default=list(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"there is no group {', '.join(sorted(unknown))}; the groups are {', '.join(GROUPS)}")
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.replace(",", " ").split() if name]


def find_interpreter(version: str) -> str | None:
    """Return the path of an interpreter of a minor version that can make environments, or None.

    Args:
        version: ``3.10``.
    """
    program = f"python{version}"
    places = [shutil.which(program) or "", *map(str, sorted(_versions_folder().glob(f"{version}.*/bin/{program}")))]
    if uv := shutil.which("uv"):
        places.append(_output(uv, "python", "find", "--no-python-downloads", version))
    check = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    return next((place for place in places if place and _output(place, "-c", check) == version), None)


def _versions_folder() -> Path:
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")


def _output(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def choose(interpreters: dict[str, str], names: Sequence[str]) -> list[Cell]:
    """Return the cells: the named ones, or each Python with the oldest, the middle and the newest torch it can have.

    Args:
        interpreters: Path by minor version.
        names: Names of cells, with a version of torch or one of those words; none: all.

    Raises:
        SystemExit: A named cell is not valid here.
    """
    wanted = {name.partition("-")[0] for name in names}
    cells: dict[str, Cell] = {}
    for version, interpreter in interpreters.items():
        if names and version not in wanted:
            continue
        releases = torch_releases(interpreter)
        minors = sorted(releases, key=_key)
        positions = {"oldest": 0, "middle": len(minors) // 2, "newest": -1} if minors else {}
        labels = {label: minors[position] for label, position in positions.items()}
        for label, minor in {**labels, **({minor: minor for minor in minors} if names else {})}.items():
            cells[f"{version}-{label}"] = Cell(version, minor, interpreter, releases[minor])
    if unknown := [name for name in names if name not in cells]:
        raise SystemExit(f"no such cell here: {', '.join(unknown)}; `make test-matrix LIST=yes` prints the cells")
    return list(dict.fromkeys(cells[name] for name in names or cells))


def torch_releases(interpreter: str) -> dict[str, str]:
    """Return the releases of torch that pip would install for an interpreter, the newest by minor version.

    Args:
        interpreter: Its path.
    """
    minimum = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert minimum is not None, "pyproject.toml declares torch's minimum"
    listed = _output(interpreter, "-m", "pip", "index", "versions", "torch")
    found: dict[str, str] = {}
    for release in re.findall(r"\b\d+\.\d+\.\d+\b(?!\+)", listed.partition("Available versions:")[2]):
        minor = ".".join(release.split(".")[:2])
        if _key(minor) >= _key(minimum.group(1)):
            found[minor] = max(found.get(minor, release), release, key=_key)
    return found


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return their paths."""
    folder = FOLDER / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    _check(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), log=FOLDER / "build.log"
    )
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def run_cell(cell: Cell, chosen: Sequence[str], sdist: Path, wheel: Path) -> bool:
    """Install the package in the cell's environment, run the groups, note the counts; return whether all passed.

    Args:
        cell: The cell.
        chosen: Names of groups.
        sdist: The source distribution.
        wheel: The wheel.
    """
    print(f"\n=== {cell.name}: {cell.interpreter}, torch {cell.release}", flush=True)
    logs = cell.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    copy_tree(cell.tree)
    row: dict[str, dict[str, Any]] = {}
    try:
        make_environment(cell, logs)
        if "quickstart" in chosen:
            row["quickstart"] = quickstart(cell, logs, sdist, wheel)
            _note(cell, row)
        install(cell, logs, str(wheel), "-r", str(REQUIREMENTS))
        home = _output(cell.executable, "-c", "import notebook_accelerate as n; print(n.__file__)", cwd=cell.tree)
        assert Path(home).is_relative_to(cell.folder / "env"), f"the tests would import {home or 'nothing'}"
        for group in (name for name in chosen if GROUPS[name]):
            outcome = groups.run(group, GROUPS[group], executable=cell.executable, root=cell.tree, logs=logs)
            groups.report(outcome)
            row[group] = {**outcome.counts, "failed group": outcome.failed, "seconds": round(outcome.seconds)}
            _note(cell, row)
    except subprocess.CalledProcessError as error:
        print(f"{cell.name}: {' '.join(map(str, error.cmd))}: exit status {error.returncode}; see {logs}")
        row["environment"] = {"failed group": True}
        _note(cell, row)
    return not any(result["failed group"] for result in row.values())


def copy_tree(to: Path) -> None:
    """Copy what git tracks or would track, without the package.

    Args:
        to: The folder, which is replaced.
    """
    shutil.rmtree(to, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name.split("/")[0] not in PACKAGES and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def make_environment(cell: Cell, logs: Path) -> None:
    """Make the cell's environment with torch and what that requires, or make it so again.

    Args:
        cell: The cell.
        logs: Where pip's output goes.
    """
    made = cell.folder / "env" / ".packages"
    if made.exists() and f"torch=={cell.release}" in made.read_text().replace("+", " ").split():
        others = set(_packages(cell)) - set(made.read_text().split())
        if others:
            names = [line.partition("==")[0] for line in sorted(others)]
            _check(cell.executable, "-m", "pip", "uninstall", "-y", *names, log=logs / "pip.log")
        return
    shutil.rmtree(cell.folder / "env", ignore_errors=True)
    _check(cell.interpreter, "-m", "venv", str(cell.folder / "env"), log=logs / "pip.log")
    install(cell, logs)
    made.write_text("\n".join(_packages(cell)))


def _packages(cell: Cell) -> list[str]:
    return _output(cell.executable, "-m", "pip", "list", "--format=freeze").split()


def install(cell: Cell, logs: Path, *arguments: str) -> None:
    """Run pip install in the cell's environment; torch stays what it is.

    Args:
        cell: The cell.
        logs: Where its output goes.
        arguments: Arguments of ``pip install``.
    """
    pip = (cell.executable, "-m", "pip", "install", "--disable-pip-version-check", f"torch=={cell.release}")
    _check(*pip, *arguments, log=logs / "pip.log")


def quickstart(cell: Cell, logs: Path, sdist: Path, wheel: Path) -> dict[str, Any]:
    """Install the sdist, then the wheel, with their dependencies only, and run the quickstart after each.

    Args:
        cell: The cell.
        logs: Where its output goes.
        sdist: The source distribution.
        wheel: The wheel.

    Returns:
        The row of the table.
    """
    begin = time.monotonic()
    passed = 0
    for distribution in (sdist, wheel):
        _check(cell.executable, "-m", "pip", "uninstall", "-y", "notebook-accelerate", log=logs / "pip.log")
        install(cell, logs, str(distribution))
        install(cell, logs, *QUICKSTART_NEEDS)
        command = (cell.executable, "examples/run_headless.py", QUICKSTART)
        try:
            _check(*command, log=logs / "quickstart.log", cwd=cell.tree)
            passed += 1
        except subprocess.CalledProcessError:
            print("\n".join((logs / "quickstart.log").read_text(errors="replace").splitlines()[-40:]))
    seconds = round(time.monotonic() - begin)
    print(f"--- quickstart: {seconds} s, {passed} of 2 (sdist, wheel) passed", flush=True)
    return {"passed": passed, "failed": 2 - passed, "failed group": passed < 2, "seconds": seconds}


def _check(*command: str, log: Path, cwd: Path = ROOT) -> None:
    """Run a command with its output appended to a log.

    Raises:
        CalledProcessError: It failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        subprocess.run(
            command, cwd=cwd, env=_environment(), stdout=out, stderr=subprocess.STDOUT, check=True, timeout=5400
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def _note(cell: Cell, row: dict[str, dict[str, Any]]) -> None:
    """Write the cell's results into the table's file; those of groups and cells that did not run now stay."""
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known[cell.name] = {**known.get(cell.name, {}), "torch": cell.release, **row}
    TABLE.write_text(json.dumps(known, indent=2, sort_keys=True))


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table in Markdown.

    Args:
        results: By cell and group.
    """
    names = [*GROUPS, *(["environment"] if any("environment" in row for row in results.values()) else [])]
    lines = [f"| Python | torch | {' | '.join(names)} |", f"|{'---|' * (len(names) + 2)}"]
    for name in sorted(results, key=lambda name: [_key(version) for version in name.split("-")]):
        shown = [_shown(results[name].get(group)) for group in names]
        lines.append(f"| {name.partition('-')[0]} | {results[name]['torch']} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(result: dict[str, Any] | None) -> str:
    if result is None:
        return "did not run"
    kinds = ("failed", "errors", "passed", "skipped")
    counts = ", ".join(f"{result[kind]:,} {kind}" for kind in kinds if result.get(kind))
    return counts or ("failed" if result["failed group"] else "no tests")


if __name__ == "__main__":
    sys.exit(main())
