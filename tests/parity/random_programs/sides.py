"""Run random programs with both packages, and compare their records.

`python -m tests.parity.random_programs.sides 0 60` compares the programs 0 to 59 and prints those that differ.
`... 17 1 --show` prints program 17.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from notebook_accelerate.integrations.accelerate_alias import STARTUP_FOLDER
from notebook_accelerate.launch.processes import ports
from tests.parity.behaviour.both_sides import ROOT, _environment
from tests.parity.behaviour.description import differences, lineage
from tests.parity.random_programs.plans import plan
from tests.parity.random_programs.writing import RandomProgram, write

SECONDS = 60
"""The time limit in seconds for one program. After it, the program's ranks print their stacks and exit."""
TOLERANCE = 1e-6
"""The relative tolerance of losses and weights."""
PATHS = {"theirs": str(ROOT), "ours": f"{STARTUP_FOLDER}{os.pathsep}{ROOT}"}
Outcomes = dict[int, list[dict[str, Any]]]
"""The values that each rank recorded, and the exception that it raised, by the number of the program."""


def run_both(folder: Path, numbers: Iterable[int]) -> tuple[Outcomes, Outcomes]:
    """Run programs on both packages at the same time.

    Args:
        folder: An empty folder.
        numbers: The numbers of the programs to run.

    Returns:
        The outcomes on Accelerate and on this package.
    """
    command = [sys.executable, "-m", "tests.parity.random_programs.sides", *map(str, numbers), "--side"]
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, path in PATHS.items():
            sides[name] = subprocess.Popen([*command, str(folder / name)], env=_environment(path), cwd=ROOT)
            stack.callback(sides[name].wait)
            stack.callback(sides[name].kill)
        for name, process in sides.items():
            if process.wait():
                raise RuntimeError(f"the programs on {name} ended with exit code {process.returncode}")
    theirs, ours = (pickle.loads((folder / name).read_bytes()) for name in PATHS)
    return theirs, ours


def compare(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """Return lines that describe each rank's first difference between two outcomes, and its incorrect values."""
    lines: list[str] = []
    for rank, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        for label, found, right in (entry for entry in here["seen"] if entry[0] == "right"):
            lines += differences(right, found, TOLERANCE, f"rank {rank}: {label} there, found here")[:2]
        lines += _first_difference(there, here, f"rank {rank}")
    return lines


def _first_difference(there: dict[str, Any], here: dict[str, Any], at: str) -> list[str]:
    ignored = {"right"}
    for place, (one, other) in enumerate(zip(there["seen"], here["seen"], strict=False)):
        if one[0] == other[0] == "apart":
            if len(one) == len(["apart", "reason"]):
                return [f"{at} raised {here['raised']}"] if "raised" in here else []
            ignored |= {*one[2]}
        elif (one[0] != other[0] or one[0] not in ignored) and (
            found := differences(one, other, TOLERANCE, f"{at}, entry {place}, {one[0]!r}")
        ):
            return found[:2]
    if "raised" not in there and "raised" not in here and len(there["seen"]) != len(here["seen"]):
        return [f"{at}: {len(there['seen'])} entries there, {len(here['seen'])} here"]
    return differences(there.get("raised"), here.get("raised"), 0.0, f"{at} raised")


def run(numbers: Sequence[int]) -> Outcomes:
    """Run programs with this process's package. Programs with the same number of ranks share their processes."""
    programs = [write(number) for number in numbers]
    found: Outcomes = {}
    for ranks in sorted({each.ranks for each in programs}):
        left = [each for each in programs if each.ranks == ranks]
        while left:
            finished = _run_together(left, ranks)
            found.update(finished)
            left = left[len(finished) :]
    return found


def _run_together(programs: Sequence[RandomProgram], ranks: int) -> Outcomes:
    """Run programs one after the other in new processes. After a program that raises, the rest are not run."""
    folder = Path(tempfile.mkdtemp(prefix="random-programs-"))
    key = id(folder) | 1 << 60
    try:
        port = ports.reserve(key, 0, fixed=False)[0]
        for pid in [_start(programs, rank, ranks, port, folder) for rank in range(ranks)]:
            os.waitpid(pid, 0)
        found: Outcomes = {}
        for each in programs:
            found[each.number] = [_outcome(folder, each.number, rank) for rank in range(ranks)]
            if any("raised" in one for one in found[each.number]):
                break
        return found
    finally:
        ports.release(key)
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(folder: Path, number: int, rank: int) -> dict[str, Any]:
    file = folder / f"{number}-{rank}"
    if file.exists():
        outcome: dict[str, Any] = pickle.loads(file.read_bytes())
        return outcome
    return {"seen": [], "raised": "died", "output": (folder / f"output-{rank}").read_text(errors="replace")[-3000:]}


def _start(programs: Sequence[RandomProgram], rank: int, ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _child(programs, rank, ranks, port, folder)
    finally:
        os._exit(0)


def _child(programs: Sequence[RandomProgram], rank: int, ranks: int, port: int, folder: Path) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    place |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in place.items() if ranks > 1 or "A" in name[:1]})
    for each in programs:
        outcome = _result(each, folder)
        (folder / "partial").mkdir(exist_ok=True)
        partial = folder / "partial" / f"{each.number}-{rank}"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(folder / partial.name)
        if "raised" in outcome:
            break
    _wait_for_others([folder / f"{each.number}-{other}" for other in range(ranks)], [folder / f"{each.number}-{rank}"])


