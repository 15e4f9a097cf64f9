"""Peers that are suspended, fall silent, close or send anything: each against each socket that the package reads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accelerate import Run, notebook_launcher, shutdown
from notebook_accelerate.errors import AskError
from notebook_accelerate.launch.state.run_events import StopAdvanced
from notebook_accelerate.telemetry.debug_protocol import StacksRequest
from notebook_accelerate.telemetry.sink import current_sink
from tests.support.peers import SENDS, THEN, misbehaving_peer
from tests.support.waiting import until
from tests.unit.launch.test_listener import _Kernel


def _launch(function: Callable[..., Any], *arguments: Any) -> Run:
    settings: dict[str, Any] = {"num_processes": 2, "use_port": 0, "start_method": "fork", "block": False}
    return notebook_launcher(function, arguments, panel=False, **settings)


# ---- ranks


def _misbehaves(data: bytes, then: str, began: str) -> None:
    """Rank 1 sends bytes to its kernel, and then does nothing more, closes its channel, or is suspended."""
    if os.environ["RANK"] == "1":
        sink = current_sink()
        assert sink is not None
        sink.channel.send_bytes(data)
        Path(began).touch()
        if then == "closes":
            sink.channel.shut()
        elif then == "suspended":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("data", SENDS.values(), ids=SENDS)
def test_a_rank_that_sends_anything_harms_no_other(tmp_path: Path, data: bytes, then: str) -> None:
    run = _launch(_misbehaves, data, then, str(tmp_path / "began"))
    try:
        until((tmp_path / "began").exists, seconds=60)
        if then == "closes":
            assert run.wait(60), "a rank without its channel ends"
            assert run.status == "failed"
        else:
            time.sleep(0.2)
            assert run.ask("1 + 1", [0], timeout=10.0) == {0: 2}
    finally:
        begin = time.monotonic()
        run.stop(grace=1.0)
    assert time.monotonic() - begin < 20
    assert not any(psutil.pid_exists(info.pid or 0) for info in run.ranks)


def test_requests_to_a_suspended_rank_wait_for_nothing() -> None:
    """Its socket is full after some hundreds of requests, or one that is large."""
    run = _launch(time.sleep, 600)
    until(lambda: run.commands.requests.open_ranks() == [0, 1] and run.status == "running")
    suspended = psutil.Process(run.ranks[1].pid)
    suspended.suspend()
    try:
        for _ in range(1000):
            run.commands.requests.forget(run.commands.requests.send([1], StacksRequest))
        assert run.ask("1 + 1", [0], timeout=60.0) == {0: 2}
        for code in ("1 + 1", f"{'x' * 3_000_000!r} and 1"):
            (error,) = run.ask(code, [1], timeout=1.0).values()
            assert isinstance(error, AskError)
            assert "SIGSTOP" in str(error) or "suspended" in str(error) or "stopped" in str(error)
        suspended.resume()
        until(lambda: run.ask("1 + 1", [1], timeout=5.0) == {1: 2})
    finally:
        suspended.resume()
        run.stop(grace=1.0)


def _outlasts_interrupts() -> None:
    while True:
        with suppress(KeyboardInterrupt):
            time.sleep(600)


def test_shutdown_stops_all_runs_at_the_same_time() -> None:
    """Not one after the other, which takes the grace period of each."""
    both = [_launch(_outlasts_interrupts) for _ in range(2)]
    until(lambda: all(run.status == "running" for run in both))
    shutdown()
    for run, other in (both, both[::-1]):
        asked = next(record.time for record in run.journal.records if isinstance(record.event, StopAdvanced))
        assert asked < (other.ended or 0.0)


# ---- other machines


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("data", SENDS.values(), ids=SENDS)
def test_a_peer_of_the_listener_that_sends_anything_harms_no_host(data: bytes, then: str) -> None:
    kernel = _Kernel()
    try:
        with misbehaving_peer(("127.0.0.1", kernel.port), data, then):
            begin = time.monotonic()
            kernel.connect_host()
            assert time.monotonic() - begin < 10
    finally:
        kernel.close()
