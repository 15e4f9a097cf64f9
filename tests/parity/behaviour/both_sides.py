"""Compare the programs on Accelerate and on this package: `python -m tests.parity.behaviour.both_sides [TEXT]`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from notebook_accelerate.integrations.accelerate_alias import STARTUP_FOLDER
from tests.parity.behaviour.description import differences
from tests.parity.behaviour.known_differences import KNOWN_DIFFERENCES
from tests.parity.behaviour.program_table import Program, programs

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 1800


def run_both(folder: Path, pattern: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the programs on both packages at the same time.

    Args:
        folder: An empty folder.
        pattern: The text that a program's name must contain.

    Returns:
        The outcomes on Accelerate and on this package, by program name.
    """
    paths = {"theirs": str(ROOT), "ours": f"{STARTUP_FOLDER}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.parity.behaviour.side"]
    sides = {
        name: subprocess.Popen([*command, str(folder / name), pattern], env=_environment(path), cwd=ROOT)
        for name, path in paths.items()
    }
    try:
        for name, process in sides.items():
            if process.wait(SECONDS):
                raise RuntimeError(f"the process of side {name!r} ended with exit code {process.returncode}")
    finally:
        for process in sides.values():
            process.kill()
            process.wait()
    theirs, ours = (pickle.loads((folder / name).read_bytes()) for name in paths)
    return theirs, ours


def _environment(path: str) -> dict[str, str]:
    dropped = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **offline, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def compare(program: Program, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return one line for each difference between the outcomes of a program on both sides."""
    lines = []
    for rank, (there, here) in enumerate(zip(theirs["ranks"], ours["ranks"], strict=True)):
        at = f"rank {rank}" if len(theirs["ranks"]) > 1 else ""
        if "died" in there["result"] or "died" in here["result"]:
            lines.append(f"{at}: the process of the program died")
        if "NameError" in str(there["result"].get("raised")):
            lines.append(f"{at}: the program uses a name that it does not define")
        lines += differences(there["result"], here["result"], program.tolerance, at)
        kinds = [Counter(kind for kind, _ in side["messages"]) for side in (there, here)]
        lines += [
            f"{at}: {kind} {number} times there, {kinds[1][kind]} here"
            for kind, number in (kinds[0] - kinds[1]).items()
        ]
    return lines


def main(pattern: str = "") -> int:
    """Print the unexpected differences, and the output of a single program if it has any."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = run_both(Path(folder), pattern)
    different = 0
    for each in programs(pattern):
        there, here = theirs[each.name], ours[each.name]
        lines = [there["skipped"]] if "skipped" in there else compare(each, there, here)
        if bool(lines) and each.name in KNOWN_DIFFERENCES:
            continue
        different += bool(lines)
        for line in lines:
            print(f"{each.name}\n    {line}")
        if lines and len(theirs) == 1 and "ranks" in there:
            for name, outcome in (("there", there), ("here", here)):
                print(f"--- {name}:\n{outcome['ranks'][0]['output']}")
    seconds = [sum(outcome["seconds"] for outcome in side.values()) for side in (theirs, ours)]
    print(f"{len(theirs)} programs, {different} differ; {seconds[0]:.1f} s there, {seconds[1]:.1f} s here")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
