"""When the kernel dies, kill the processes that its ranks have started."""

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
read -r end  # returns at end of file, when the kernel has exited
for turn in 1 2 3 4 5 6 7 8 9 10; do
    for file in $(grep -l "^Max file locks  *$1 " /proc/[0-9]*/limits 2>/dev/null); do
        pid=${file#/proc/}
        kill -9 "${pid%/limits}" 2>/dev/null
    done
    sleep 0.2 || sleep 1
done
"""


def own_mark() -> int:
    """Return the number that marks the ranks of this process; see ``worker.exit_handlers.set_mark``."""
    return _mark_of(os.getpid())


@functools.cache
def _mark_of(pid: int) -> int:
    return mark_of(pid)


class OrphanGuard:
    """A shell that kills the processes started by ranks when the kernel dies, even if they have left the rank's group.

    The ranks themselves need no guard. Linux kills them together with the kernel (``worker.entry.die_with_parent``). On
    other systems, a rank's agent kills the rank and its process group when the channel closes. The shell kills the
    processes that a rank has started, which may have left the group and lost their parent. It finds them by their mark,
    which works only on Linux.

    The shell runs while there are ranks, and costs the kernel 0.3 ms of CPU time per launch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks = 0
        self._process: subprocess.Popen[bytes] | None = None

    def add_rank(self) -> None:
        """Increment the number of running ranks. Call `ensure` afterwards, once for several ranks."""
        with self._lock:
            self._ranks += 1

    def ensure(self) -> None:
        """Start the shell if there are ranks and it is not running. Call this regularly, because it may be killed."""
        if sys.platform != "linux":
            return
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._ranks > 0 and self._process is None:
                with suppress(OSError):  # The system may not have a shell.
                    self._process = self._start()

    def remove_rank(self) -> None:
        """Decrement the number of running ranks. When the last one has ended, end the shell."""
        with self._lock:
            self._ranks -= 1
            if self._ranks == 0 and self._process is not None:
                self._end()

    def forget_parents_shell(self) -> None:
        """Drop the parent's shell in a forked child. Replace the lock, which a thread may have held during the fork."""
        self._lock, self._ranks = threading.Lock(), 0
        if self._process is not None:
            self._process.returncode = 0  # The shell is not this process's child, so this process must not wait for it.
            self._close_input()

    def _end(self) -> None:
        assert self._process is not None
        # Kill the shell before closing its input, because at the end of its input, it kills what ranks have started.
        # SIGKILL works even if the shell is suspended.
        self._process.kill()
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
            bufsize=0,  # A buffer would have a lock, which another thread may hold during a fork.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Don't pass on the kernel's environment, which may contain secrets.
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        assert process.stdin is not None
        kernel_descriptors.add(process.stdin.fileno())
        # Unmark the shell. If this process is a rank that launches ranks, it is marked, and its guard must outlive it.
        set_mark(0, process.pid)
        return process


orphan_guard = OrphanGuard()
"""The guard for the ranks of this process."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=orphan_guard.forget_parents_shell)
