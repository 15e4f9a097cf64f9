"""A run in a notebook can be awaited and shown, is stopped with the kernel, and leaves the kernel's state unchanged."""

from __future__ import annotations

import re
import time

import pytest

from tests.support import pages
from tests.support.kernel import Kernel
from tests.support.launching import alive, children, ready_kernel, said

pytestmark = pytest.mark.notebook


def test_top_level_await_works(kernel: Kernel) -> None:
    cell = kernel.check("run = launch(lambda: (time.sleep(0.2), rank())[1], block=False)\nawait run\nrun.results")
    assert cell.result_text == "(0, 1)"


def test_awaiting_a_failed_run_shows_the_cell_lines(kernel: Kernel) -> None:
    kernel.check("def fail():\n    raise KeyError('awaited')")
    text = said(kernel.run("await launch(fail, block=False)"))
    assert "KeyError: 'awaited'" in text
    assert re.search(r"Cell In\[\d+\], line 2, in fail", text)
    assert "run.py" not in text


def test_interrupting_an_await_stops_the_run(kernel: Kernel) -> None:
    cell = kernel.submit("run = launch(lambda: (print('in', flush=True), time.sleep(600)), block=False)\nawait run")
    kernel.wait_for(lambda: cell.stdout.count("] in") == 2)
    kernel.interrupt()
    kernel.finish(cell)
    assert "KeyboardInterrupt" in said(cell) or "Cancelled" in said(cell)
    kernel.check("last = notebook_accelerate.runs()[-1]")  # The interrupt may hit the launch itself.
    assert kernel.value("(last.wait(100), last.status)") == [True, "stopped"]


def test_callbacks_and_waits_work_in_later_cells(kernel: Kernel) -> None:
    kernel.check("heard = []\nrun = launch(lambda: time.sleep(0.3), block=False)\nrun.add_done_callback(heard.append)")
    assert kernel.check("run.wait(), run.status").result_text == "(True, 'succeeded')"
    kernel.wait_for(lambda: kernel.check("heard == [run]").result_text == "True")


def test_a_run_is_shown_in_several_formats(kernel: Kernel) -> None:
    launched = kernel.check("shown = launch(rank)\nshown")
    assert launched.result is not None
    assert "succeeded" in launched.result["text/plain"]
    assert "text/html" not in launched.result  # The panel above already shows the run.
    again = kernel.check("shown").result
    assert again is not None
    assert "<table" in again["text/html"]


def test_a_failed_cell_shows_no_frame_of_the_supervisor(kernel: Kernel) -> None:
    kernel.check("def fail():\n    raise ValueError('mine')")
    text = said(kernel.run("launch(fail)"))
    for name in ("supervisor", "starting.py", "launchers.py", "worker.py", "run.py"):
        assert name not in text
    inline = said(kernel.run("launch(fail, num_processes=1)"))
    assert "ValueError: mine" in inline
    assert "inline.py" not in inline
    caught = kernel.check(
        "try:\n    launch(fail)\nexcept notebook_accelerate.WorkerError as error:\n"
        "    print(type(error.__cause__).__name__, error.run.status, error.rank in (0, 1))"
    )
    assert caught.stdout.splitlines()[-1] == "ValueError failed True"


def test_a_launch_leaves_nothing_in_the_kernel(kernel: Kernel) -> None:
    look = (
        "[dict(os.environ), os.getcwd(), sorted(t.name for t in threading.enumerate()), os.getpgid(0),"
        " str(signal.getsignal(2)), str(signal.getsignal(15)), signal.pthread_sigmask(0, []) == set(),"
        " torch.get_num_threads(), sys.path, list(__import__('warnings').filters).__len__()]"
    )
    kernel.check("launch(time.sleep, 1.0, panel=True)")  # Panels import modules and start threads that remain.
    kernel.check("launch(rank)")
    kernel.check("join_runs()")
    before = kernel.value(look)
    kernel.check("launch(rank, env={'A': 'b'}, start_method='fork', mixed_precision='bf16')")
    kernel.check("launch(rank, env={'A': 'b'}, start_method='zygote')")
    kernel.run("launch(lambda: 1 / 0)")
    deadline = time.monotonic() + 60
    while (after := kernel.value(look)) != before and time.monotonic() < deadline:
        kernel.pump(0.2)  # An ended thread may remain visible for a moment.
    assert after == before
    assert children(kernel) == []


