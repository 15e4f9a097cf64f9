"""The rank harness itself: results, failures, deaths, time-outs, and the cost."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest

from tests.support import leaks
from tests.support.ranks import RankError, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, str, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_backend(), value.item()


def _fail_on_one() -> int:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()
    return 0


def _variables() -> list[str | None]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OF_THE_TEST", "OF_THE_CALL")
    return [os.environ.get(name) for name in names]


def _die_on_zero() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(60)


def _modules() -> set[str]:
    return set(sys.modules)


def test_results_come_back_by_rank_from_a_gloo_group() -> None:
    assert run_ranks(_sum_of_ranks, 10, process_group=True) == [(0, "gloo", 21.0), (1, "gloo", 21.0)]


def test_three_ranks() -> None:
    assert [value for _, _, value in run_ranks(_sum_of_ranks, 0, world_size=3, process_group=True)] == [3.0] * 3


def test_ranks_have_torchruns_environment_and_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "a")
    rows = run_ranks(_variables, env={"OF_THE_CALL": "b"})
    assert rows == [["0", "0", "2", "2", "a", "b"], ["1", "1", "2", "2", "a", "b"]]


def test_the_rank_that_failed_first_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match="only here") as caught:
        run_ranks(_fail_on_one, process_group=True)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert "_fail_on_one" in caught.value.reports[1]


def test_a_death_by_signal_is_a_failure() -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_die_on_zero)


def test_a_stuck_rank_ends_at_the_timeout() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(_sleep, timeout=2.0)
    assert time.monotonic() - begin < 10


def test_a_call_is_cheap_once_the_server_runs() -> None:
    run_ranks(_variables)
    begin = time.monotonic()
    run_ranks(_sum_of_ranks, 0, process_group=True)
    assert time.monotonic() - begin < 2.0  # 0.1 to 0.2 s on an idle machine


def test_the_leak_check_sees_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.take()
    monkeypatch.setenv("LEFT_BEHIND", "1")
    reader, writer = socket.socketpair()
    try:
        lines = leaks.compare(before, patience=0.0)
    finally:
        reader.close()
        writer.close()
    assert [line.split(":")[0] for line in lines] == ["socket", "socket", "environment variable"]
