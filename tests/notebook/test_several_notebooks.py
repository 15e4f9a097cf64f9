"""Several kernels run one cell together. The first one supervises all ranks, and all cells finish at the same time."""

from __future__ import annotations

import itertools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import WARM_OPTIMIZER, children, rank_pids, said, wait_gone
from tests.support.notebooks import LIMIT, Notebooks, notebooks
from tests.support.ports import free_port

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]
HOST = platform.node()
SECRET = {"secret": "hush"}


@pytest.fixture
def pair(two_notebooks: Notebooks) -> Notebooks:
    """Return the two shared kernels."""
    return two_notebooks


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no test with the pair changes what `look()` returns, or leaves child processes."""
    if "pair" not in request.fixturenames:
        yield
        return
    pair = request.getfixturevalue("pair")
    before = pair.values("look()")
    yield
    assert pair.changed(before) == [{}, {}]
    assert not any(look["elastic"] for look in before)
    assert [children(kernel) for kernel in pair.kernels] == [[], []]


def test_notebooks_may_have_different_numbers_of_ranks(pair: Notebooks) -> None:
    first, second = pair.finish(pair.launch("meet", "num_processes=1", "num_processes=2", rdzv_conf=SECRET))
    first.expect_ok()
    second.expect_ok()
    assert f"all 2 nodes have joined: rank 0 on node 0 ({HOST}), here; ranks 1-2 on node 1 ({HOST})" in first.stdout
    assert f"all 2 nodes have joined: rank 0 on node 0 ({HOST}); ranks 1-2 on node 1 ({HOST}), here" in second.stdout
    assert "the first notebook has all ranks: stop, ask and debug them there" in second.stdout
    assert "[rank 0] sum 3.0 of 3 here 1" in first.stdout
    assert "[rank 2] sum 3.0 of 3 here 2" in first.stdout
    assert "[rank 0]" not in second.stdout
    assert "[rank 2] sum 3.0 of 3 here 2" in second.stdout
    assert pair.values("run.results") == [[3.0, 3.0, 3.0], [3.0, 3.0]]
    assert pair.values("[info.rank for info in run.ranks]") == [[0, 1, 2], [1, 2]]


def test_without_a_secret_each_notebook_runs_its_own_ranks(pair: Notebooks) -> None:
    """As with torchrun's static rendezvous, only torch connects the notebooks."""
    first, second = pair.finish(pair.launch("meet", "num_processes=2", "num_processes=2"))
    first.expect_ok()
    second.expect_ok()
    assert "every notebook runs and shows its own ranks, as torchrun would" in first.stdout
    line = "in the other notebooks: notebook_launcher(meet, args, num_processes=2, num_nodes=2, node_rank=1"
    assert line in first.stdout
    assert "[rank 1] sum 6.0 of 4 here 2" in first.stdout
    assert "[rank 2]" not in first.stdout
    assert "[rank 2] sum 6.0 of 4 here 2" in second.stdout
    assert pair.values("run.results") == [[6.0, 6.0], [6.0, 6.0]]
    assert pair.values("[info.rank for info in run.ranks]") == [[0, 1], [2, 3]]


def test_c10d_generates_a_secret_and_prints_it(pair: Notebooks) -> None:
    options = f"num_nodes=2, use_port={free_port()}, rdzv_backend='c10d', panel=True"
    first = pair.kernels[0].submit(f"run = launch(meet, num_processes=1, {options})")
    pair.kernels[0].wait_for(lambda: "1 of 2 nodes" in first.stdout, LIMIT)
    refused = said(pair.kernels[1].run(f"launch(meet, num_processes=1, {options})", LIMIT))
    assert "another notebook of this run is already listening and shows the run's secret; pass it here too" in refused
    line = next(line for line in first.stdout.splitlines() if "in another notebook: " in line)
    call = line.partition(": ")[2].replace("notebook_launcher(meet, args", "run = notebook_launcher(meet, ()")
    assert "'secret': '" in call
    second = pair.kernels[1].run(call, LIMIT).expect_ok()
    pair.kernels[0].finish(first, LIMIT).expect_ok()
    assert "[rank 1] sum 1.0 of 2 here 1" in second.stdout
    assert pair.values("run.results") == [[1.0, 1.0], [1.0]]


