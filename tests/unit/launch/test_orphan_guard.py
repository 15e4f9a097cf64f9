"""The shell that kills the processes that ranks have started, when the shell itself is stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from notebook_accelerate.launch.processes.orphan_guard import OrphanGuard, own_mark
from notebook_accelerate.worker.exit_handlers import set_mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shell runs on Linux only")
SOON = 60.0


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process of the shell that ``GUARD`` uses."""
    GUARD.add_rank()
    GUARD.ensure()
    process = GUARD._process
    assert process is not None
    yield process
    process.kill()


GUARD = OrphanGuard()


def test_a_stopped_shell_exits_with_the_last_rank_and_kills_nothing(shell: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "600"]) as marked:
        set_mark(own_mark(), marked.pid)
        os.kill(shell.pid, signal.SIGSTOP)
        release = threading.Thread(target=GUARD.remove_rank, daemon=True)
        release.start()
        release.join(SOON)
        try:
            assert not release.is_alive()
            assert shell.returncode == -signal.SIGKILL
            assert marked.poll() is None
        finally:
            marked.kill()


def test_a_shell_that_died_is_replaced(shell: subprocess.Popen[bytes]) -> None:
    os.kill(shell.pid, signal.SIGKILL)
    os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)
    GUARD.ensure()
    replacement = GUARD._process
    assert replacement is not None
    assert replacement.pid != shell.pid
    GUARD.remove_rank()
    assert replacement.returncode == -signal.SIGKILL
