"""With every start method, a function gets the same environment, random numbers, results and errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import notebook_accelerate
from notebook_accelerate import SerializationError, WorkerError, notebook_launcher
from notebook_accelerate.telemetry.inherited_state import apply_inherited_state, capture_inherited_state
from tests.support.runs import METHODS, launch

pytestmark = pytest.mark.usefixtures("zygote")
ALL_METHODS = pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
PICKLED = pytest.mark.parametrize("method", ["zygote", "spawn"])


def _numbers() -> list[float]:
    import random

    import numpy as np
    import torch

    return [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002


@ALL_METHODS
def test_environment_results_and_arguments_are_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONLY_NOW", "set after the server was started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "freshly_written.py").write_text("VALUE = 42\n")
    closed_over = {"a": 1}

    def read(scale: int, tensor: torch.Tensor) -> tuple[Any, ...]:
        import freshly_written

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ONLY_NOW", "MASTER_ADDR")
        tensor += 1
        return (
            [os.environ[n] for n in names],
            str(Path.cwd()),
            freshly_written.VALUE * scale,
            closed_over,
            tensor.sum().item(),
        )

    tensor = torch.zeros(4)
    for rank, found in enumerate(launch(read, 2, tensor, start_method=method).results):
        expected = [str(rank), str(rank), "2", "2", "set after the server was started", "127.0.0.1"]
        assert found == (expected, str(tmp_path), 84, {"a": 1}, 4.0)
    assert tensor.sum() == 0


@METHODS
def test_ranks_have_the_kernels_random_numbers(method: str) -> None:
    random.seed(5), np.random.seed(6), torch.manual_seed(7)  # noqa: NPY002
    results = launch(_numbers, start_method=method).results
    assert results == (_numbers(), _numbers()[:0] or results[0])


@METHODS
def test_torch_settings_of_the_kernel_apply_in_ranks(method: str) -> None:
    def read() -> tuple[str, int]:
        import torch

        return str(torch.get_default_dtype()), torch.get_num_threads()

    torch.set_default_dtype(torch.float64)
    try:
        results = launch(read, env={"OMP_NUM_THREADS": "2"}, start_method=method).results
    finally:
        torch.set_default_dtype(torch.float32)
    assert results == (("torch.float64", 2),) * 2


@ALL_METHODS
def test_a_rank_is_a_clean_process(method: str) -> None:
    def look() -> dict[str, Any]:
        import signal
        import threading

        return {
            "group": os.getpgid(0) == os.getpid(),
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "threads": sorted(t.name for t in threading.enumerate()),
            "stdin": sys.stdin.isatty(),
        }

    for found in launch(look, start_method=method).results:
        threads = found.pop("threads")
        assert len(threads) == 2, threads
        assert found == {"group": True, "sigint": True, "sigterm": True, "sigchld": True, "blocked": [], "stdin": False}


@METHODS
def test_asyncio_subprocesses_and_threads_work_in_a_rank(method: str) -> None:
    def body() -> tuple[int, str, int]:
        import asyncio
        import subprocess
        import threading

        async def later() -> int:
            await asyncio.sleep(0.01)
            return 3

        got: list[int] = []
        thread = threading.Thread(target=got.append, args=(5,))
        thread.start()
        thread.join()
        out = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True, check=True).stdout
        return asyncio.run(later()), out.strip(), got[0]

    assert launch(body, start_method=method).results == ((3, "7", 5),) * 2


@METHODS
def test_atexit_functions_and_lingering_threads_finish(method: str, tmp_path: Path) -> None:
    def body() -> None:
        import atexit
        import threading

        atexit.register((tmp_path / f"exit-{os.environ['RANK']}").touch)
        threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()

    run = launch(body, start_method=method)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exit-0", "exit-1"]
    assert run.logs(1) == ["from a thread"]


@METHODS
def test_nested_threads_and_idle_executors_finish_too(method: str) -> None:
    def body() -> None:
        import threading
        from concurrent.futures import ThreadPoolExecutor

        def second() -> None:
            time.sleep(0.2)
            print("from a thread's thread")

        def first() -> None:
            time.sleep(0.2)
            threading.Thread(target=second).start()

        threading.Thread(target=first).start()
        pool = ThreadPoolExecutor(1)
        pool.submit(time.sleep, 0).result()
        sys.modules["__main__"].pool = pool  # type: ignore[attr-defined]  # it is never shut down

    run = launch(body, block=False, start_method=method)
    try:
        assert run.wait(120)
    finally:
        run.stop(grace=0)
    assert run.status == "succeeded"
    assert run.logs(1) == ["from a thread's thread"]


INTERRUPTED = """
import os, signal, time
import notebook_accelerate

heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
launch = dict(num_processes=2, use_port=0, start_method="spawn", panel=False, block=False)
run = notebook_accelerate.notebook_launcher(os.getpid, **launch)
while not run.wait(0.01):
    os.killpg(0, signal.SIGINT)
assert len(heard) > 5
print(run.status, run.error)
"""


def test_an_interrupt_of_the_kernel_does_not_interrupt_starting_interpreters() -> None:
    """The front end interrupts the kernel's process group, to which interpreters that are starting belong."""
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=300, check=False)
    assert done.stdout.split() == ["succeeded", "None"], done.stdout + done.stderr


@METHODS
def test_a_collective_works(method: str) -> None:
    def meet() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.ones(10) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        return value[0].item()

    assert launch(meet, num_processes=3, start_method=method).results == (6.0,) * 3


@METHODS
def test_the_error_is_the_ranks_own(method: str) -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise OwnError("mine")
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"rank 1: .*OwnError: mine") as caught:
        launch(fail, start_method=method)
    assert type(caught.value.__cause__).__name__ == "OwnError"
    assert caught.value.failures[0].chain[-1].frames[-1].source == 'raise OwnError("mine")'


@PICKLED
def test_an_object_that_cannot_be_pickled_is_refused_before_anything_starts(method: str) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(SerializationError, match="the function or its arguments cannot be pickled"):
        launch(print, lock, start_method=method)
    with pytest.raises(SerializationError):
        launch(lambda: lock, start_method=method)


@METHODS
def test_return_values_of_any_kind_arrive(method: str) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    def make() -> tuple[Any, ...]:
        import torch

        model = torch.nn.Linear(2, 2)
        return Local(3), model, model.weight, (lambda: 5), torch.arange(3)[1:]

    local, model, weight, function, tensor = launch(make, start_method=method).results[1]
    assert (local.value, function(), tensor.tolist()) == (3, 5, [1, 2])
    assert model.weight is weight


@METHODS
def test_a_big_result_arrives(method: str) -> None:
    results = launch(lambda: b"x" * 30_000_000, start_method=method).results
    assert [len(value) for value in results] == [30_000_000] * 2


def test_a_dead_zygote_is_replaced(zygote: int) -> None:
    from notebook_accelerate.launch.processes.zygote import ensure_zygote

    notebook_accelerate.shutdown()
    before = ensure_zygote()
    os.kill(before.pid, 9)
    before._process.wait()
    first, second = launch(os.getpid, start_method="zygote"), launch(os.getpid, start_method="zygote")
    assert (first.status, second.status) == ("succeeded", "succeeded")
    assert ensure_zygote().pid != before.pid
    waiting = "waiting for the process that ranks are forked from to import torch, once per kernel"
    assert [note for note in first.notes if "import" in note] == [waiting]
    assert not [note for note in second.notes if "import" in note]


test_a_dead_zygote_is_replaced = pytest.mark.leaks_ok("the test replaces the zygote and its socket")(
    test_a_dead_zygote_is_replaced
)


def test_capture_imports_nothing_and_apply_restores_the_settings() -> None:
    state = capture_inherited_state()
    first = _numbers()
    apply_inherited_state(state)
    assert _numbers() == first


def _strategy_and_steps() -> tuple[str, str, int]:
    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.strategy.name, accelerator.distributed_type.value, accelerator.gradient_accumulation_steps


@METHODS
def test_the_launch_chooses_the_strategy_of_every_accelerator(method: str) -> None:
    from notebook_accelerate import FullyShardedDataParallelPlugin, LaunchConfig

    def wrapping(module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Linear)

    before = dict(os.environ)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrapping)
    given = {"fsdp_plugin": plugin, "gradient_accumulation_steps": 3}
    run = launch(_strategy_and_steps, config=LaunchConfig(accelerator=given), start_method=method)
    assert run.results == (("fsdp2", "FSDP", 3),) * 2
    assert launch(_strategy_and_steps, start_method=method).results == (("ddp", "MULTI_CPU", 1),) * 2
    assert dict(os.environ) == before


def test_an_inline_launch_sets_its_arguments_only_while_it_runs() -> None:
    from notebook_accelerate import Accelerator, LaunchConfig

    config = LaunchConfig(accelerator={"gradient_accumulation_steps": 3})
    run = notebook_launcher(_strategy_and_steps, (), 1, config=config)
    assert run.plan.start_method == "inline"
    assert run.results == (("single", "NO", 3),)
    assert Accelerator(cpu=True).gradient_accumulation_steps == 1
