"""Cells on warm ranks: %%ranks, %%rank, %rank_status, %rank_restart, %rank_stop."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.notebook.conftest import Answers
from tests.support.kernel import Cell, Kernel
from tests.support.launching import alive, children, open_gate, patient, said

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.leaks_ok("warm ranks are shared by all tests; the last test ends them and checks that nothing is left"),
]

PIDS = "[info.pid for info in notebook_accelerate.runs()[-1].ranks]"


@pytest.fixture(scope="module", autouse=True)
def _loaded(kernel: Kernel) -> None:
    kernel.check("%load_ext notebook_accelerate")


@pytest.fixture(autouse=True)
def warm(kernel: Kernel, answers: Answers) -> None:
    """Start two warm ranks that all tests share, unless they are still running from an earlier test."""
    answers.waiting.clear()
    answers.asked.clear()
    kernel.check("%%ranks -n 2\nimport time, torch, torch.distributed as dist")


def lines(cell: Cell) -> list[str]:
    """Return the lines that a cell printed, sorted because the ranks print at the same time."""
    return sorted(cell.stdout.splitlines())


def test_variables_persist_and_the_process_group_stays_open(kernel: Kernel) -> None:
    kernel.check("%%ranks\nx = torch.ones(2) * (rank + 1)\ndist.all_reduce(x)")
    cell = kernel.check("%%ranks\nprint('of', world_size)\nx")
    assert lines(cell) == ["[rank 0] of 2", "[rank 0] tensor([3., 3.])", "[rank 1] of 2", "[rank 1] tensor([3., 3.])"]


def test_a_cell_can_run_on_selected_ranks(kernel: Kernel) -> None:
    assert lines(kernel.check("%%rank 1\nonly = 5\nonly")) == ["[rank 1] 5"]
    assert lines(kernel.check("%%rank 0,1\n'only' in globals()")) == ["[rank 0] False", "[rank 1] True"]
    assert "ranks=[7] are not ranks of this group; its ranks are [0, 1]" in said(kernel.run("%%rank 7\n1"))
    assert "is not a list of ranks; write %%rank 0,1" in said(kernel.run("%%rank one\n1"))


def test_variables_can_be_sent_and_fetched(kernel: Kernel) -> None:
    kernel.check("a, b = torch.arange(3.0), 'text'")
    kernel.check("%%ranks -i a,b -o c,d\nc = a * (rank + 1)\nd = b + str(rank)")
    assert kernel.value("[[t.tolist() for t in c], d]") == [[[0.0, 1.0, 2.0], [0.0, 2.0, 4.0]], ["text0", "text1"]]
    assert kernel.check("%%rank 1 -o e\ne = rank * 10").ok
    assert kernel.value("e") == [10]
    assert "-i nothing: no such variable in the kernel" in said(kernel.run("%%ranks -i nothing\n1"))
    invalid = "not valid variable names: a-b, 1c; separate the names with commas, such as a,b; usage: "
    assert f"argument -i/--input: {invalid}%%ranks" in said(kernel.run("%%ranks -i a-b,1c\n1"))
    assert f"argument -o/--output: {invalid}%%rank" in said(kernel.run("%%rank 1 -o a-b,1c\n1"))
    assert "NameError" in said(kernel.run("%%ranks -o missing\n1")) or "KeyError" in said(
        kernel.run("%%ranks -o missing\n1")
    )


def test_output_is_live_and_labelled(kernel: Kernel) -> None:
    wait = "import os\nwhile not os.path.exists('live'):\n    time.sleep(0.02)"
    cell = kernel.submit(f"%%ranks\nprint('early')\n{wait}\nprint('late')")
    kernel.wait_for(lambda: cell.stdout.count("early") == 2)
    assert not cell.finished
    open_gate(kernel, "live")
    kernel.finish(cell)
    assert lines(cell) == ["[rank 0] early", "[rank 0] late", "[rank 1] early", "[rank 1] late"]


def test_an_error_names_the_rank_and_the_line_and_the_ranks_survive(kernel: Kernel) -> None:
    kernel.check("%%ranks\nkept = rank + 10")
    text = said(kernel.run("%%ranks\nif rank == 1:\n    {}['missing']\nkept"))
    assert re.search(r"rank 1 failed:\n  Cell In\[\d+\], line 3", text)
    assert "KeyError: 'missing'" in text
    assert "cells.py" not in text
    assert lines(kernel.check("%%ranks\nkept")) == ["[rank 0] 10", "[rank 1] 11"]
    assert "SyntaxError" in said(kernel.run("%%ranks\nx ="))


def test_a_syntax_error_is_reported_at_its_line_of_the_cell(kernel: Kernel) -> None:
    cell = kernel.run("%%ranks\nvalue = 1\nif value:\nvalue = 2")
    number = kernel.value("get_ipython().execution_count") - 1
    assert (
        f"Cell In[{number}], line 4, in <module>\n    value = 2\nIndentationError: expected" in said(cell) + cell.stderr
    )
    assert f"at Cell In[{number}], line 4" in said(cell)
    assert ".py" not in said(cell)


def test_an_interrupt_stops_the_cell_and_the_ranks_survive(kernel: Kernel) -> None:
    kernel.check("%%ranks\nkept = rank")
    pids = kernel.value(PIDS)
    with patient(kernel, warm=True):
        cell = kernel.submit("%%ranks\nprint('in')\ntime.sleep(600)")
        kernel.wait_for(lambda: cell.stdout.count("in") == 2)
        kernel.interrupt()
        kernel.finish(cell)
    assert "the cell was interrupted on its ranks; the ranks keep running" in said(cell)
    assert kernel.value(PIDS) == pids
    assert lines(kernel.check("%%ranks\nkept")) == ["[rank 0] 0", "[rank 1] 1"]


def test_a_cell_that_cannot_be_interrupted_ends_the_group_with_an_explanation(kernel: Kernel) -> None:
    pids = kernel.value(PIDS)
    cell = kernel.submit(
        "%%ranks\nimport ctypes\nlock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)\n"
        "print('in', flush=True)\nif rank == 1:\n"
        "    library.pthread_mutex_lock(lock)\n    library.pthread_mutex_lock(lock)"
    )
    kernel.wait_for(lambda: cell.stdout.count("in") == 2)
    _wait_until_stuck(kernel, pids[1])
    kernel.interrupt()
    kernel.finish(cell)
    assert "rank 1 could not be interrupted: the warm ranks were ended" in said(cell)
    assert alive(pids) == []
    assert children(kernel) == []
    assert "start new ones: %%ranks" in kernel.check("%rank_status").stdout


def _wait_until_stuck(kernel: Kernel, pid: int) -> None:
    """Wait until a process's main thread sleeps and does not even wake up to poll."""
    main = psutil.Process(pid)
    looks: list[object] = []

    def stuck() -> bool:
        kernel.pump(0.2)
        looks.append((main.status(), main.num_ctx_switches()))
        return main.status() == psutil.STATUS_SLEEPING and len(looks) >= 5 and len(set(looks[-5:])) == 1

    kernel.wait_for(stuck)


