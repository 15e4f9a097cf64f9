"""Training: what an Accelerator adds to steps, batches, collectives and the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.bench import REPEATS, Figure, alternate, compared, row
from tests.support.ranks import free_port

HERE, PEER = "notebook_accelerate", "accelerate"


class World:
    """The ranks of one package, waiting for commands."""

    def __init__(self, package: str, ranks: int) -> None:
        port = str(free_port())
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.training_worker", package]
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_environment(rank, ranks, port)},
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.communicate()

    def ask(self, command: str) -> Any:
        """Give a command to all ranks and return what rank 0 answers."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._ranks if process.stdout is not None]
        return json.loads(answers[0])


def _environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    if ranks == 1:
        return {"OMP_NUM_THREADS": "1"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def _steps(ranks: int) -> Iterator[Figure]:
    with World(HERE, ranks) as here, World(PEER, ranks) as there:
        for window in (1, 4):
            command = f"step {window}"
            ours, peer = alternate(REPEATS, lambda c=command: here.ask(c), lambda c=command: there.ask(c))
            what = "one process" if ranks == 1 else f"DDP, {ranks} ranks"
            words = "no accumulation" if window == 1 else f"accumulation of {window}"
            yield compared(f"added to a step, {what}, {words}", ours, peer, unit="us", scale=1e6, ratio=0.3)


@row("training", "steps")
def steps() -> Iterator[Figure]:
    """Measure a step above plain torch."""
    yield from _steps(1)


@row("training", "steps under DDP")
def ddp_steps() -> Iterator[Figure]:
    """Measure a step above plain DDP."""
    yield from _steps(2)


@row("training", "batches")
def batches() -> Iterator[Figure]:
    """Measure a batch of a prepared loader above one of the plain loader."""
    with World(HERE, 1) as here, World(PEER, 1) as there:
        ours, peer = alternate(REPEATS, lambda: here.ask("loader"), lambda: there.ask("loader"))
        yield compared("added to a batch, one process", ours, peer, unit="us", scale=1e6, ratio=0.3)


@row("training", "collectives")
def collectives() -> Iterator[Figure]:
    """Measure collectives of a dict of 50 small tensors against one collective packed by hand."""
    with World(HERE, 2) as here, World(PEER, 2) as there:
        ours, peer = alternate(REPEATS, lambda: here.ask("collectives"), lambda: there.ask("collectives"))
        for name in ("gather", "reduce", "pad_across_processes", "broadcast"):
            fused = [found["fused"] for found in ours]
            times = sum(found[name] for found in peer) / sum(found["fused"] for found in peer)
            note = f"the peer here is one fused gather; Accelerate takes {times:.0f} times as long as that"
            values = [found[name] for found in ours]
            yield compared(f"{name} of 50 tensors", values, fused, unit="ms", scale=1e3, ratio=1.5, note=note)


@row("training", "import")
def imports() -> Iterator[Figure]:
    """Measure the import of the worker side above torch."""
    ours, peer = alternate(REPEATS, lambda: _import(HERE), lambda: _import(PEER))
    yield compared("import of Accelerator, torch being there", ours, peer, unit="ms", scale=1e3, ratio=1.0)


def _import(package: str) -> float:
    code = (
        "import time, torch; begin = time.process_time()\n"
        f"from {package} import Accelerator\nprint(time.process_time() - begin)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)
