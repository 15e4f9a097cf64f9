from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time

import pytest

from notebook_accelerate.hardware.versions import is_torch_version
from notebook_accelerate.state import process_group
from tests.support.interpreters import InterpreterServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of threads is in /proc only on Linux")

_PR_SET_NAME = 15


class _GlooLike:
    """A thread named like gloo's. It computes without the interpreter lock, for ``rounds`` or until ``end()``."""

    def __init__(self, rounds: int | None) -> None:
        self._named, self._end, self.done = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(rounds,), daemon=True)
        self._thread.start()
        self._named.wait()

    def _run(self, rounds: int | None) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, process_group._NAME.encode())
        self._named.set()
        while not self._end.is_set() and rounds != 0:
            hashlib.sha256(bytes(10_000_000)).digest()
            rounds = None if rounds is None else rounds - 1
        self.done.set()
        self._end.wait()

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def test_busy_threads_are_waited_for() -> None:
    thread = _GlooLike(20)
    process_group.wait_for_idle(limit=120.0)
    assert thread.done.is_set()
    begin = time.monotonic()
    process_group.wait_for_idle(limit=120.0)  # The thread has become idle.
    assert time.monotonic() - begin < 60.0
    thread.end()


def test_waiting_ends_at_the_limit() -> None:
    thread = _GlooLike(None)
    process_group.wait_for_idle(limit=0.05)
    assert not thread.done.is_set()
    thread.end()


@pytest.mark.skipif(is_torch_version("<", "2.13"), reason="gloo names its threads since torch 2.13")
def test_gloos_threads_are_found_by_name(interpreters: InterpreterServer) -> None:
    code = (
        "import time\n"
        "import torch.distributed as dist; from notebook_accelerate.state import PartialState, process_group\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "PartialState(cpu=True)\n"
        "end = time.monotonic() + 60.0\n"
        "while not process_group._threads() and time.monotonic() < end:\n"  # A thread gets its name only once it runs.
        "    time.sleep(0.01)\n"
        "print(len(process_group._threads()))"
    )
    done = interpreters.run("-c", code, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "torch has renamed gloo's threads, so nothing would wait for them"