def test_runs_lists_all_runs_and_shutdown_ends_them() -> None:
    with ready_kernel() as kernel:
        kernel.check("run = launch(lambda: time.sleep(600), block=False)")
        pids = [child.pid for child in kernel.process.children(recursive=True)]
        assert len(pids) == 4, "these are the zygote, two ranks and the orphan guard"
        assert kernel.value("[r.status for r in notebook_accelerate.runs()][-1]") in ("starting", "running")
        kernel.check("notebook_accelerate.shutdown()")
        assert alive(pids) == []
        assert kernel.process.children(recursive=True) == []
        assert kernel.value("run.status") == "stopped"
        assert kernel.check("launch(rank, start_method='zygote').results").result_text == "(0, 1)"


def test_the_zygote_has_the_current_state_of_the_kernel(kernel: Kernel) -> None:
    cell = kernel.check(
        "import tempfile\nfolder = os.path.realpath(tempfile.mkdtemp()); old = os.getcwd(); os.chdir(folder)\n"
        "open('fresh.py', 'w').write('VALUE = 7'); sys.path.insert(0, folder); os.environ['NOW'] = 'yes'\n"
        "def look():\n    import fresh\n    return os.getcwd() == folder, fresh.VALUE, os.environ['NOW']\n"
        "try:\n    results = launch(look, start_method='zygote').results\n"
        "finally:\n    os.chdir(old); sys.path.remove(folder); del os.environ['NOW']\nresults"
    )
    assert cell.result_text == "((True, 7, 'yes'), (True, 7, 'yes'))"


def test_all_start_methods_give_the_same_random_numbers(kernel: Kernel) -> None:
    kernel.check(
        "import random, numpy as np\ndef draw():\n"
        "    return random.random(), float(np.random.rand()), torch.rand(1).item()\n"
        "random.seed(1); np.random.seed(1); torch.manual_seed(1)"
    )
    kernel.check("drawn = [launch(draw, start_method=m).results for m in ('fork', 'zygote', 'spawn')]")
    assert kernel.check("set(sum(drawn, ())) == {draw()}").result_text == "True"


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_ranks_of_an_unseeded_kernel_draw_different_numbers_in_every_launch(method: str) -> None:
    with Kernel() as kernel:
        kernel.check(
            "import random, numpy as np, torch\nfrom notebook_accelerate import notebook_launcher\n"
            "random.random(), np.random.rand(), torch.rand(1)\ndef draw():\n"
            "    return random.random(), float(np.random.rand()), torch.rand(1).item()\n"
            f"options = dict(num_processes=2, use_port=0, start_method={method!r})"
        )
        kernel.check("rows = [row for _ in range(2) for row in notebook_launcher(draw, **options).results]")
        assert kernel.value("[len(set(numbers)) for numbers in zip(*rows)]") == [4, 4, 4]


@pytest.mark.parametrize("seed", ["", "torch.manual_seed(0)"], ids=["unseeded", "seeded"])
def test_the_first_cell_of_the_readme_warns_only_if_the_ranks_have_one_seed(seed: str) -> None:
    with Kernel() as kernel:
        kernel.check(f"import torch; {seed}")
        cell = kernel.check(pages.first_cell())
        warnings = kernel.value("run.warnings")
    assert [re.sub(r"^.*; for random data: ", "", text) for text in warnings] == (
        ["set_seed(42, device_specific=True) gives each rank its own"] if seed else []
    )
    assert ("⚠" in cell.stderr) == bool(seed)


def test_tensors_sent_to_a_zygote_rank_are_copies(kernel: Kernel) -> None:
    cell = kernel.check(
        "t = torch.zeros(1000)\ndef add(x):\n    x += rank() + 1\n    return float(x.sum())\n"
        "launch(add, t, start_method='zygote').results, float(t.sum())"
    )
    assert cell.result_text == "((1000.0, 2000.0), 0.0)"


def test_a_thread_of_the_kernel_can_launch(kernel: Kernel) -> None:
    cell = kernel.check(
        "got = []\nthread = threading.Thread(target=lambda: got.append(launch(rank).results))\n"
        "thread.start(); thread.join(100)\ngot"
    )
    assert cell.result_text == "[(0, 1)]"


def test_a_computing_thread_makes_the_launch_use_the_zygote(kernel: Kernel) -> None:
    cell = kernel.check(
        "stop = threading.Event()\ndef spin():\n    while not stop.is_set():\n        sum(range(1000))\n"
        "thread = threading.Thread(target=spin, name='cruncher'); thread.start()\n"
        "try:\n    results = launch(rank).results\nfinally:\n    stop.set(); thread.join()\nresults"
    )
    assert cell.result_text == "(0, 1)"
    assert "zygote (thread 'cruncher' is computing in the kernel)" in cell.stdout


def test_sixteen_ranks_run(kernel: Kernel) -> None:
    assert kernel.value("launch(rank, num_processes=16).results") == list(range(16))
