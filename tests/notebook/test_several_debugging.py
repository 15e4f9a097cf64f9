"""A run of several notebooks is debugged entirely from the first one."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator

import pytest

from notebook_accelerate import attach
from tests.support.detached import disconnect_all
from tests.support.kernel import Cell
from tests.support.launching import children, patient, said
from tests.support.notebooks import LIMIT, Notebooks
from tests.support.ports import free_port

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]
HOST = platform.node()
SECRET = {"secret": "hush"}
ONE_EACH = ("num_processes=1", "num_processes=1")
RUN = "notebook_accelerate.runs()[-1]"
STANDS = f"{RUN}._internals.commands.clock.suspended"
HANG = 20.0
FUNCTIONS = """
def stops(*who):
    group()
    value = 40 + rank()
    dist.barrier()
    for each in who:
        if rank() == each:
            breakpoint()
            value += 1
        dist.barrier()
    return value

def fails(who):
    group()
    value = 40 + rank()
    dist.barrier()
    if rank() == who:
        raise KeyError("bad batch")
    dist.barrier()

def skips():
    group()
    dist.barrier()
    nothing, room = os.pipe()[0], ctypes.create_string_buffer(1)
    if rank() == 1:
        ctypes.PyDLL(None).read(nothing, room, 1)  # holds the interpreter
    dist.barrier()
"""


@pytest.fixture(scope="module")
def pair(two_notebooks: Notebooks) -> Notebooks:
    """Return two kernels with the functions defined."""
    for kernel in two_notebooks.kernels:
        kernel.check(FUNCTIONS, LIMIT)
        kernel.check("%load_ext notebook_accelerate", LIMIT)
    return two_notebooks


@pytest.fixture(autouse=True)
def nothing_left(pair: Notebooks) -> Iterator[None]:
    """Check that no test changes what `look()` returns in the kernels, or leaves child processes."""
    before = pair.values("look()")
    yield
    for kernel in pair.kernels:
        kernel.answer = None
    assert pair.changed(before) == [{}, {}]
    assert [children(kernel) for kernel in pair.kernels] == [[], []]
    assert pair.values("[n for n in __import__('linecache').cache if ' of node ' in n]") == [[], []]


def shows(pair: Notebooks, index: int, cell: Cell, text: str) -> None:
    """Wait until a notebook's cell shows ``text``."""
    shown: Callable[[], bool] = lambda: text in cell.plain  # noqa: E731 - typed
    pair.kernels[index].wait_for(shown, LIMIT, text)


def test_breakpoints_are_answered_in_the_first_notebook_and_suspend_the_clock(pair: Notebooks) -> None:
    first = pair.kernels[0]
    cells = pair.finish(pair.launch("stops, 0, 1", *ONE_EACH, block=False, hang_timeout=HANG, rdzv_conf=SECRET))
    for rank in (0, 1):
        shows(
            pair,
            0,
            cells[0],
            f"rank {rank} is stopped at a breakpoint; notebook_accelerate.debug(rank={rank}) opens it",
        )
        first.until(STANDS, LIMIT)
        if rank == 0:
            time.sleep(HANG + 3)
            assert pair.values("run.status") == ["running", "running"]
        else:
            shows(pair, 1, cells[1], "rank 1 waits for its debugger in the first notebook")
            assert "is controlled by the notebook of node 0" in said(pair.kernels[1].run("run.debug()", LIMIT))
        prompts = first.types("p value", "c")
        assert f"[rank {rank}] {40 + rank}" in first.check("run.debug()", LIMIT).plain
        assert len(prompts) == 2
    for kernel in pair.kernels:
        assert kernel.value("run.wait(100)", LIMIT)
    assert pair.values("run.results") == [[41, 42], [42]]
    assert pair.values(STANDS) == [False, False]


def test_the_first_notebook_answers_a_breakpoint_of_another_notebooks_rank(pair: Notebooks) -> None:
    first, second = pair.kernels
    cells = pair.finish(pair.launch("stops, 1", *ONE_EACH, block=False, rdzv_conf=SECRET))
    shows(pair, 0, cells[0], "rank 1 is stopped at a breakpoint; notebook_accelerate.debug(rank=1) opens it")
    assert first.check("run.debug_command('p value', ranks=[1], timeout=100)", LIMIT).result_text == "rank 1 │ 41"
    first.types("w", "c")
    shown = first.check("run.debug(rank=1)", LIMIT).plain
    assert re.search(r"Cell In\[\d+\] of node 1", shown), shown
    for kernel in (first, second):
        assert kernel.value("run.wait(100)", LIMIT)
        assert kernel.value("len(run._internals.commands.prompts.open_prompts())") == 0
    assert pair.values("run.results") == [[40, 42], [42]]


