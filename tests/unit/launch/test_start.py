"""Interrupts while a run starts."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

import notebook_accelerate
from notebook_accelerate.errors import RunInterrupted
from notebook_accelerate.launch.processes import zygote as server
from tests.support.runs import launch

pytestmark = pytest.mark.usefixtures("zygote", "interruptible")


def test_each_of_two_interrupts_during_the_start_of_ranks_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure, main = server.ensure_zygote, threading.get_ident()

    def late(*variables: Any) -> Any:
        for _ in range(2):
            time.sleep(0.3)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        return ensure(*variables)

    monkeypatch.setattr(server, "ensure_zygote", late)
    with pytest.raises(RunInterrupted):
        launch(time.sleep, 600, num_processes=1, start_method="zygote", block=False)
    assert notebook_accelerate.runs()[-1].status == "stopped"
