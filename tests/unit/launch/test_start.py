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

pytestmark = pytest.mark.usefixtures("zygote")


def test_each_of_two_interrupts_while_ranks_start_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure, main = server.ensure_zygote, threading.get_ident()

    def late() -> Any:
        for _ in range(2):
            time.sleep(0.3)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        return ensure()

    monkeypatch.setattr(server, "ensure_zygote", late)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        with pytest.raises(RunInterrupted):
            notebook_accelerate.notebook_launcher(
                time.sleep, (600,), num_processes=1, use_port=0, start_method="zygote", block=False
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert notebook_accelerate.runs()[-1].status == "stopped"