def test_a_rank_of_another_notebook_asks_for_input_in_the_first(pair: Notebooks) -> None:
    first, second = pair.kernels
    for kernel in pair.kernels:
        kernel.check(
            "def asks():\n    group()\n    name = input('who? ') if rank() else ''\n    dist.barrier()\n    return name"
        )
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        shows(pair, 1, cells[1], "rank 1 waits for a line of input in the first notebook")
        prompts.append(prompt)
        return "Ada"

    first.answer = answer
    cells = pair.launch("asks", *ONE_EACH, rdzv_conf=SECRET)
    first.finish(cells[0], LIMIT).expect_ok()
    second.finish(cells[1], LIMIT).expect_ok()
    assert pair.values("run.results") == [["", "Ada"], ["Ada"]]
    assert prompts == ["[rank 1] who? "]
    cells = pair.finish(pair.launch("asks", *ONE_EACH, rdzv_conf=SECRET, block=False))
    shows(pair, 0, cells[0], "rank 1 waits for input; run.wait() asks you for it")
    first.types("Bea")
    first.check("run.debug(rank=1)", LIMIT)
    pair.wait_until_all("run.ended is not None")
    assert pair.values("run.results") == [["", "Bea"], ["Bea"]]


@pytest.mark.parametrize("failing", [1, 0])
def test_a_failure_holds_the_ranks_of_all_notebooks(pair: Notebooks, failing: int) -> None:
    notified = [f"{each}, notify=(messages := []).append" for each in ONE_EACH]
    cells = pair.finish(
        pair.launch(f"fails, {failing}", *notified, hold_on_error=True, hang_timeout=HANG, rdzv_conf=SECRET)
    )
    for cell in cells:
        assert f"rank {failing} failed" in said(cell)
        assert 'raise KeyError("bad batch")' in said(cell)
    assert pair.values(f"{RUN}.status") == ["failed", "failed"]
    first, second = pair.kernels
    first.until("[each['event'] for each in messages] == ['failed']", LIMIT)
    assert f"rank {failing}: KeyError" in first.value("messages[0]['text']")
    assert second.value("messages") == [], "the first notebook sends the messages of all ranks"
    assert first.value(f"{RUN}.ask('value', ranks=[1], timeout=60)[1]", LIMIT) == 41
    if failing:  # Until the user quits, the first notebook shows the debugger of the other notebook's rank.
        first.types("p value", "q")
        assert "[rank 1] 41" in first.check(f"{RUN}.debug()", LIMIT).plain
    else:
        assert first.value(f"{RUN}.ask('value', timeout=60)[0]", LIMIT) == 40
        second.check(f"{RUN}.stop()", LIMIT)
    for kernel in pair.kernels:
        kernel.until(f"not {RUN}.held", LIMIT)
    assert pair.values(f"{RUN}.status") == ["failed", "failed"]


def test_a_diagnosis_names_the_lines_of_another_notebooks_cells(pair: Notebooks) -> None:
    pair.finish(pair.launch("skips", *ONE_EACH, block=False, rdzv_conf=SECRET))
    first = pair.kernels[0]
    line = re.escape("ctypes.PyDLL(None).read(nothing, room, 1)  # holds the interpreter")
    named = (
        rf"rank 1: Cell In\[\d+\] of node 1, line \d+, in skips: {line}",
        r"rank 0: Cell In\[\d+\], line \d+, in skips: dist\.barrier\(\); has waited",
    )
    text, deadline = "", time.monotonic() + LIMIT
    while not all(re.search(pattern, text) for pattern in named):
        assert time.monotonic() < deadline, text
        text = first.value("run.diagnose().text", LIMIT)
    # Other processes of the user reach the ranks of all machines through the first notebook.
    attached = attach(first.value("f'{run.name}@{os.getpid()}'", LIMIT))
    assert [rank.state for rank in attached.ranks] == ["running", "running"]
    assert re.search(r"rank 1: .*in skips", attached.diagnose().text)
    disconnect_all()
    first.check("run.stop(grace=1.0)", LIMIT)
    assert pair.kernels[1].value("run.wait(100)", LIMIT)