def test_the_first_notebook_prints_the_line_for_the_others(pair: Notebooks) -> None:
    first, second = pair.finish(pair.launch("meet", *["num_processes=1"] * 2, rdzv_conf={**SECRET, "join_timeout": 99}))
    line = next(line for line in first.stdout.splitlines() if "in another notebook:" in line)
    assert "notebook_launcher(meet, args, num_processes=1, num_nodes=2, node_rank=1, master_addr='127.0.0.1'" in line
    assert line.endswith("rdzv_conf={'join_timeout': 99, 'secret': <the same>})")
    assert "in another notebook" not in second.stdout
    command = "or on any machine: NOTEBOOK_ACCELERATE_SECRET=<the same> python -m notebook_accelerate join 127.0.0.1:"
    assert command in first.stdout
    assert "hush" not in first.stdout + second.stdout
    assert not any("hush" in text for text in pair.values("run.report().text + run.report().html"))


def test_c10d_counts_from_the_notebook_that_arrived_first(pair: Notebooks) -> None:
    options = {"rdzv_backend": "c10d", "rdzv_conf": SECRET}
    cells = pair.finish(pair.launch("meet", "num_processes=1", "num_processes=2", **options))
    assert [cell.ok for cell in cells] == [True, True], [cell.error for cell in cells]
    ranks = pair.values("[info.rank for info in run.ranks]")
    first = 0 if 0 in ranks[0] else 1
    assert ranks[first] == [0, 1, 2]
    assert ranks[1 - first] == ([1, 2] if first == 0 else [2])
    assert "in another notebook: " in cells[first].stdout
    assert "rdzv_backend='c10d'" in cells[first].stdout
    assert "in another notebook: " not in cells[1 - first].stdout


