"""Big models: the overhead of hooks, tokens per second with offloaded weights, device maps and loading."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.bench import Figure, alternate, compared, row
from benchmarks.big_models_worker import TOKENS

HERE, PEER = "notebook_accelerate", "accelerate"


class Side:
    """A process that measures one of the packages on command."""

    def __init__(self, package: str, folder: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.big_models_worker", package, folder]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def ask(self, command: str) -> Any:
        """Send a command and return the process's answer.

        Raises:
            RuntimeError: The process exited. The message contains the end of its output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait(60)  # The process closes its answer pipe before it writes its last error.
            self._stderr.seek(0)
            tail = self._stderr.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"The worker process exited during {command!r}:\n{tail}")
        return json.loads(answer)


@row("big models", "hooks")
def hooks() -> Iterator[Figure]:
    """Measure what hooks add to a forward pass of 100 small layers."""
    with tempfile.TemporaryDirectory() as folder, Side(HERE, folder) as here, Side(PEER, folder) as there:
        for how, words in (("align", "alignment hooks"), ("offload", "cpu_offload")):
            ours, peer = alternate(5, lambda h=how: here.ask(f"small {h}"), lambda h=how: there.ask(f"small {h}"))
            yield compared(f"overhead of {words} on 100 small layers", ours, peer, unit="ms", scale=1e3, ratio=0.3)


@row("big models", "disk")
def disk() -> Iterator[Figure]:
    """Measure the tokens per second of a 1 GB model that is offloaded to disk, with a warm page cache."""
    with tempfile.TemporaryDirectory() as folder, Side(HERE, folder) as here, Side(PEER, folder) as there:
        compute = here.ask("compute")
        read = statistics.median(here.ask("read") for _ in range(5))
        ours, peer = alternate(5, lambda: here.ask("disk"), lambda: there.ask("disk"))
    here_speed, there_speed = TOKENS / statistics.median(ours), TOKENS / statistics.median(peer)
    bound = TOKENS / max(compute, read)
    yield Figure(
        what="tokens per second, 1 GB on disk, window of 2 blocks",
        unit="tokens/s",
        ours=here_speed,
        peer=there_speed,
        goal="≥ 1.5 × peer, ≥ 0.8 × bound",
        met=here_speed >= 1.5 * there_speed and here_speed >= 0.8 * bound,
        note=f"only computing {1e3 * compute:.0f} ms, only reading {1e3 * read:.0f} ms: bound {bound:.3g} tokens/s",
    )


@row("big models", "gpu")
def gpu() -> Iterator[Figure]:
    """Measure the tokens per second of a 1 GB model that is offloaded to CPU memory and computes on a GPU."""
    what, goal = "tokens per second, 1 GB in main memory, on a GPU", "≥ 0.85 × bound"
    if not torch.cuda.is_available():
        yield Figure(what=what, unit="tokens/s", ours=None, goal=goal, note="not measured: this machine has no GPU")
        return
    with tempfile.TemporaryDirectory() as folder, Side(HERE, folder) as here, Side(PEER, folder) as there:
        compute, transfer = here.ask("gpu_compute"), here.ask("gpu_transfer")
        ours, peer = alternate(10, lambda: here.ask("gpu"), lambda: there.ask("gpu"))
    here_speed, there_speed = TOKENS / statistics.median(ours), TOKENS / statistics.median(peer)
    bound = TOKENS / max(compute, transfer)
    yield Figure(
        what=what,
        unit="tokens/s",
        ours=here_speed,
        peer=there_speed,
        goal=goal,
        met=here_speed >= 0.85 * bound,
        note=f"only computing {1e3 * compute:.1f} ms, only copying {1e3 * transfer:.1f} ms: bound {bound:.3g} tokens/s",
    )


@row("big models", "maps")
def maps() -> Iterator[Figure]:
    """Measure how long a device map for 128,000 modules takes, compared with traversing the modules three times."""
    for layout in ("flat", "blocks"):
        with tempfile.TemporaryDirectory() as folder, Side(HERE, folder) as here:
            answers = [here.ask(f"map {layout}") for _ in range(4)][1:]
        walks = [3 * answer["walk"] for answer in answers]
        found = [answer["map"] for answer in answers]
        what = f"device map of 128,000 modules, {layout}"
        yield compared(what, found, walks, unit="s", ratio=2 / 3, note="the peer is three bare traversals")


@row("big models", "loading")
def loading() -> Iterator[Figure]:
    """Measure loading 2 GB in 20 shards, each time in another process."""
    with tempfile.TemporaryDirectory() as folder:
        with Side(HERE, folder) as writer:
            writer.ask("shards")

        def load(package: str) -> Any:
            with Side(package, folder) as side:
                return side.ask("load")

        ours, peer = alternate(3, lambda: load(HERE), lambda: load(PEER))
    for key, words, unit, scale in (("seconds", "time", "s", 1.0), ("peak", "peak memory", "MB", 1e-6)):
        here, there = [each[key] for each in ours], [each[key] for each in peer]
        yield compared(f"loading 2 GB in 20 shards: {words}", here, there, unit=unit, scale=scale, ratio=0.8)
