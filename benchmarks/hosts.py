"""Launches on several hosts, which `join` commands on this machine simulate, compared with a launch on one host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.bench import Figure, alternate, compared, row
from tests.support.kernel import ROOT, Kernel
from tests.support.ports import free_port

HOSTS, EACH, REPEATS = 8, 2, 3
SETUP = """
import os, time, torch
from notebook_accelerate import notebook_launcher
def stamp():
    return time.time()
def first_line(run):
    attempt = run.attempts[-1]
    return max(run.results) - attempt.started
"""


@row("hosts", "8 hosts")
def eight_hosts() -> Iterator[Figure]:
    """Measure the time from when all hosts have joined until every rank has printed a line."""
    with Kernel() as kernel:
        kernel.check(SETUP)

        def several() -> float:
            port = free_port()
            environment = {**os.environ, "NOTEBOOK_ACCELERATE_SECRET": "bench", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "notebook_accelerate", "join", f"127.0.0.1:{port}"]
            with ExitStack() as hosts:
                for _ in range(HOSTS - 1):
                    host = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
                    hosts.callback(host.wait)
                options = f"num_nodes={HOSTS}, use_port={port}, rdzv_conf={{'secret': 'bench'}}, start_method='spawn'"
                kernel.check(f"run = notebook_launcher(stamp, num_processes={EACH}, {options})")
                return float(kernel.value("first_line(run)"))

        def one() -> float:
            kernel.check(
                f"run = notebook_launcher(stamp, num_processes={HOSTS * EACH}, use_port=0, start_method='spawn')"
            )
            return float(kernel.value("first_line(run)"))

        here, single = alternate(REPEATS, several, one)
        note = "the peer is one host with 16 ranks; every rank is a spawned interpreter"
        yield compared(
            "8 hosts × 2 ranks: to the first line on all ranks", here, single, unit="s", ratio=1.5, note=note
        )
