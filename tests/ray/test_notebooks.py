"""Notebooks on a cluster, unchanged: where their launches run is said to the kernel, by NOTEBOOK_ACCELERATE_ON."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.support.examples import find, run_all
from tests.support.kernel import ROOT, Kernel
from tests.support.launching import ready_kernel
from tests.support.ray_cluster import LocalCluster

ON_RAY = "[run.plan.start_method for run in notebook_accelerate.runs()]"


@pytest.fixture(scope="module")
def kernel(cluster: LocalCluster) -> Iterator[Kernel]:
    """A kernel whose launches go to the cluster."""
    variables = {"OMP_NUM_THREADS": "1", "QUICKSTART_EPOCHS": "8", "NOTEBOOK_ACCELERATE_ON": "ray"}
    with ready_kernel(zygote=False, timeout=300.0, env={**os.environ, **variables}) as kernel:
        yield kernel


def test_the_quickstart_runs_unchanged(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "01_quickstart.ipynb")

    launch = find(cells, "run = notebook_launcher")
    assert "2 processes on a Ray cluster · ray (as asked: on='ray')" in launch.stdout
    assert launch.stdout.count("[rank 0] epoch") == 8
    results = kernel.value("run.results")
    assert results[0] == results[1] > 0.95
    assert "<svg" in find(cells, "def curves").result["image/svg+xml"]  # type: ignore[index]
    failing = find(cells, "def faulty")
    assert failing.error is not None
    assert failing.error.text.startswith("rank 1 failed first:")
    assert "total = batch.sum()" in failing.error.text
    assert "rank 1 failed first, with AttributeError" in find(cells, "except WorkerError").stdout
    assert kernel.value("[info.state for info in background.ranks]") == ["stopped", "stopped"]
    assert set(kernel.value(ON_RAY)) == {"ray"}
    assert kernel.value("'ray' in __import__('sys').modules") is False, "the kernel is a guest room"


def test_the_debugging_notebook_runs_unchanged(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "04_debugging.ipynb")

    diagnosis = find(cells, "found = run.diagnose()").result
    assert diagnosis is not None
    assert "<strong>the ranks disagree at collective #" in diagnosis["text/html"]
    assert "before any other rank's" in find(cells, "for warning in run.warnings").stdout
    assert "bad rows:          {0: [], 1: [87]}" in find(cells, "bad = run.ask").stdout
    assert set(kernel.value(ON_RAY)) == {"ray"}


def test_the_example_of_clusters(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "07_cluster.ipynb")
    assert "64 ranks with CPU 1 each are asked for" in find(cells, "num_processes=64").stdout
    assert "was lost" in find(cells, "def fragile").stdout
    assert cells[-1].stdout == "The cluster is through: 2 ranks on Ray, 2 attempts.\n"


def test_warm_ranks_and_breakpoints(kernel: Kernel) -> None:
    kernel.check("%load_ext notebook_accelerate")
    kernel.check("%%ranks -n 2\nimport os\nx = int(os.environ['RANK']) * 10", timeout=300)
    cell = kernel.run("%%ranks\nx + 1", timeout=120)
    assert "[rank 0] 1" in cell.expect_ok().stdout
    assert "[rank 1] 11" in cell.stdout
    kernel.check("%rank_stop")
    kernel.check("from notebook_accelerate import RayCluster\nmine = RayCluster(strategy='STRICT_PACK')")
    cell = kernel.check("%%ranks -n 2 --on mine\nimport os\nos.environ['NODE_RANK']", timeout=300)
    assert "[rank 1] '0'" in cell.stdout
    kernel.check("%rank_stop")
    assert set(kernel.value(ON_RAY)) == {"ray"}


def test_a_breakpoint_on_a_rank_elsewhere(kernel: Kernel) -> None:
    asked: list[str] = []
    waiting = ["p value", "n", "p value", "c"]

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return waiting.pop(0)

    kernel.answer = answer
    kernel.check(
        "def stopped():\n    group()\n    value = 40 + rank()\n    if rank() == 1:\n        breakpoint()\n"
        "        value += 1\n    dist.barrier()\n    return value"
    )
    cell = kernel.check("run = launch(stopped)", timeout=300)
    assert kernel.value("run.results") == [40, 42]
    assert asked in (["[rank 1] ipdb> "] * 4, ["[rank 1] (Pdb) "] * 4)
    shown = cell.stdout + cell.stderr
    assert "stopped()" in shown
    assert "[rank 1] 41" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
