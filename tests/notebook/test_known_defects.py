"""Defects of other launchers in notebooks do not occur here. The numbers are those in the list of known defects."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.kernel import Cell, Kernel
from tests.support.launching import alive, blames, children, open_gate, patient, rank_pids, ready_kernel, said

pytestmark = pytest.mark.notebook
TRAIN = """
from notebook_accelerate import Accelerator
def precision():
    accelerator = Accelerator()
    return accelerator.mixed_precision, accelerator.num_processes, accelerator.process_index, str(accelerator.device)
"""


@pytest.fixture
def fresh() -> Iterator[Kernel]:
    with ready_kernel(zygote=False) as kernel:
        yield kernel


def test_defect_01_mixed_precision_reaches_the_workers(kernel: Kernel) -> None:
    kernel.check(TRAIN)
    result = kernel.check("launch(precision, mixed_precision='bf16').results").result_text
    assert result == "(('bf16', 2, 0, 'cpu'), ('bf16', 2, 1, 'cpu'))"
    assert kernel.value("launch(precision, num_processes=1, mixed_precision='bf16').results[0][0]") == "bf16"
    text = said(kernel.run("launch(precision, mixed_precision='half')"))
    assert text.rstrip().endswith("pass one of 'no', 'fp16', 'bf16', 'fp8'")
    assert "ValueError" in text


def test_defect_02_without_gpus_the_ranks_form_one_world(kernel: Kernel) -> None:
    kernel.check(TRAIN)
    cell = kernel.check("launch(precision).results")
    assert cell.result_text == "(('no', 2, 0, 'cpu'), ('no', 2, 1, 'cpu'))"
    assert "2 processes on cpu" in cell.stdout
    assert "CUDA" not in cell.stdout


def test_defect_03_what_the_function_returns_comes_back(kernel: Kernel) -> None:
    assert kernel.check("launch(lambda a, b: (a + b, rank()), 1, 2).results").result_text == "((3, 0), (3, 1))"
    assert kernel.check("launch(lambda: 'inline', num_processes=1).results").result_text == "('inline',)"


def test_defect_04_a_run_of_one_process_does_not_spoil_the_next(kernel: Kernel) -> None:
    kernel.check(TRAIN)
    kernel.check("one = launch(precision, num_processes=1).results")
    assert kernel.value("one[0][1]") == 1
    assert kernel.value("[r[1] for r in launch(precision).results]") == [2, 2]


@pytest.mark.parametrize("value", ["1", "yes", "true", "on"])
def test_defect_05_debug_mode_may_be_written_in_any_form(kernel: Kernel, value: str) -> None:
    kernel.check("from notebook_accelerate.state import PartialState\ndef debug(): return PartialState().debug")
    assert kernel.value(f"launch(debug, env={{'ACCELERATE_DEBUG_MODE': {value!r}}}).results") == [True, True]
    assert kernel.value("launch(debug).results") == [False, False]


def test_defect_06_the_cell_shows_the_rank_that_failed_first(kernel: Kernel) -> None:
    kernel.check(
        "def train():\n    group()\n    if rank() == 1:\n        raise KeyError('the cause')\n"
        "    dist.all_reduce(torch.ones(1))"
    )
    text = said(kernel.run("launch(train)"))
    assert blames(text, 1)
    assert "KeyError: 'the cause'" in text
    # The last line is the address of the error's page.
    assert text.rstrip().splitlines()[-2].startswith("WorkerError")


def test_defect_07_lines_are_complete_and_labelled_and_bars_and_displays_arrive(kernel: Kernel) -> None:
    cell = kernel.submit(
        "def talk():\n    from IPython.display import display, HTML\n"
        "    for number in range(200):\n        print('number', number, 'of', 'rank', rank())\n"
        "    display(HTML('<b>shown</b>'))\n"
        "    for step in range(5):\n        print(f'\\r{step * 25}%|###', end='', file=sys.stderr, flush=True)\n"
        "    gate('drawn')\n"
        "launch(talk);"
    )
    kernel.wait_for(lambda: all(re.search(rf"\[rank {rank}\] \d+%\|###", _drawn(cell)) for rank in (0, 1)))
    open_gate(kernel, "drawn")
    kernel.finish(cell).expect_ok()
    lines = [line for line in cell.stdout.splitlines() if "number" in line]
    assert len(lines) == 400
    assert all(re.fullmatch(r"\[rank (\d)\] number \d+ of rank \1", line) for line in lines)
    assert sum("<b>shown</b>" in data.get("text/html", "") for data in cell.displays) == 2


def _drawn(cell: Cell) -> str:
    drawings = [o for o in cell.outputs if o["output_type"] in ("display_data", "update_display_data")]
    return "\n".join(o["data"].get("text/plain", "") for o in drawings)


def test_defect_08_stop_is_quick_and_raises_keyboard_interrupt(kernel: Kernel) -> None:
    cell = kernel.submit(
        "def stuck():\n    print('in', flush=True)\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    ctypes.PyDLL(None).sleep(600)\n"
        "launch(stuck)"
    )
    kernel.wait_for(lambda: cell.stdout.count("] in") == 2)
    time.sleep(0.2)
    kernel.interrupt()
    kernel.finish(cell)
    assert "KeyboardInterrupt" in said(cell)
    with patient(kernel):
        cell = kernel.submit(
            "seen = []\ndef polite():\n    try:\n        print('in', flush=True)\n        time.sleep(600)\n"
            "    except BaseException as error:\n        print('saw', type(error).__name__)\n        raise\n"
            "launch(polite)"
        )
        kernel.wait_for(lambda: cell.stdout.count("] in") == 2)
        kernel.interrupt()
        kernel.finish(cell)
    assert cell.stdout.count("saw KeyboardInterrupt") == 2


def test_defect_09_the_kernels_signal_handlers_are_unchanged(fresh: Kernel) -> None:
    look = "[str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]"
    before = fresh.value(look)
    fresh.check("launch(rank)")
    assert fresh.value(look) == before
    os.kill(fresh.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while alive([fresh.pid]):
        assert time.monotonic() < deadline, "the kernel survived SIGTERM"
        time.sleep(0.05)


@pytest.mark.parametrize("method", ["auto", "fork", "zygote"])
def test_defect_10_a_warm_openmp_pool_does_not_hang_ranks(kernel: Kernel, method: str) -> None:
    kernel.check("before = torch.get_num_threads(); torch.set_num_threads(2)\nx = torch.randn(1500, 1500); y = x @ x")
    kernel.check(
        "def work():\n    torch.set_num_threads(2)\n    z = torch.randn(1500, 1500)\n"
        "    return float((z @ z).sum()) != 0, torch.get_num_threads()"
    )
    cell = kernel.check(f"launch(work, env={{'OMP_NUM_THREADS': '2'}}, start_method={method!r}).results")
    assert cell.result_text == "((True, 2), (True, 2))"
    assert kernel.check("float((x @ x - y).abs().max()) < 1e-3, torch.get_num_threads()").result_text == "(True, 2)"
    kernel.check("torch.set_num_threads(before)")


def test_defect_11_the_error_says_whether_memory_caused_a_kill(kernel: Kernel) -> None:
    text = said(kernel.run("launch(lambda: os.kill(os.getpid(), 9) if rank() == 1 else time.sleep(600))"))
    assert "SIGKILL" in text
    assert "the system has counted no out-of-memory kill since the run began" in text
    assert len(re.findall(r"\d [MG]B\b", text)) >= 2


def test_defect_12_a_taken_port_gives_one_line_and_no_traceback(kernel: Kernel) -> None:
    cell = kernel.check(
        "import socket\nserver = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]\n"
        "run = launch(rank, use_port=port); server.close()\nrun.results"
    )
    assert cell.result_text == "(0, 1)"
    assert len(cell.stdout) < 500
    assert re.search(r"port \d+ is taken, using \d+", cell.stdout)


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_defect_13_functions_of_the_notebook_work_with_every_start_method(kernel: Kernel, method: str) -> None:
    kernel.check(
        "class Model:\n    scale = 3\n    def __call__(self, x): return x * self.scale\n"
        "offset = 10\ndef make(n):\n    return lambda x: Model()(x) + n + offset\n"
    )
    cell = kernel.check(f"launch(make(1), 2, start_method={method!r}).results")
    assert cell.result_text == "(17, 17)"
    cell = kernel.check(f"type(launch(Model, num_processes=1, start_method={method!r}).results[0]) is Model")
    assert cell.result_text == "True"
    options = f"num_processes=1, start_method={method!r}"
    text = said(kernel.run(f"def fail():\n    value = 1\n    return value / 0\nlaunch(fail, {options})"))
    assert re.search(r"Cell In\[\d+\], line 3, in fail\n\s+return value / 0", text), text


def test_defect_14_install_xla_does_not_name_old_wheels(kernel: Kernel) -> None:
    kernel.check("from notebook_accelerate.utils import install_xla\ncommand = install_xla(dry_run=True)")
    command = kernel.value("command")
    assert command[1:4] == ["-m", "pip", "install"]
    assert command[0] == kernel.value("sys.executable")
    assert any(part.startswith("torch_xla") for part in command)
    assert not [part for part in command if "cp37" in part or part.endswith(".whl")]


def test_defect_15_zero_processes_is_an_error_and_other_numbers_are_obeyed(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(rank, num_processes=0)")
    assert cell.error is not None
    assert cell.error.ename == "ValueError"
    assert "at least 1" in cell.error.evalue
    assert kernel.value("len(launch(rank, num_processes=3).results)") == 3


def test_defect_16_an_imported_bitsandbytes_does_not_prevent_a_launch(kernel: Kernel) -> None:
    cell = kernel.check("import importlib.util; importlib.util.find_spec('bitsandbytes') is not None")
    if cell.result_text == "False":
        # Other launchers refused to launch if merely the name was in sys.modules.
        kernel.check("import types; sys.modules['bitsandbytes'] = types.ModuleType('bitsandbytes')")
    else:
        kernel.check("import bitsandbytes")
    try:
        assert kernel.check("launch(rank).results").result_text == "(0, 1)"
    finally:
        kernel.check("sys.modules.pop('bitsandbytes', None)")


def test_defect_17_the_ranks_are_pinned_to_loopback(kernel: Kernel) -> None:
    kernel.check(
        "from tests.support.connections import connections\n"
        "def look():\n    group()\n    dist.all_reduce(torch.ones(1))\n"
        "    peers = {c.raddr.ip for c in connections() if c.raddr}\n"
        "    return os.environ['GLOO_SOCKET_IFNAME'], os.environ['MASTER_ADDR'], sorted(peers)\n"
    )
    for name, address, peers in kernel.value("launch(look).results"):
        assert (name, address) == ("lo", "127.0.0.1")
        assert set(peers) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_defect_19_accelerators_do_not_change_each_other_or_the_kernel(kernel: Kernel) -> None:
    kernel.check("from notebook_accelerate import Accelerator\nbefore = dict(os.environ)")
    cell = kernel.check(
        "def steps():\n    first = Accelerator(gradient_accumulation_steps=1)\n"
        "    second = Accelerator(gradient_accumulation_steps=2)\n"
        "    return first.gradient_accumulation_steps, second.gradient_accumulation_steps\n"
        "launch(steps).results, launch(steps, num_processes=1).results",
    )
    assert cell.result_text == "(((1, 2), (1, 2)), ((1, 2),))"
    cell = kernel.check(
        "[launch(lambda: Accelerator().mixed_precision, mixed_precision=p, num_processes=n).results[0]\n"
        " for p in ('no', 'bf16', 'no') for n in (1, 2)]",
    )
    assert cell.result_text == "['no', 'no', 'bf16', 'bf16', 'no', 'no']"
    assert kernel.check("dict(os.environ) == before").result_text == "True"


def test_an_accelerator_in_the_kernel_does_not_affect_a_launch(kernel: Kernel) -> None:
    kernel.check(TRAIN)
    kernel.check("own = Accelerator(mixed_precision='bf16', cpu=True)")
    assert kernel.value("launch(precision).results") == [["no", 2, 0, "cpu"], ["no", 2, 1, "cpu"]]
    assert kernel.value("launch(precision, num_processes=1).results") == [["no", 1, 0, "cpu"]]
    assert kernel.value("[own.mixed_precision, own.num_processes]") == ["bf16", 1]


def test_a_backward_pass_in_the_kernel_does_not_affect_a_launch(kernel: Kernel) -> None:
    work = "w = torch.randn(300, 300, requires_grad=True); (w @ w).sum().backward()"
    kernel.check(work)
    cell = kernel.check(f"def train():\n    {work}\n    return float(w.grad.norm()) > 0\nlaunch(train).results")
    assert cell.result_text == "(True, True)"


def test_an_open_process_group_in_the_kernel_does_not_affect_a_launch(fresh: Kernel) -> None:
    fresh.check(
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    cell = fresh.check(
        "def meet():\n    group()\n    value = torch.ones(1)\n    dist.all_reduce(value)\n    return value.item()\n"
        "launch(meet).results",
    )
    assert cell.result_text == "(2.0, 2.0)"
    assert "zygote (a process group is open in the kernel)" in cell.stdout
    assert children(fresh) == []
    assert rank_pids(fresh)
