"""The `Run` that a launch returns: status, ranks, results, waiting, awaiting, stopping and logs."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import pytest

import notebook_accelerate
from notebook_accelerate import (
    LaunchConfig,
    RayCluster,
    Run,
    RunNotFinishedError,
    RunStoppedError,
    RunTimeoutError,
    WorkerError,
    debug_launcher,
    notebook_launcher,
    telemetry,
)
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent
from tests.support.runs import launch, plan_run
from tests.support.waiting import until


def _rank() -> int:
    return int(os.environ["RANK"])


def _sleep_long() -> None:
    print("asleep")
    time.sleep(600)


def test_a_blocking_run_is_complete_when_it_returns() -> None:
    run = launch(lambda x: x * 10 + _rank(), 4)
    assert run.results == (40, 41)
    assert run.status == "succeeded"
    assert type(run.status) is str
    assert run.error is None
    assert [(info.rank, info.state, info.exit) for info in run.ranks] == [(r, "succeeded", "exit 0") for r in (0, 1)]
    assert run.wait() is True
    assert run.wait(timeout=0) is True
    run.stop()
    assert run.status == "succeeded"
    assert run in notebook_accelerate.runs()
    assert "succeeded, 2 ranks" in repr(run)
    assert [attempt.outcome for attempt in run.attempts] == ["succeeded"]


def test_a_running_run_raises_instead_of_results() -> None:
    run = launch(_sleep_long, block=False)
    try:
        with pytest.raises(RunNotFinishedError, match=r"run\.wait\(\)"):
            run.results  # noqa: B018
        assert run.wait(timeout=0.05) is False
        assert run.error is None
        assert all(info.pid for info in run.ranks)
        until(lambda: run.status == "running")
    finally:
        begin = time.monotonic()
        run.stop()
    assert time.monotonic() - begin < 60, "the ranks sleep for ten minutes"
    assert run.status == "stopped"
    assert [info.state for info in run.ranks] == ["stopped", "stopped"]
    assert isinstance(run.error, RunStoppedError)
    with pytest.raises(RunStoppedError):
        run.results  # noqa: B018


def test_wait_answers_a_negative_and_a_zero_timeout_immediately() -> None:
    run = launch(_sleep_long, block=False)
    try:
        assert run.wait(timeout=0) is False
        assert run.wait(timeout=-1) is False
    finally:
        run.stop(grace=0)
    with pytest.raises(ValueError, match="grace=-1"):
        run.stop(grace=-1)


NUMBERS = {
    "stop": lambda run, value: run.stop(grace=value),
    "stop without waiting": lambda run, value: run.stop(grace=value, wait=False),
    "wait": lambda run, value: run.wait(timeout=value),
    "unpause": lambda run, value: run.unpause([0], timeout=value),
    "logs": lambda run, value: run.logs(tail=value),
    "sample": lambda run, value: run.sample(seconds=value),
    "sample rate": lambda run, value: run.sample(rate=value),
    "profile": lambda run, value: run.profile(steps=value),
    "profile seconds": lambda run, value: run.profile(seconds=value),
    "memory": lambda run, value: run.memory(seconds=value),
    "ask": lambda run, value: run.ask("1", timeout=value),
    "complete": lambda run, value: run.complete("x", timeout=value),
    "pause": lambda run, value: run.pause(timeout=value),
    "debugpy": lambda run, value: run.debugpy(timeout=value),
    "debug_command": lambda run, value: run.debug_command("p 1", timeout=value),
    "timeout": lambda run, value: run.config.changed(timeout=value),
    "hang_timeout": lambda run, value: run.config.changed(hang_timeout=value),
    "monitor_interval": lambda run, value: run.config.changed(monitor_interval=value),
    "join_timeout": lambda run, value: run.config.changed(rdzv_conf={"join_timeout": value}),
    "keep_alive_interval": lambda run, value: run.config.changed(rdzv_conf={"keep_alive_interval": value}),
    "max_restarts": lambda run, value: run.config.changed(max_restarts=value),
    "num_nodes": lambda run, value: run.config.changed(num_nodes=value),
    "cpus": lambda _, value: RayCluster(cpus=value),
    "start_timeout": lambda _, value: RayCluster(start_timeout=value),
}
"""Calls that pass on a number from the user."""


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 10**400, 10**5000, True, "soon", [1]],
    ids=["nan", "inf", "-inf", "400 digits", "5000 digits", "bool", "text", "list"],
)
@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
def test_an_invalid_timeout_is_refused(call: Callable[[Run, Any], object], value: Any) -> None:
    run = plan_run()
    if type(value) is int and call in (NUMBERS["max_restarts"], NUMBERS["num_nodes"], NUMBERS["logs"]):
        pytest.skip("a count has no limit")
    with pytest.raises(ValueError, match=r"is not allowed; pass (a|seconds|samples)") as refused:
        call(run, value)
    assert len(str(refused.value)) < 300
    assert run.status == "starting"


@pytest.mark.parametrize("grace", [10**400, float("nan"), float("inf")], ids=["400 digits", "nan", "inf"])
def test_a_refused_stop_does_not_disturb_the_run(grace: float) -> None:
    run = launch(_sleep_long, block=False)
    try:
        with pytest.raises(ValueError, match="grace="):
            run.stop(grace=grace)
        time.sleep(0.5)
        assert run.ended is None
    finally:
        run.stop(grace=1)
    assert run.status == "stopped"


POINTS = 120_000


def _log_at_full_speed() -> int:
    for step in range(POINTS):
        telemetry.emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
    return _rank()


def test_ranks_that_log_at_full_speed_keep_the_end_of_their_curves() -> None:
    run = launch(_log_at_full_speed)
    assert run.results == (0, 1)
    for rank in (0, 1):
        steps = run.metrics["loss"].rank(rank).steps
        assert steps[0] == 0
        assert steps[-1] == POINTS - 1
    lost = sum(run._internals.store.dropped.values())
    assert not lost or f"{lost:,} metrics and lines of" in str(run.report())


def test_many_threads_may_wait_and_stop() -> None:
    run = launch(_sleep_long, block=False)
    ended: list[bool] = []
    waiters = [threading.Thread(target=lambda: ended.append(run.wait(60))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    stoppers = [threading.Thread(target=run.stop) for _ in range(3)]
    for stopper in stoppers:
        stopper.start()
    for thread in (*waiters, *stoppers):
        thread.join(60)
    assert ended == [True] * 3


def test_a_question_whose_prompt_was_interrupted_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> str:
        return input("colour? ")

    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 1:
            raise KeyboardInterrupt  # ipykernel raises this when the stop button is pressed at a prompt.
        return "blue"

    monkeypatch.setattr("builtins.input", answer)
    run = launch(ask, block=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.wait()
        assert run.wait(60)
    finally:
        run.stop(grace=0)
    assert run.results == ("blue", "blue")
    assert sorted(asked[1:]) == ["[rank 0] colour? ", "[rank 1] colour? "]


def test_logs_can_be_selected_by_rank_and_tail() -> None:
    def talk() -> None:
        for number in range(3):
            print("line", number)
        print("trouble", file=sys.stderr)
        print("no line break", end="")

    run = launch(talk)
    assert sorted(run.logs(1)) == ["line 0", "line 1", "line 2", "no line break", "trouble"]
    assert len(run.logs()) == 10
    assert all(line.startswith(("[rank 0] ", "[rank 1] ")) for line in run.logs())
    assert run.logs(0, tail=1) == run.logs(0)[-1:]
    assert run.logs(0, tail=0) == []
    assert len(run.logs(tail=100)) == 10
    for rank in (2, -1):
        with pytest.raises(ValueError, match=rf"rank={rank}.*\[0, 1\]"):
            run.logs(rank)
    with pytest.raises(ValueError, match="tail=-1"):
        run.logs(tail=-1)


def test_metrics_and_progress_arrive() -> None:
    def log() -> None:
        for step in range(50):
            telemetry.emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
        telemetry.emit(ProgressEvent(50, 50))

    run = launch(log)
    assert list(run.metrics) == ["loss"]
    assert run.metrics["loss"].rank(1).steps.tolist() == list(range(50))
    assert [info.last_step for info in run.ranks] == [50, 50]


def test_run_may_be_awaited() -> None:
    async def body() -> Run:
        run = launch(lambda: _rank() + 1, block=False)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        done = await run
        ticker.cancel()
        assert done is run
        return await run  # A run may be awaited again after its end.

    assert asyncio.run(body()).results == (1, 2)


def test_awaiting_a_failed_run_raises_its_error() -> None:
    def fail() -> None:
        raise KeyError("lost")

    async def body() -> None:
        await launch(fail, block=False)

    with pytest.raises(WorkerError, match="KeyError: 'lost'"):
        asyncio.run(body())


def test_a_cancelled_await_stops_the_run() -> None:
    async def body() -> Run:
        run = launch(_sleep_long, block=False)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run, 0.3)
        return run

    assert asyncio.run(body()).status == "stopped"


def test_done_callbacks_are_called_before_and_after_the_end() -> None:
    called: list[Run] = []
    run = launch(lambda: time.sleep(0.2), block=False)
    run.add_done_callback(called.append)
    run.wait()
    until(lambda: called == [run])
    run.add_done_callback(called.append)
    assert called == [run, run]


def test_a_failing_done_callback_affects_neither_the_run_nor_the_next_callback(tmp_path: Path) -> None:
    called: list[Run] = []
    go = tmp_path / "go"

    def broken(_: Run) -> None:
        raise RuntimeError("a callback with a bug")

    def work() -> int:
        until(go.exists)
        return 3

    run = launch(work, block=False)
    run.add_done_callback(broken)
    run.add_done_callback(called.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go.touch()
        assert run.wait(60)
        until(lambda: called == [run])
    assert run.results == (3, 3)


def test_a_subscriber_may_stop_its_run() -> None:
    def forever() -> None:
        while True:
            telemetry.emit(MetricEvent({"loss": 9.0}))
            time.sleep(0.01)

    run = launch(forever, block=False)
    run._internals.journal.subscribe(lambda _: run.stop(grace=1.0))
    assert run.wait(60)
    assert run.status == "stopped"


def test_two_concurrent_runs_have_two_ports() -> None:
    def meet() -> tuple[int, str]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        time.sleep(0.2)
        return int(total), os.environ["MASTER_PORT"]

    runs = [launch(meet, block=False, use_port="29517") for _ in range(2)]
    for run in runs:
        assert run.wait(120)
    values = [run.results for run in runs]
    assert all(total == 2 for result in values for total, _ in result)
    assert values[0][0][1] != values[1][0][1]


def test_the_environment_of_the_launch_overrides_the_kernels_and_config_is_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARED_NAME", "kernel")
    config = LaunchConfig(env={"SHARED_NAME": "config"}, num_processes=3, start_method="fork", use_port=0)

    def read() -> tuple[str, str, str]:
        return os.environ["SHARED_NAME"], os.environ["WORLD_SIZE"], os.environ["ACCELERATE_MIXED_PRECISION"]

    assert notebook_launcher(read, config=config).results == (("config", "3", "no"),) * 3
    found = notebook_launcher(read, num_processes=1, mixed_precision="bf16", env={"SHARED_NAME": "call"}, config=config)
    assert found.results == (("call", "1", "bf16"),)
    assert launch(read).results[0][0] == "kernel"
    assert os.environ["SHARED_NAME"] == "kernel"
    assert "RANK" not in os.environ


def test_the_line_prefix_is_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    launch(lambda: print("hello"), log_line_prefix_template="<${rank}/${local_rank}> ")
    assert sorted(capsys.readouterr().out.splitlines()) == ["<0/0> hello", "<1/1> hello"]


def test_timeout_ends_the_run_and_is_reported() -> None:
    begin = time.monotonic()
    with pytest.raises(RunTimeoutError, match=r"timeout of 0\.4 s") as caught:
        launch(_sleep_long, timeout=0.4)
    assert time.monotonic() - begin < 60, "the ranks sleep for ten minutes"
    assert caught.value.run is not None
    assert caught.value.run.status == "stopped"


def test_hang_timeout_counts_from_the_last_sign_of_life() -> None:
    def stop_talking() -> None:
        for _ in range(8):
            print("alive")
            time.sleep(0.1)
        time.sleep(600)

    with pytest.raises(RunTimeoutError, match="hang_timeout") as caught:
        launch(stop_talking, hang_timeout=0.5)
    run = caught.value.run
    assert run is not None
    assert run.ended is not None
    assert run.ended - run.started < 60, "the ranks sleep for ten minutes"
    # On a busy machine, the limit may expire before the ranks have printed everything.
    heard = sorted(line.time for rank in (0, 1) for line in run._internals.store.log_lines(rank))
    times = [run.started, *heard, run.ended]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) > 0.45


def test_restarts_are_counted_and_reported() -> None:
    def third_time() -> str:
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt < 2 and _rank() == 1:
            raise ValueError(f"not yet ({attempt})")
        return f"{attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}"

    run = launch(third_time, max_restarts=3)
    assert run.results == ("2 of 3", "2 of 3")
    assert [attempt.outcome.partition(" at ")[0] for attempt in run.attempts] == [
        "rank 1: ValueError: not yet (0)", "rank 1: ValueError: not yet (1)", "succeeded",
    ]  # fmt: skip
    assert run.failures == ()
    text = run.report().text
    assert "attempt" in text
    assert "not yet (0)" in text
    assert "not yet (1)" in run.report().html


def test_restarts_end_with_the_last_failure() -> None:
    def never() -> None:
        raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])

    with pytest.raises(WorkerError, match=r"ValueError: 1 .*\(attempt 2\)") as caught:
        launch(never, max_restarts=1)
    assert caught.value.run is not None
    assert len(caught.value.run.attempts) == 2


def test_a_stopped_run_is_not_restarted() -> None:
    run = launch(_sleep_long, max_restarts=5, block=False)
    until(lambda: run.status == "running")
    run.stop()
    assert len(run.attempts) == 1
    assert run.status == "stopped"


def test_a_failed_run_keeps_the_results_of_the_other_ranks(tmp_path: Path) -> None:
    told = tmp_path / "process"

    def fail_on_one() -> int:
        if _rank() == 0:
            told.with_suffix(".new").write_text(str(os.getpid()))
            told.with_suffix(".new").rename(told)
            return 7
        until(told.exists)
        # The kernel notices a rank's end only after it has read all of the rank's output.
        until(lambda: not psutil.pid_exists(int(told.read_text())))
        raise KeyError("one")

    with pytest.raises(WorkerError) as caught:
        launch(fail_on_one)
    error = caught.value
    assert isinstance(error.__cause__, KeyError)
    assert (error.rank, dict(error.results)) == (1, {0: 7})
    assert error.run is not None
    assert error.run.error is error
    assert [info.state for info in error.run.ranks] == ["succeeded", "failed"]


def test_debug_launcher_starts_two_ranks_on_the_cpu() -> None:
    def read() -> tuple[str, str]:
        return os.environ["WORLD_SIZE"], os.environ["ACCELERATE_USE_CPU"]

    assert debug_launcher(read).results == (("2", "True"),) * 2
    assert len(debug_launcher(read, num_processes=3).results) == 3


def test_debug_launcher_supports_one_process() -> None:
    assert debug_launcher(lambda x: x, (5,), num_processes=1).results == (5,)


def test_a_taken_port_is_reported_in_one_line_and_refused_for_several_machines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = launch(lambda: os.environ["MASTER_PORT"], use_port=port)
        assert run.results[0] != str(port)
        assert [note for note in run.notes if f"port {port} is taken" in note]
        with pytest.raises(notebook_accelerate.PortInUseError, match=f"{port}"):
            launch(print, use_port=port, num_nodes=2)


def test_the_kernels_random_numbers_are_not_advanced() -> None:
    import random

    import numpy as np
    import torch

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    launch(lambda: (random.random(), torch.rand(1).item()))
    found = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert found == expected


async def _coroutine() -> None: ...


async def _async_generator() -> AsyncIterator[int]:
    yield 1


def _generator(count: int = 1) -> Iterator[int]:
    yield from range(count)


class _Generating:
    def __call__(self) -> Iterator[int]:
        yield 1

    def train(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (_coroutine, "lambda *args: asyncio.run(_coroutine(*args))"),
        (_async_generator, "_async_generator is an async generator function, whose call does not run its body"),
        (_generator, "lambda *args: list(_generator(*args))"),
        (partial(_generator, 2), "lambda *args: list(_generator(*args))"),
        (partial(partial(_Generating()), 2), "_Generating is a generator function"),
        (_Generating(), "_Generating is a generator function"),
        (_Generating().train, "train is a generator function"),
    ],
)
def test_a_function_that_a_call_does_not_run_is_refused(function: Callable[..., Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        notebook_launcher(function, num_processes=2)


def test_a_function_that_wraps_a_generator_is_launched() -> None:
    @wraps(_generator)
    def train(count: int) -> list[int]:
        return list(_generator(count))

    assert launch(train, 2).results[0] == [0, 1]
