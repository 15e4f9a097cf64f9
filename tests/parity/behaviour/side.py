"""Runs programs in one package, each in processes of its own: `python -m tests.parity.behaviour.side OUT [TEXT]`.

`accelerate` is what the caller's PYTHONPATH says. The results go to a file: the outcomes by name.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity.behaviour.description import describe
from tests.parity.behaviour.program_table import Program, programs

SECONDS = 60
"""For one program; after that its ranks print their stacks and end."""


def main(out: str, pattern: str = "") -> None:
    """Run the programs whose name contains a text and write their outcomes."""
    importlib.import_module("torch._dynamo")  # every optimizer imports it, which takes a second
    importlib.import_module("accelerate.utils")
    outcomes: dict[str, Any] = {}
    for each in programs(pattern):
        begin = time.perf_counter()
        outcomes[each.name] = run(each)
        outcomes[each.name]["seconds"] = time.perf_counter() - begin
    Path(out).write_bytes(pickle.dumps(outcomes))


def run(program: Program) -> dict[str, Any]:
    """Run a program in processes of its own, in an empty folder.

    Returns:
        skipped: why; or ranks: for each rank its returned value or exception, described, and its output.
    """
    if program.missing:
        return {"skipped": f"not installed: {', '.join(program.missing)}"}
    folder = Path(tempfile.mkdtemp(prefix="behaviour-"))
    try:
        (folder / "work").mkdir()
        port = _free_port() if program.ranks else 0
        pids = [_start(program, rank, port, folder) for rank in range(max(program.ranks, 1))]
        for pid in pids:
            os.waitpid(pid, 0)
        return {"ranks": [_outcome(folder, rank) for rank in range(len(pids))]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def _outcome(folder: Path, rank: int) -> dict[str, Any]:
    output = (folder / f"output-{rank}").read_text(errors="replace")
    try:
        result = pickle.loads((folder / f"result-{rank}").read_bytes())
    except FileNotFoundError:
        result = {"died": True}
    return {"result": result, "output": output[-6000:]}


def _start(program: Program, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _child(program, rank, port, folder)
    finally:
        os._exit(0)


def _child(program: Program, rank: int, port: int, folder: Path) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    os.chdir(folder / "work")
    _set_environment(program, rank, port)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that Accelerate saves
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    try:
        result = {"returned": describe(program.run())}
    except BaseException as error:  # noqa: BLE001 - what a program raises is its result
        traceback.print_exc()
        result = {"raised": describe(error)}
    partial = folder / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result-{rank}")
    sys.stdout.flush()
    _wait_for_others(program, folder)


def _wait_for_others(program: Program, folder: Path) -> None:
    """Stay until all ranks have finished: rank 0 holds the store that the others may still need."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all((folder / f"result-{rank}").exists() for rank in range(max(program.ranks, 1))):
            return
        time.sleep(0.005)


def _set_environment(program: Program, rank: int, port: int) -> None:
    if not program.ranks:
        return
    size = program.ranks
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    place |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in place.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
