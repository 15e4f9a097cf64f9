"""Unchanged notebooks run on a cluster: NOTEBOOK_ACCELERATE_ON sends their launches there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.examples import find, run_all
from tests.support.kernel import ROOT, Kernel
from tests.support.launching import blames, ready_kernel, said
from tests.support.ray_cluster import LocalCluster

ON_RAY = "[run.plan.start_method for run in notebook_accelerate.runs()]"


@pytest.fixture(scope="module")
def kernel(cluster: LocalCluster) -> Iterator[Kernel]:
    """Yield a kernel whose launches go to the cluster."""
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
    assert any("image/png" in shown for shown in find(cells, '["loss"].plot()').displays)
    failing = find(cells, "def faulty")
    assert failing.error is not None
    assert blames(failing.error.text, 1)
    assert "total = batch.sum()" in failing.error.text
    assert "rank 1 failed first, with AttributeError" in find(cells, "except WorkerError").stdout
    assert kernel.value("[info.state for info in background.ranks]") == ["stopped", "stopped"]
    assert set(kernel.value(ON_RAY)) == {"ray"}
    assert kernel.value("'ray' in __import__('sys').modules") is False, "the launch leaves nothing in the kernel"


@pytest.mark.nightly
def test_the_debugging_notebook_runs_unchanged(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "04_debugging.ipynb")

    diagnosis = find(cells, "found = run.diagnose()").result
    assert diagnosis is not None
    assert "<strong>the ranks disagree at the " in diagnosis["text/html"]
    assert "before any other rank's" in find(cells, "for warning in run.warnings").stdout
    assert "bad rows:          {0: [], 1: [87]}" in find(cells, "bad = run.ask").stdout
    assert set(kernel.value(ON_RAY)) == {"ray"}


@pytest.mark.nightly
def test_the_example_of_clusters_runs(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "07_cluster.ipynb")
    assert "64 ranks with CPU 1 each are requested" in find(cells, "num_processes=64").stdout
    assert "was lost" in find(cells, "def fragile").stdout
    assert cells[-1].stdout == "The cluster example is complete: 2 ranks on Ray, 2 attempts.\n"


def debugged(kernel: Kernel, call: str) -> str:
    """Open the debugger of rank 1, which may take longer than a call's timeout. Return the output."""
    shown = kernel.check(call, timeout=300).plain
    if "[rank 1] " not in shown:
        kernel.until("1 in run._internals.commands.prompts.debugged()", 300)
        shown = kernel.check(call, timeout=300).plain
    return shown


def test_warm_ranks_and_breakpoints_work(kernel: Kernel) -> None:
    kernel.check("%load_ext notebook_accelerate")
    kernel.check("%%ranks -n 2\nimport os\nx = int(os.environ['RANK']) * 10", timeout=300)
    cell = kernel.run("%%ranks\nx + 1", timeout=120)
    assert "[rank 0] 1" in cell.expect_ok().stdout
    assert "[rank 1] 11" in cell.stdout
    kernel.check("mine = 5")
    kernel.check("%%ranks -i mine -o there\nthere = x + mine", timeout=120)
    assert kernel.value("there") == [5, 15]
    failed = kernel.run("%%rank 1\nthere / 0", timeout=120)
    assert "rank 1 failed:" in said(failed)
    assert "there / 0" in said(failed)
    prompts = kernel.types("p there", "c", "Ada")
    asked = kernel.check("%%rank 1\nbreakpoint()\nname = input('who? ')\nname", timeout=120)
    assert "[rank 1] 15" in asked.plain
    assert "[rank 1] 'Ada'" in asked.plain
    assert prompts[2] == "[rank 1] who? "
    endless = kernel.submit("%%ranks\nimport time\nprint('on', rank)\ntime.sleep(600)")
    kernel.wait_for(lambda: all(f"on {rank}" in endless.stdout for rank in (0, 1)), 120)
    kernel.interrupt()
    assert "the ranks keep running" in said(kernel.finish(endless, 120))
    assert "[rank 1] 'Ada'" in kernel.check("%%rank 1\nname", timeout=120).stdout
    kernel.check("%rank_stop")
    kernel.check("from notebook_accelerate import RayCluster\nmine = RayCluster(strategy='STRICT_PACK')")
    cell = kernel.check("%%ranks -n 2 --on mine\nimport os\nos.environ['NODE_RANK']", timeout=300)
    assert "[rank 1] '0'" in cell.stdout
    kernel.check("%rank_stop")
    assert set(kernel.value(ON_RAY)) == {"ray"}


def test_a_breakpoint_on_a_remote_rank_prompts(kernel: Kernel) -> None:
    asked = kernel.types("p value", "n", "p value", "c")
    kernel.check(
        "def stopped():\n    group()\n    value = 40 + rank()\n    if rank() == 1:\n        breakpoint()\n"
        "        value += 1\n    dist.barrier()\n    return value"
    )
    cell = kernel.check("run = launch(stopped)", timeout=300)
    assert kernel.value("run.results") == [40, 42]
    assert asked in (["[rank 1] ipdb> "] * 4, ["[rank 1] (Pdb) "] * 4)
    shown = cell.stdout + cell.stderr
    assert "stopped()" in shown
    assert "[rank 1] 41" in cell.plain


def test_remote_ranks_can_be_inspected_and_are_held_when_they_fail(kernel: Kernel, tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    kernel.check(
        "def watched(flag):\n    group()\n    value = 40 + rank()\n    dist.barrier()\n"
        "    while not os.path.exists(flag):\n        time.sleep(0.05)\n"
        "    if rank() == 1:\n        raise KeyError('bad batch')\n    dist.barrier()"
    )
    kernel.check(f"run = launch(watched, {flag!r}, block=False, hold_on_error=True)", timeout=300)
    kernel.until("run.status == 'running' and list(run.ask('value', timeout=60).values()) == [40, 41]", 300)
    assert kernel.value("list(run.pause(timeout=60).values())", 300) == ["paused", "paused"]
    place = r"Cell In\[\d+\], line [56], in watched: "
    kernel.until(f"__import__('re').search({place!r}, run.diagnose().text) is not None", 300)
    kernel.until("'in watched' in str(run.stacks(ranks=[1]))", 300)
    assert kernel.value("list(run.unpause(timeout=60).values())", 300) == ["unpaused", "unpaused"]
    kernel.types("p value", "c")
    assert "[rank 1] 41" in debugged(kernel, "run.debug(rank=1)")
    kernel.check(f"open({flag!r}, 'w').close()")
    kernel.until("run.status == 'failed'", 300)
    assert "KeyError: 'bad batch'" in kernel.value("str(run.error)")
    # Rank 0 is in a barrier, at position 40.
    assert kernel.value("run.ask('value', ranks=[0], timeout=60)[0]", 300) == 40
    kernel.types("p value", "q")
    assert "[rank 1] 41" in debugged(kernel, "run.debug()")
    kernel.until("not run.held", 300)
    assert set(kernel.value(ON_RAY)) == {"ray"}
