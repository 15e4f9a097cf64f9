"""While large return values arrive, a real kernel still responds, and the stop button works."""

from __future__ import annotations

from statistics import median

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import open_gate, rank_pids, said, wait_gone

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])
TRAIN = """
def train():
    value = torch.ones(400 << 18)
    gate("return")
    return value

async def ticks(run):
    count = 0
    while not run.done:
        await asyncio.sleep(0.005)
        count += 1
    return count

def pss():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return int(text.partition("\\nPss:")[2].split()[0]) >> 10

class Sleeps:
    def __reduce__(self):
        return time.sleep, (600,)
"""


@pytest.fixture(autouse=True, scope="module")
def _defined(kernel: Kernel) -> None:
    kernel.check("import asyncio, pathlib" + TRAIN)


@METHODS
def test_the_kernel_works_while_a_large_value_arrives(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(train, num_processes=1, start_method={method!r}, block=False, panel=False)")
    cell = kernel.submit("pathlib.Path('return').touch(); found = await ticks(run)")
    kernel.finish(cell).expect_ok()
    kernel.check("os.unlink('return')")
    assert kernel.value("found") > 5
    assert kernel.value("[run.results[0].numel(), float(run.results[0][-1])]") == [400 << 18, 1.0]


@METHODS
def test_the_stop_button_works_while_a_large_value_arrives(kernel: Kernel, method: str) -> None:
    kernel.check(
        "class Waits:\n    def __reduce__(self):\n        print('in the middle', flush=True)\n"
        "        gate('never')\n        return int, ()\n"
        "def half():\n    return [torch.ones(100 << 18), b'x' * (100 << 20), Waits()]"
    )
    cell = kernel.submit(f"launch(half, start_method={method!r})")
    kernel.wait_for(lambda: cell.stdout.count("in the middle") == 2, what="the ranks")
    kernel.interrupt()
    assert "KeyboardInterrupt" in said(kernel.finish(cell))
    wait_gone(rank_pids(kernel), 60)


@METHODS
def test_reading_a_value_that_is_slow_to_unpickle_can_be_interrupted(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(lambda: (Sleeps(), 5)[rank()], start_method={method!r})")
    cell = kernel.submit("print('reading', flush=True); run.results")
    kernel.wait_for(lambda: "reading" in cell.stdout, what="the reading")
    kernel.pump(0.3)
    kernel.interrupt()
    assert "KeyboardInterrupt" in said(kernel.finish(cell))
    assert kernel.value("[run.status, run.ranks[1].result]") == ["succeeded", 5]


def test_the_bytes_of_a_value_are_stored_in_the_kernel_once(kernel: Kernel) -> None:
    kernel.check("run = launch(train, num_processes=1, start_method='fork', block=False, panel=False)")
    open_gate(kernel, "return")
    kernel.check("run.wait()")
    kernel.check("before = pss(); value = run.results[0]; total = float(value.sum()); after = pss()")
    kernel.check("os.unlink('return')")
    assert kernel.value("total") == 400 << 18
    assert kernel.value("after - before") < 440


# ---- what finished runs keep

LARGE_RUN = """
weights = torch.ones(10 << 20)

def make(argument):
    return argument + weights, [weights.numpy()]

def read(run):
    return float(sum(each[0].mean() + each[1][0].mean() for each in run.results))  # reads every page

def settled_pss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gives free memory between objects back, whose amount is random
    return pss()
"""


@pytest.mark.parametrize(("method", "count"), [("fork", 2), ("zygote", 2), ("inline", 1)])
def test_the_memory_of_a_kernel_stays_constant_over_26_runs(kernel: Kernel, method: str, count: int) -> None:
    kernel.check(LARGE_RUN)
    options = f"num_processes={count}, start_method={method!r}"
    used = []
    for _ in range(26):
        kernel.check(f"run = launch(make, torch.ones(10 << 20), {options})")
        assert kernel.value("read(run)") == 3.0 * count
        used.append(kernel.value("settled_pss()"))
    # Compare medians, because a rank that is still exiting shares memory with the kernel and thus lowers its PSS.
    assert median(used[-5:]) - median(used[4:9]) < 40, used
    kernel.check("run.free_results()")
    assert median(used[-5:]) - kernel.value("settled_pss()") > 30
    kernel.check("run.report().html, run.logs(), run._internals.journal.records")


def test_deleting_the_variable_frees_the_results(kernel: Kernel) -> None:
    kernel.check(LARGE_RUN)
    kernel.check("run = launch(make, torch.ones(10 << 20), start_method='fork'); read(run); import weakref")
    kernel.check("value = weakref.ref(run.results[0][0])")
    kernel.check("for _ in range(3):\n    launch(int, start_method='fork')")
    assert kernel.value("[value() is None, read(run)]") == [False, 6.0]
    kernel.check("del run; gc.collect()")
    assert kernel.value("value() is None")


def test_a_run_in_the_history_of_outputs_keeps_its_results(kernel: Kernel) -> None:
    kernel.check("launch(rank, start_method='fork')")
    kernel.check("shown = notebook_accelerate.runs()[-1].id")
    kernel.check("for _number in range(4):\n    launch(int, start_method='fork')")
    assert kernel.value("[run.results for run in Out.values() if getattr(run, 'id', 0) == shown]") == [[0, 1]]