def test_warm_ranks_span_two_notebooks(pair: Notebooks) -> None:
    first, second = pair.kernels
    config = f"LaunchConfig(num_processes=1, num_nodes=2, use_port={free_port()}, rdzv_conf={SECRET})"
    for kernel in pair.kernels:
        kernel.check(f"from notebook_accelerate import LaunchConfig\nconfig = {config}\nmine = 5", LIMIT)
    summing = "import torch, torch.distributed as dist\nx = torch.tensor([rank + mine])\ndist.all_reduce(x)\nx.item()"
    begun = first.submit(f"%%ranks -c config -i mine\n{summing}")
    started = second.submit("%rank_start -c config --node-rank 1")
    for kernel, cell in ((first, begun), (second, started)):
        kernel.finish(cell, LIMIT).expect_ok()
    assert "%rank_start -c config --node-rank 1" in begun.stdout
    assert "[rank 0] 11\n[rank 1] 11\n" in begun.stdout
    failed = first.run("%%ranks -o there\nthere = 1 / (1 - rank)", LIMIT)
    assert "rank 1 failed:" in said(failed)
    assert "there = 1 / (1 - rank)" in said(failed)
    prompts = first.types("p there", "c", "Ada")
    asked = first.check("%%rank 1\nthere = 7\nbreakpoint()\nname = input('who? ')\nname", LIMIT)
    assert "[rank 1] 7" in asked.plain
    assert "[rank 1] 'Ada'" in asked.plain
    assert prompts[2] == "[rank 1] who? "
    first.answer = None
    assert "is controlled by the notebook of node 0" in said(second.run("%%rank 1\nthere", LIMIT))
    assert "[rank 1] 8" in first.check("%%rank 1\nthere + 1", LIMIT).stdout
    with patient(first, warm=True):
        endless = first.submit("%%ranks\nimport time\nprint('on', rank)\ntime.sleep(600)")
        first.wait_for(lambda: all(f"on {rank}" in endless.stdout for rank in (0, 1)), LIMIT)
        first.interrupt()
        assert "the ranks keep running" in said(first.finish(endless, LIMIT))
    assert "[rank 1] 'Ada'" in first.check("%%rank 1\nname", LIMIT).stdout
    first.check("%rank_stop", LIMIT)
    second.until(f"{RUN}.ended is not None", LIMIT)
    assert "the warm ranks have ended" in second.check("%rank_status", LIMIT).stdout
    second.check("%rank_stop", LIMIT)


def test_a_late_notebook_is_included_at_a_restart(pair: Notebooks) -> None:
    grows = """
def grows():
    group()
    size = int(os.environ["WORLD_SIZE"])
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "with", size, flush=True)
    if size == 2:
        time.sleep(600.0)
    dist.barrier()
    return size
"""
    conf = {**SECRET, "last_call_timeout": 5}
    options = {"num_nodes": 3, "use_port": free_port(), "min_nodes": 2, "rdzv_backend": "c10d", "max_restarts": 9}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    call = f"launch(grows, num_processes=1, {given}, rdzv_conf={conf}, block=False)"
    for kernel in pair.kernels:
        kernel.check(grows, LIMIT)
    cells = pair.finish(pair.submit(f"run = {call}", f"run = {call}"))
    for index, cell in enumerate(cells):
        shows(pair, index, cell, "attempt 0 with 2")
    second = pair.kernels[1]
    late = second.check(f"late = {call}", LIMIT)
    for kernel, name in ((pair.kernels[0], "run"), (second, "run"), (second, "late")):
        assert kernel.value(f"{name}.wait(150)", LIMIT + 50)
        assert kernel.value(f"{name}.status == 'succeeded' or str({name}.error)") is True
        assert set(kernel.value(f"{name}.results")) == {3}
    who = f"{HOST} (kernel {second.pid})"
    assert "the run started without this node, with 2 of 3: " in late.plain
    for index, cell in enumerate(cells):
        shows(pair, index, cell, f"attempt 1 ended (a late node joins, {who}: all nodes restart to include it)")
    assert second.value("late.attempts[0].number") > 0


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_a_late_notebook_receives_the_members_of_the_run(pair: Notebooks, num_nodes: int) -> None:
    conf = {**SECRET, "last_call_timeout": 1}
    options = {"num_nodes": num_nodes, "use_port": free_port(), "min_nodes": 2, "rdzv_backend": "c10d"}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    call = f"launch(meet, -1, 600.0, num_processes=1, {given}, rdzv_conf={conf}, block=False)"
    cells = pair.finish(pair.submit(f"run = {call}", f"run = {call}"))
    for index, cell in enumerate(cells):
        shows(pair, index, cell, "sum 1.0")
    second = pair.kernels[1]
    second.check(f"late = {call}", LIMIT)
    assert second.value("late.wait(100)", LIMIT)
    text = second.value("str(late.error)")
    how = "the run already has its 2 nodes: " if num_nodes == 2 else "started without this node, with 2 of 3: "
    assert how in text
    assert all(f"{HOST} (kernel {kernel.pid})" in text for kernel in pair.kernels)
    assert pair.values("run.status") == ["running", "running"]
    second.check("run.stop()", LIMIT)
    assert pair.kernels[0].value("run.wait(100)", LIMIT)