def _wait_for_others(files: list[Path], mine: list[Path]) -> None:
    """Wait until all ranks have finished, because the others may still need the store that rank 0 holds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.005)


def _result(program: RandomProgram, folder: Path) -> dict[str, Any]:
    work = folder / f"work-{program.number}"
    work.mkdir(exist_ok=True)
    os.chdir(work)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that Accelerate saves
    warnings.simplefilter("ignore")
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)  # Reset everything except the process group.
    state.GradientState._reset_state()
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    names: dict[str, Any] = {"__name__": "random_program"}
    outcome: dict[str, Any] = {}
    try:
        exec(compile(program.text, f"<program {program.number}>", "exec"), names)
    except Exception as error:  # noqa: BLE001 - what a program raises is its result
        outcome = {"raised": {"exception": lineage(type(error))}, "output": traceback.format_exc()}
    faulthandler.cancel_dump_traceback_later()
    return {"seen": names.get("SEEN", []), **outcome}


def _serve(numbers: Sequence[int], out: str) -> None:
    # Import this once, before forking. Otherwise, each process would import it with its first optimizer, for a second.
    importlib.import_module("torch._dynamo")
    importlib.import_module("accelerate.utils")
    with contextlib.suppress(ImportError):
        importlib.import_module("torchdata.stateful_dataloader")
    gc.collect()
    gc.freeze()  # Without this, garbage collection in the children would copy the parent's pages.
    Path(out).write_bytes(pickle.dumps(run(numbers)))


def main() -> int:
    """Compare programs, and print the differences."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.random_programs.sides", description=__doc__)
    parser.add_argument("numbers", nargs="+", type=int, help="programs; with --count only the first one")
    parser.add_argument("--count", type=int, default=0, help="how many, from the first number on")
    parser.add_argument("--show", action="store_true", help="print the programs and run nothing")
    parser.add_argument("--text", action="store_true", help="print the text of programs that differ")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    numbers = range(asked.numbers[0], asked.numbers[0] + asked.count) if asked.count else asked.numbers
    if asked.side:
        _serve(numbers, asked.side)
        return 0
    if asked.show:
        print("\n\n".join(write(number).text for number in numbers))
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = run_both(Path(folder), numbers)
    different = 0
    for number in numbers:
        if lines := compare(theirs[number], ours[number]):
            different += 1
            print(f"{plan(number)}", *lines, sep="\n    ")
            for name, side in (("there", theirs), ("here", ours)):
                outputs = [one["output"].rstrip().splitlines()[-1] for one in side[number] if one.get("output")]
                print(*(f"    {name}: {line}" for line in outputs), sep="\n", end="\n" if outputs else "")
            print(write(number).text if asked.text else "", end="")
    print(f"{len(numbers)} programs, {different} differ; {time.perf_counter() - begin:.1f} s")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
