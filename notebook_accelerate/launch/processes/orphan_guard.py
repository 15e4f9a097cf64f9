"""What ends the processes that ranks have started when the kernel dies."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import suppress

from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.worker.exit_handlers import mark_of, set_mark

_SCRIPT = """
read -r end  # returns at the end of the file, when the kernel has ended
for turn in 1 2 3 4 5 6 7 8 9 10; do
    for file in $(grep -l "^Max file locks  *$1 " /proc/[0-9]*/limits 2>/dev/null); do
        pid=${file#/proc/}
        kill -9 "${pid%/limits}" 2>/dev/null
    done
    sleep 0.2 || sleep 1
done
"""


def own_mark() -> int:
    """Return the mark of the ranks of this process; see ``worker.exit_handlers.set_mark``."""
    return _mark_of(os.getpid())


@functools.cache
def _mark_of(pid: int) -> int:
    return mark_of(pid)


class OrphanGuard:
    """A shell that kills what ranks have started when their kernel dies, wherever it is by then.

    A rank itself needs no guard. Linux kills it with its kernel (``worker.entry.die_with_parent``). On other systems,
    its agent kills it and its process group when the channel closes. The shell kills the processes that a rank has
    started, which may have left the group and lost their parent. It finds them by their mark, so it runs on Linux only.

    The shell runs while ranks live. Each launch costs the kernel 0.3 ms of processor time for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks = 0
        self._process: subprocess.Popen[bytes] | None = None

    def add_rank(self) -> None:
        """Count a rank that has started; `ensure` starts the shell, once several ranks have."""
        with self._lock:
            self._ranks += 1

    def ensure(self) -> None:
        """Start the shell if ranks live and it does not run; called from time to time, because it may be killed."""
        if sys.platform != "linux":
            return
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._ranks > 0 and self._process is None:
                with suppress(OSError):  # there is no shell
                    self._process = self._start()

    def remove_rank(self) -> None:
        """Count a rank down; the shell ends with the last one."""
        with self._lock:
            self._ranks -= 1
            if self._ranks == 0 and self._process is not None:
                self._end()

    def forget_parents_shell(self) -> None:
        """Leave the shell to the parent, in a process forked from it while any thread may have held the lock."""
        self._lock, self._ranks = threading.Lock(), 0
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process
            self._close_input()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()  # before its input ends, which would have it kill the ranks; works while it is stopped
        self._process.wait()
        self._close_input()

    def _close_input(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            kernel_descriptors.discard(self._process.stdin.fileno())
        self._process.stdin.close()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", str(own_mark())],
            bufsize=0,  # a buffer has a lock, which another thread may hold during a fork
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # not the kernel's: it may have a secret
        )
        assert process.stdin is not None
        kernel_descriptors.add(process.stdin.fileno())
        set_mark(0, process.pid)  # a rank that launches ranks is marked itself: its guard has to outlive it
        return process


orphan_guard = OrphanGuard()
"""The guard of this process."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=orphan_guard.forget_parents_shell)