def test_a_rank_that_dies_ends_the_group_with_an_explanation(kernel: Kernel) -> None:
    text = said(kernel.run("%%ranks\nimport os\nif rank == 1:\n    os._exit(3)\ntime.sleep(600)"))
    assert "rank 1" in text
    assert "exit status 3" in text


def test_ranks_can_ask_for_input(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["blue"]
    cell = kernel.check("%%rank 1\ncolour = input('colour? ')\ncolour * 2")
    assert answers.asked == ["[rank 1] colour? "]
    assert lines(cell) == ["[rank 1] 'blueblue'"]


def test_a_breakpoint_in_a_cell_prompts(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["p value", "c"]
    cell = kernel.check("%%ranks\nvalue = rank + 40\nif rank == 1:\n    breakpoint()\ndist.barrier()")
    assert answers.asked == ["[rank 1] ipdb> "] * 2
    assert "[rank 1] 41" in cell.stdout
    assert "run.debug" not in cell.stderr


def test_long_cells_run(kernel: Kernel) -> None:
    body = "\n".join(f"value_{number} = {number}  # {'x' * 60}" for number in range(5000))
    assert len(body) > 300_000
    cell = kernel.check(f"%%ranks\n{body}\nvalue_4999")
    assert lines(cell) == ["[rank 0] 4999", "[rank 1] 4999"]


def test_300_kilobytes_on_stderr_arrive(kernel: Kernel) -> None:
    cell = kernel.check("%%ranks\nimport sys\nfor _ in range(3000):\n    sys.stderr.write('e' * 99 + '\\n')\n'done'")
    assert lines(cell) == ["[rank 0] 'done'", "[rank 1] 'done'"]
    run = "notebook_accelerate.runs()[-1]"
    for number in range(2):
        written = kernel.value(f"sum(len(line) + 1 for line in {run}.logs(rank={number}) if line.startswith('eee'))")
        assert written == 300_000


def test_a_semicolon_and_a_statement_show_no_value(kernel: Kernel) -> None:
    assert kernel.check("%%ranks\n1 + 1;").stdout == ""
    assert kernel.check("%%ranks\nx = 1").stdout == ""


def test_status_restart_and_stop_work(kernel: Kernel) -> None:
    pids = kernel.value(PIDS)
    status = kernel.check("%rank_status").stdout
    assert all(f"pid {pid}, running" in status for pid in pids)
    assert "-n 3: 2 warm ranks are running; end them first: %rank_stop" in said(kernel.run("%%ranks -n 3\n1"))
    kernel.check("%%ranks\nkept = 1")
    kernel.check("%rank_restart")
    assert alive(pids) == []
    assert "NameError" in said(kernel.run("%%ranks\nkept"))
    kernel.check("%rank_stop")
    assert children(kernel) == []
    assert "no warm ranks; start some: %%ranks -n 2" in kernel.check("%rank_status").stdout
    assert "there are no warm ranks; start some: %%ranks -n 2" in said(kernel.run("%%rank 1\n1"))
    assert "unrecognized arguments: --wrong" in said(kernel.run("%%ranks --wrong\n1"))
