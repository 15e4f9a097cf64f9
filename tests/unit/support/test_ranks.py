"""The rank harness: results, failures, deaths, timeouts and cost."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

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
    time.sleep(600)


def _still_needs_rank_0() -> bytes:
    """Use the store that rank 0 serves long after rank 0 has returned."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        time.sleep(1)
        store.set("late", "yes")
        return bytes(store.get("late"))
    return b""


def _server_and_cost() -> tuple[int, float]:
    """Return the process id of the server, and the seconds of CPU time that it has used."""
    import torch.distributed as dist

    dist.barrier()
    return os.getppid(), time.process_time()


def _modules() -> set[str]:
    return set(sys.modules)


def test_results_are_returned_by_rank_from_a_gloo_group() -> None:
    assert run_ranks(_sum_of_ranks, 10, process_group=True) == [(0, "gloo", 21.0), (1, "gloo", 21.0)]


def test_three_ranks_form_a_group() -> None:
    assert [value for _, _, value in run_ranks(_sum_of_ranks, 0, world_size=3, process_group=True)] == [3.0] * 3


def test_ranks_have_the_variables_of_torchrun_and_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert time.monotonic() - begin < 300  # The rank sleeps for twice as long.


def test_a_rank_that_has_returned_waits_for_the_others() -> None:
    assert run_ranks(_still_needs_rank_0, process_group=True) == [b"", b"yes"]


def test_a_call_is_cheap_once_the_server_runs() -> None:
    calls = [run_ranks(_server_and_cost, process_group=True) for _ in range(2)]
    assert len({server for ranks in calls for server, _ in ranks}) == 1
    for _, seconds in calls[1]:
        assert seconds < 1.0  # Importing torch again would take longer.


def test_the_leak_check_finds_leaked_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_steps = register_optimizer_step_post_hook(lambda *_: None)
    before = leaks.take()
    monkeypatch.setenv("LEFT_BEHIND", "1")
    reader, writer = socket.socketpair()
    counts_steps.remove()
    try:
        lines = leaks.compare(before, patience=0.0)
    finally:
        reader.close()
        writer.close()
    removed = "hook on all optimizers, which was removed"
    assert [line.split(":")[0] for line in lines] == ["socket", "socket", "environment variable", removed]