def test_the_first_notebook_shows_all_output_and_metrics(pair: Notebooks) -> None:
    code = """
from notebook_accelerate import Accelerator
def logged():
    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": 1.0}, step=3)
    print("logged by", rank())
    print("to stderr", file=sys.stderr)
    accelerator.wait_for_everyone()
    return rank() * 10
"""
    for kernel in pair.kernels:
        kernel.check(code, LIMIT)
    first, second = pair.finish(pair.launch("logged", "num_processes=2", "num_processes=2", rdzv_conf=SECRET))
    first.expect_ok()
    second.expect_ok()
    assert [f"[rank {rank}] logged by {rank}" in first.stdout for rank in range(4)] == [True] * 4
    assert [f"[rank {rank}] logged by {rank}" in second.stdout for rank in range(4)] == [False, False, True, True]
    assert first.stderr.count("to stderr") == 4
    assert pair.values("run.results") == [[0, 10, 20, 30], [20, 30]]
    shown = "[[i.rank, i.node, i.host, i.state, i.exit, i.last_step is not None] for i in run.ranks]"
    every = [[rank, rank // 2, "" if rank < 2 else HOST, "succeeded", "exit 0"] for rank in range(4)]
    found = pair.values(shown)
    assert [row[:5] for row in found[0]] == every
    assert [row[:5] for row in found[1]] == [[2, 1, "", "succeeded", "exit 0"], [3, 1, "", "succeeded", "exit 0"]]


def test_ranks_of_other_notebooks_can_be_asked_and_inspected(pair: Notebooks) -> None:
    options = {"rdzv_conf": SECRET, "block": False}
    cells = pair.finish(pair.launch("meet, -1, 600.0", "num_processes=1", "num_processes=2", **options))
    pair.wait_until_all_print(cells, "sum 3.0", [3, 2])
    first, second = pair.kernels
    asked = first.value("{str(r): v for r, v in run.ask('fail * 10 + value.item()', timeout=60).items()}", LIMIT)
    assert asked == {"0": -7.0, "1": -7.0, "2": -7.0}
    assert f"is controlled by the notebook of node 0 ({HOST})" in said(second.run("run.ask('fail')", LIMIT))
    stacks = first.value("str(run.stacks())", LIMIT)
    assert "in meet" in stacks
    assert "rank 0" in stacks or "ranks 0" in stacks
    assert first.value("[run.pause(timeout=100)[rank] for rank in range(3)]", LIMIT) == ["paused"] * 3
    assert first.value("run._internals.commands.clock.suspended") is True
    assert first.value("[run.unpause(timeout=100)[rank] for rank in range(3)]", LIMIT) == ["unpaused"] * 3
    assert first.value("run._internals.commands.clock.suspended") is False
    first.check("run.stop()", LIMIT)
    assert pair.kernels[1].value("run.wait(100)", LIMIT)
    assert pair.values("run.status") == ["stopped", "stopped"]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_notebook_that_never_joins_is_named(pair: Notebooks, backend: str) -> None:
    options = {"num_nodes": 2, "rdzv_backend": backend, "rdzv_conf": {**SECRET, "join_timeout": 10}}
    (cell,) = pair.finish(pair.launch("meet", "num_processes=2", **options))
    missing = "node 1 did not join" if backend == "static" else "1 node did not join"
    assert f"LaunchError: {missing} within 10 s" in said(cell)
    assert "1 of 2 nodes have joined" in said(cell)
    assert backend == "static" or f"({HOST})" in said(cell)


def test_the_error_names_a_first_notebook_that_never_joins(pair: Notebooks) -> None:
    port = free_port()
    cell = pair.kernels[1].run(
        f"launch(meet, num_nodes=2, node_rank=1, use_port={port}, rdzv_conf={{'secret': 's', 'join_timeout': 3}})",
        LIMIT,
    )
    assert f"LaunchError: node 0 did not join within 3 s: no run answers at 127.0.0.1:{port}" in said(cell)


def test_two_notebooks_with_the_same_node_rank_are_refused(pair: Notebooks) -> None:
    options = f"num_nodes=3, use_port={free_port()}, rdzv_conf={{'secret': 's', 'join_timeout': 400}}, block=False"
    first, second = pair.kernels
    begun = first.check(f"run = launch(meet, {options})", LIMIT)
    second.check(f"run = launch(meet, node_rank=1, {options})", LIMIT)
    first.wait_for(lambda: "2 of 3 nodes" in begun.stdout, LIMIT)
    second.check(f"other = launch(meet, node_rank=1, {options})", LIMIT)
    assert second.value("other.wait(100)", LIMIT)
    who = f"{HOST} (kernel {second.pid})"
    text = second.value("str(other.error)")
    assert f"two nodes have node_rank=1: {who} and {who}; pass a different one to each" in text
    assert pair.values("run.ended") == [None, None]
    first.check("run.stop()", LIMIT)
    assert second.value("run.wait(100)", LIMIT)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_notebook_with_another_secret_is_refused(pair: Notebooks, backend: str) -> None:
    port = free_port()
    common = f"num_nodes=2, use_port={port}, rdzv_backend={backend!r}"
    settings = [{"secret": "hush", "join_timeout": 500}, {"secret": "wrong", "join_timeout": 100}]
    first = pair.kernels[0].submit(f"launch(meet, {common}, rdzv_conf={settings[0]})")
    pair.kernels[0].wait_for(lambda: "1 of 2 nodes" in first.stdout, LIMIT)
    place = "node_rank=1, " if backend == "static" else ""
    second = pair.kernels[1].run(f"launch(meet, {place}{common}, rdzv_conf={settings[1]})", LIMIT)
    assert f"LaunchError: no run with this secret listens on 127.0.0.1:{port}" in said(second)
    assert not first.finished, "the first notebook still waits for another one"
    pair.kernels[0].interrupt()
    pair.kernels[0].finish(first, LIMIT)
    assert "all 2 nodes" not in first.stdout


@pytest.mark.parametrize(("backend", "conf"), [("static", SECRET), ("c10d", SECRET)])
def test_notebooks_join_at_an_endpoint_given_by_name(pair: Notebooks, backend: str, conf: dict[str, str]) -> None:
    where = f"127.0.0.1:{free_port()}"
    place = ", node_rank=1" if backend == "static" else ""

    def call(name: str, seconds: int, more: str = "") -> str:
        given = {"rdzv_endpoint": where, "rdzv_id": name, "rdzv_backend": backend}
        settings = {**conf, "join_timeout": seconds}
        options = ", ".join(f"{key}={value!r}" for key, value in given.items())
        return f"run = launch(meet, num_nodes=2, {options}, rdzv_conf={settings}{more})"

    first = pair.kernels[0].submit(call("mine", 500, ", num_processes=1"))
    pair.kernels[0].wait_for(lambda: "1 of 2 nodes have joined" in first.stdout, LIMIT)
    other = pair.kernels[1].run(call("yours", 10, place), LIMIT)
    assert f"LaunchError: a rendezvous answers at {where}, but not for rdzv_id='yours'" in said(other)
    second = pair.kernels[1].run(call("mine", 500, f", num_processes=2{place}"), LIMIT)
    pair.kernels[0].finish(first, LIMIT)
    for cell in (first, second):
        cell.expect_ok()
    assert pair.values("run.results[-1]") == [3.0, 3.0]
    assert f"rdzv_endpoint={where!r}, rdzv_id='mine'" in first.stdout
    assert pair.values("run.plan.world_size") == [3, 3]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_consecutive_launches_can_use_one_port(pair: Notebooks, backend: str) -> None:
    options = f"num_processes=1, num_nodes=2, use_port={free_port()}, rdzv_conf={SECRET}, rdzv_backend={backend!r}"
    places = [", node_rank=1"] if backend == "static" else [""]
    cells = [
        kernel.submit(f"found = [launch(meet, {options}{place}).results for _ in range(4)]")
        for kernel, place in zip(pair.kernels, ["", *places], strict=True)
    ]
    for cell in pair.finish(cells):
        cell.expect_ok()
    assert all(set(results) == {1.0} for found in pair.values("found") for results in found)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_reported_at_its_line_of_the_cell_in_every_notebook(pair: Notebooks, failing: int) -> None:
    cells = pair.finish(pair.launch(f"meet, {failing}", "num_processes=1", "num_processes=2", rdzv_conf=SECRET))
    owner = 0 if failing == 0 else 1
    for index, cell in enumerate(cells):
        assert "KeyError: 'bad batch'" in said(cell)
        assert f"rank {failing} failed" in said(cell)
        name = "Cell In[2]" if index == owner else f"Cell In[2] of node {owner}"
        assert f"{name}, line 8" in said(cell)
        assert 'raise KeyError("bad batch")' in said(cell)
    assert pair.values("run.status if 'run' in dir() else ''")  # The kernels must survive the failure.
    assert pair.values("notebook_accelerate.runs()[-1].status") == ["failed", "failed"]


@pytest.mark.parametrize("stopping", [0, 1])
def test_a_stop_in_one_notebook_ends_all(pair: Notebooks, stopping: int) -> None:
    cells = pair.launch("meet, -1, 600.0", "num_processes=1", "num_processes=2", rdzv_conf=SECRET, block=False)
    pair.finish(cells)
    pair.wait_until_all_print(cells, "sum 3.0", [3, 2])
    pids = [pid for kernel in pair.kernels for pid in rank_pids(kernel)]
    pair.kernels[stopping].check("run.stop()", LIMIT)
    other = 1 - stopping
    assert pair.kernels[other].value("run.wait(100)", LIMIT)
    wait_gone(list(set(pids)), LIMIT)
    assert pair.values("run.status") == ["stopped", "stopped"]
    assert pair.values("type(run.error).__name__") == ["RunStoppedError", "RunStoppedError"]
    shown = f"node {stopping} ({HOST}): it was stopped"
    assert shown in pair.values("str(run.error)")[other]
    pair.kernels[other].wait_for(lambda: shown in cells[other].stdout, LIMIT, shown)


def test_a_stop_while_the_ranks_of_another_notebook_start(pair: Notebooks) -> None:
    server = "__import__('notebook_accelerate.launch.processes.zygote', fromlist=['zygote'])._zygote"
    first, second = pair.kernels
    second.check("launch(time.sleep, 0.1, start_method='zygote')", LIMIT)
    second.check(f"os.kill({server}.pid, signal.SIGSTOP)")  # The suspended zygote is replaced after five seconds.
    options = f"num_processes=1, num_nodes=2, use_port={free_port()}, rdzv_conf={SECRET}, start_method="
    begun = first.submit(f"launch(meet, -1, 600.0, {options}'fork')")
    joined = second.submit(f"launch(meet, -1, 600.0, node_rank=1, {options}'zygote')")
    second.wait_for(lambda: "all 2 nodes have joined" in joined.stdout, LIMIT)
    second.interrupt()
    assert "KeyboardInterrupt: run" in said(second.finish(joined, LIMIT))
    shown = said(first.finish(begun, LIMIT))
    assert f"RunStoppedError: node 1 ({HOST}): it was stopped while its ranks were starting" in shown
    assert pair.values("notebook_accelerate.runs()[-1].status") == ["stopped", "stopped"]


def test_times_in_a_joined_notebook_follow_its_local_clock(pair: Notebooks) -> None:
    second = pair.kernels[1]
    second.check(
        "from notebook_accelerate.telemetry import steady_time\n"
        "follow, steady_time.set_to_system_time = steady_time.set_to_system_time, lambda: None\n"
        "steady_time.set_offset(steady_time.offset() + 3600)"
    )
    try:
        for cell in pair.finish(pair.launch("meet, 1", *["num_processes=1"] * 2, rdzv_conf=SECRET)):
            assert "KeyError" in said(cell)
        second.check("run = notebook_accelerate.runs()[-1]")
        times = second.value(
            "[run.started, run.attempts[0].started, run.failures[0].time, run.attempts[0].ended, run.ended]", LIMIT
        )
        events = second.value("[record.time for record in run._internals.journal.records]", LIMIT)
    finally:
        second.check("steady_time.set_to_system_time = follow\nsteady_time.set_to_system_time()")
    rounding = 0.1
    for earlier, later in [*itertools.pairwise(times), *itertools.pairwise(events)]:
        assert earlier < later + rounding, (times, events)
    assert times[-1] - times[0] < LIMIT


def test_the_stop_button_works_while_waiting(pair: Notebooks) -> None:
    (cell,) = pair.launch("meet", "num_processes=1", num_nodes=2, rdzv_conf=SECRET)
    kernel = pair.kernels[0]
    kernel.wait_for(lambda: "1 of 2 nodes have joined; waiting for node 1" in cell.stdout, LIMIT)
    kernel.interrupt()
    kernel.finish(cell, LIMIT)
    assert cell.error is not None
    assert cell.error.ename == "RunInterrupted" or "KeyboardInterrupt" in said(cell)
    assert kernel.value("notebook_accelerate.runs()[-1].status") == "stopped"


def test_all_notebooks_restart_together(pair: Notebooks) -> None:
    for kernel in pair.kernels:
        kernel.check("def again():\n    return meet(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else -1)")
    cells = pair.finish(pair.launch("again", "num_processes=1", "num_processes=1", max_restarts=1, rdzv_conf=SECRET))
    for cell in cells:
        cell.expect_ok()
        assert "attempt 1 failed (rank 1: KeyError: 'bad batch'" in cell.stderr
    assert pair.values("run.results") == [[1.0, 1.0], [1.0]]
    assert pair.values("len(run.attempts)") == [2, 2]


def test_a_lost_notebook_stops_the_others(pair: Notebooks) -> None:
    with notebooks(1) as victim:
        three = Notebooks([*pair.kernels, *victim.kernels])
        cells = three.launch("meet, -1, 600.0", *["num_processes=1"] * 3, rdzv_conf=SECRET)
        three.wait_until_all_print(cells, "sum 3.0", [3, 1, 1])
        os.kill(victim.kernels[0].pid, 9)
        for kernel, cell in zip(pair.kernels, cells, strict=False):
            kernel.finish(cell, LIMIT)
            assert f"node 2 ({HOST}) was lost: " in said(cell)
            assert "WorkerDiedError" in said(cell)


def test_the_other_notebooks_end_if_the_first_notebook_is_lost(pair: Notebooks) -> None:
    with notebooks(1) as victim:
        left = Notebooks(pair.kernels[1:])
        two = Notebooks([*victim.kernels, *left.kernels])
        for kernel in two.kernels:
            kernel.check(
                "def unfinished():\n    group()\n    dist.barrier()\n"
                "    print('begun\\nunfinished', end='', flush=True)\n    time.sleep(600)"
            )
        cells = two.launch("unfinished", "num_processes=1", "num_processes=1", rdzv_conf=SECRET)
        two.wait_until_all_print(cells, "begun", [2, 1])
        os.kill(victim.kernels[0].pid, 9)
        left.finish(cells[1:])
        assert f"node 0 ({HOST}) was lost" in said(cells[1])
        assert "unfinished" in cells[1].stdout


TRAIN = """
from notebook_accelerate import Accelerator
from notebook_accelerate.utils import ProjectConfiguration, set_seed

class Progress:
    def __init__(self): self.step, self.losses = 0, []
    def state_dict(self): return {"step": self.step, "losses": self.losses}
    def load_state_dict(self, state): self.step, self.losses = state["step"], state["losses"]

def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, 4, generator=generator) for _ in range(8)]

def train(folder, pause):
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=naming, cpu=True)
    set_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        accelerator.load_state(elastic=True)
    for batch in data()[progress.step:]:
        share = batch.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(share).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_state()
        print("step", progress.step, "of", accelerator.num_processes, flush=True)
        if progress.step == 4 and accelerator.num_processes == 3:
            time.sleep(pause)
    return progress.losses
"""
PLAIN = """
torch.manual_seed(7)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
expected = []
for batch in data():
    loss = model(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    expected.append(loss.item())
"""


def test_the_remaining_notebooks_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    # Use separate kernels, because an optimizer sets TORCHINDUCTOR_CACHE_DIR in them.
    with notebooks(2) as found, notebooks(1) as victim:
        three = Notebooks([*found.kernels, *victim.kernels])
        for kernel in three.kernels:
            kernel.check(WARM_OPTIMIZER, LIMIT)
            kernel.check(TRAIN, LIMIT)
        port = free_port()
        options = (
            f"num_nodes=3, num_processes=1, use_port={port}, rdzv_backend='c10d', min_nodes=2, max_restarts=1, "
            f"rdzv_conf={{'secret': 'hush', 'last_call_timeout': 100}}"
        )
        call = f"run = launch(train, {str(tmp_path)!r}, 600.0, {options})"
        begun = [found.kernels[0].submit(call)]
        # The first notebook hosts the store.
        found.kernels[0].wait_for(lambda: "1 of 3 nodes" in begun[0].stdout, LIMIT)
        begun += [kernel.submit(call) for kernel in three.kernels[1:]]
        three.wait_until_all_print(begun, "step 4 of 3", [3, 1, 1])
        os.kill(victim.kernels[0].pid, 9)
        found.finish(begun[:2])
        for cell in begun[:2]:
            cell.expect_ok()
            assert re.search(r"was lost: .*\); starting again", cell.stderr)
            assert "step 5 of 2" in cell.stdout
            assert "step 4 of 2" not in cell.stdout
        found.kernels[0].check(PLAIN, LIMIT)
        expected = found.kernels[0].value("expected")
        results = found.values("run.results")
        assert [len(each) for each in results] == [2, 1]
        for losses in results[0] + results[1]:
            assert losses == pytest.approx(expected, rel=1e-5)
        assert found.values("run.plan.world_size") == [2, 2]
