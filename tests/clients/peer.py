"""Run programs in separate processes, on the real Accelerate or on this package: `python -m tests.clients.peer`.

The libraries are imported once, in the process that forks each program's ranks. The results go to a file.
The caller's PYTHONPATH, set by `start`, selects `accelerate` and optionally another version of transformers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.clients.programs import PROGRAMS, WITH_UNSLOTH
from tests.support.ranks import reserved_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "peer"
"""The folder of the real Accelerate, which is not on the path, so that no other code imports it."""
VERSIONS = ROOT / ".build" / "transformers"
"""The folder in which make installs other versions of transformers, each with its dependencies."""
RANKS = 2
SECONDS = 300
"""The time limit in seconds for one program, after which its ranks print their stacks and exit."""
LIBRARIES = (
    "transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "peft", "diffusers.models",
    "datasets", "diffusers.training_utils", "pytorch_accelerated.trainer", "lightning", "torch._dynamo",
    "torch.distributed.fsdp", "fastai.distributed",
)  # fmt: skip


def run_on_accelerate(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Run programs on the real Accelerate; see `start` and `results`."""
    return results(start(folder, names, FOLDER), folder)


def start(folder: Path, names: Iterable[str], *path: Path | str) -> subprocess.Popen[str]:
    """Start programs in separate processes.

    Args:
        folder: An empty folder.
        names: The programs, which run on two ranks, or in one process if "@1" follows the name.
        path: The folders that come first on the path: the real Accelerate or this package, and a version of
            transformers.
    """
    dropped = ("ACCELERATE_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # Python uses the first sitecustomize on the path, so these folders come first.
    places = os.pathsep.join(map(str, (*path, ROOT)))
    variables = {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    group = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.clients.peer", str(folder / "results.json"), *names]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            command, env={**kept, **variables, **group}, cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def results(process: subprocess.Popen[str], folder: Path) -> dict[str, list[Any]]:
    """Wait for started programs. Return for each program the results of its ranks, or the text of its exception."""
    try:
        code = process.wait(SECONDS * 4)
    finally:
        process.kill()
        process.wait()
    if code:
        raise RuntimeError(f"the programs ended with exit code {code}: {(folder / 'output').read_text()[-4000:]}")
    found: dict[str, list[Any]] = json.loads((folder / "results.json").read_text())
    return found


def main(out: str, *names: str) -> None:
    """Run the programs one after the other, and write their results or exceptions by name and rank."""
    for library in ("unsloth", *LIBRARIES):  # unsloth patches the others.
        # Some environments have no unsloth, or an older transformers than trl and diffusers require.
        with contextlib.suppress(Exception):
            importlib.import_module(library)
    gc.collect()
    gc.freeze()  # Otherwise, garbage collection in the children would copy the parent's pages.
    Path(out).write_text(json.dumps({name: run(name) for name in names or PROGRAMS}))


def run(name: str) -> list[Any]:
    """Run a program. Return each rank's result, the text of its exception, or "died"."""
    program, _, count = name.partition("@")
    ranks = int(count or RANKS)
    with reserved_port() as port:
        ends = [_start(program, rank, ranks, port) for rank in range(ranks)]
        found = [Path(f"/proc/self/fd/{end}").read_text() for _, end in ends]
        for pid, end in ends:
            os.waitpid(pid, 0)
            os.close(end)
    return [json.loads(text) if text else "died" for text in found]


def _start(name: str, rank: int, ranks: int, port: int) -> tuple[int, int]:
    """Fork a rank. Return its process, and the end of the pipe that delivers its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({variable: str(value) for variable, value in place.items() if ranks > 1})
        result: Any = _result(name)
        with os.fdopen(writing, "w") as file:
            json.dump(result, file)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _result(name: str) -> Any:
    try:
        return {**PROGRAMS, **WITH_UNSLOTH}[name].train()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()


if __name__ == "__main__":
    main(*sys.argv[1:])
