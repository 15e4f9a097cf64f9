"""Warm ranks without a notebook."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from notebook_accelerate import LaunchConfig, WorkerError
from notebook_accelerate.launch import warm_ranks
from notebook_accelerate.launch.warm_ranks import WarmRanks
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("zygote")


def test_a_cell_waits_for_a_rank_that_is_not_listening_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    run_cells = warm_ranks.warm_rank

    def late() -> None:
        time.sleep(0.5)  # On a busy machine, a rank may wait for a CPU after it has reported that it is running.
        run_cells()

    monkeypatch.setattr(warm_ranks, "warm_rank", late)
    group = WarmRanks(LaunchConfig(num_processes=1, use_port=0, start_method="fork"))
    try:
        assert group.execute("6 * 7", "<cell>").shown == {0: "42"}
    finally:
        group.stop()


def test_a_cell_for_a_rank_that_exited_since_the_last_one_reports_its_end() -> None:
    group = WarmRanks(LaunchConfig(num_processes=2, use_port=0, start_method="fork"))
    try:
        pid = int(group.execute("import os\nos.getpid()", "<cell>").shown[1])
        os.kill(pid, signal.SIGKILL)
        until(lambda: group.run._internals.commands.requests.open_ranks() == [0])
        with pytest.raises(WorkerError, match="rank 1: killed by SIGKILL"):
            group.execute("6 * 7", "<cell>")
    finally:
        group.stop()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_sending_variables_leaves_ranks_ready_for_the_next_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine, the rank may need more than the usual grace period.
    monkeypatch.setattr(warm_ranks, "DEFAULT_GRACE", 600.0)
    group = WarmRanks(LaunchConfig(num_processes=1, use_port=0, start_method="fork"))
    rank = group.run.ranks[0].pid
    assert rank is not None
    timers = [
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(1.0, os.kill, (rank, signal.SIGCONT)),
    ]
    try:
        os.kill(rank, signal.SIGSTOP)  # This makes the rank respond late.
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            group.execute("len(big)", "<cell>", send={"big": bytes(10_000_000)})
        timers[1].join()
        shown: list[dict[int, str]] = []
        cell = threading.Thread(target=lambda: shown.append(group.execute("6 * 7", "<next>").shown), daemon=True)
        cell.start()
        cell.join(60)
        assert shown == [{0: "42"}]
    finally:
        group.stop()
