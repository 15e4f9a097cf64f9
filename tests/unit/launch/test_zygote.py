"""The zygote between requests, and with messages that arrive in pieces or not at all."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from notebook_accelerate.errors import LaunchError, RunStoppedError
from notebook_accelerate.launch.processes import zygote
from notebook_accelerate.launch.processes.fork_costs import is_crowded
from notebook_accelerate.launch.processes.pickled import to_file
from notebook_accelerate.launch.processes.zygote import LENGTH, Zygote
from notebook_accelerate.telemetry.inherited_state import InheritedState, capture_inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test needs /proc")
SOON = 60.0
ORDER = pickle.dumps(WorkerOrder(0, {}, None, capture_inherited_state()))


def print_pid() -> None:
    """Print this rank's process id."""
    print(os.getpid(), flush=True)


def print_imported() -> None:
    """Print whether this rank has imported torch and its compiler."""
    print("torch" in sys.modules, "torch._dynamo" in sys.modules, flush=True)


def sleep_long() -> None:
    """Sleep until the rank is killed."""
    time.sleep(600)


@pytest.fixture
def server() -> Iterator[Zygote]:
    """Yield a zygote that has imported its modules."""
    made = Zygote()
    with _Wires() as wires:
        made.fork(ORDER, wires.theirs)
    yield made
    made.close()


class _Wires:
    """The descriptors of a request for a rank that runs one function."""

    def __init__(self, function: Callable[[], None] = print_pid) -> None:
        self._function = function

    def __enter__(self) -> _Wires:
        pipes = [os.pipe() for _ in range(3)]
        channel = [each.detach() for each in socket.socketpair()]
        (stdout, stderr, status), payload = pipes, to_file(self._function, ())
        self.ours = [channel[0], stdout[0], stderr[0], status[0]]
        self.theirs = [channel[1], stdout[1], stderr[1], payload, status[1]]
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.ours + self.theirs:
            os.close(descriptor)

    def printed(self) -> bytes:
        """Return the line that the rank has printed."""
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self.ours[1], 1000)
            assert part, "the process has exited"
            line += part
        return line


def _wait_until_asleep(server: Zygote) -> None:
    """Wait until the zygote has read everything that was sent to it, and waits for more."""
    process, looks = psutil.Process(server.pid), [0]
    deadline = time.monotonic() + SOON
    while process.status() != psutil.STATUS_SLEEPING or looks[-3:] != [process.num_ctx_switches().voluntary] * 3:
        assert time.monotonic() < deadline
        looks.append(process.num_ctx_switches().voluntary)
        time.sleep(0.05)


def test_the_exit_of_a_rank_does_not_cut_an_incoming_request(server: Zygote) -> None:
    """A long request arrives in pieces, and SIGCHLD may arrive between two of them."""
    with _Wires() as wires:
        server._control.settimeout(SOON)
        socket.send_fds(server._control, [LENGTH.pack(len(ORDER))], wires.theirs)
        for piece in (ORDER[:5], ORDER[5:10]):
            server._control.sendall(piece)
            _wait_until_asleep(server)
            os.kill(server.pid, signal.SIGCHLD)
            _wait_until_asleep(server)
        server._control.sendall(ORDER[10:])
        assert server._control.recv(LENGTH.size, socket.MSG_WAITALL)
        assert wires.printed().strip().isdigit()
        server.fork(ORDER, wires.theirs)
        assert wires.printed().strip().isdigit()


def test_a_kernel_that_dies_before_reading_an_answer_ends_the_zygote(server: Zygote) -> None:
    with _Wires() as wires:
        server._control.settimeout(SOON)
        socket.send_fds(server._control, [LENGTH.pack(len(ORDER))], wires.theirs)
        server._control.sendall(ORDER)
        assert wires.printed()
        _wait_until_asleep(server)
        server.close()
    assert server._process.returncode == 0, "the zygote exited with an error"


def test_a_zygote_that_did_not_reply_in_time_gets_no_further_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer to the first request would be taken for the answer to the second, and name the wrong process."""
    monkeypatch.setattr(zygote, "START_SECONDS", 0.05)
    server = Zygote()  # The zygote imports torch first.
    try:
        with _Wires() as wires, pytest.raises(LaunchError, match="did not reply"):
            server.fork(ORDER, wires.theirs)
        assert not server.alive()
        assert server._log.closed
    finally:
        server.close()


def test_a_stop_between_two_replies_does_not_lose_the_first(server: Zygote) -> None:
    with _Wires() as first, _Wires() as second, _Wires() as third:
        for wires in (first, second):  # The second stop comes after the first reply has been read.
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(RunStoppedError):
                server.fork(ORDER, wires.theirs, stopping=lambda: True)
            os.kill(server.pid, signal.SIGCONT)
            assert wires.printed()
            _wait_until_asleep(server)
        pid = server.fork(ORDER, third.theirs)
        assert third.printed() == f"{pid}\n".encode()


def test_requests_are_served_before_deferred_imports() -> None:
    made = Zygote()
    assert not made.ready()

    def imported() -> bytes:
        with _Wires(print_imported) as wires:
            made.fork(ORDER, wires.theirs)
            return wires.printed()

    try:
        assert imported() == b"True False\n"
        assert made.ready()
        deadline = time.monotonic() + SOON
        while imported() != b"True True\n":
            assert time.monotonic() < deadline, "the zygote did not use its idle time"
            time.sleep(3)  # Wait for the imports, and for a second of idle time.
    finally:
        made.close()


def test_imports_of_an_optimizer_precede_the_fork_of_a_rank_that_trains(server: Zygote) -> None:
    """While other ranks run, the zygote must report when they end, and does not wait for imports."""
    with _Wires(sleep_long) as waiting, _Wires(print_imported) as wires:
        other = server.fork(ORDER, waiting.theirs)
        server.fork(ORDER, wires.theirs, trains=True)
        assert wires.printed() == b"True False\n"
        os.kill(other, signal.SIGKILL)
        for each in (waiting, wires):
            assert os.read(each.ours[3], zygote.STATUS.size), "the server has reported the end"
        server.ranks.clear()
        server.fork(ORDER, wires.theirs, trains=True)
        assert wires.printed() == b"True True\n"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_the_exit_of_the_zygote_does_not_affect_the_next_launch() -> None:
    zygote.close_zygote()
    ending = zygote.ensure_zygote()
    ending.ranks.add(0)  # A zygote that has ranks must end them, so its exit takes until it has imported torch.
    press = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            zygote.close_zygote()
        assert zygote._zygote is None
    finally:
        press.join()
        ending._process.kill()
        ending.close()
        zygote.close_zygote()


def test_forks_of_an_oversubscribed_launch_find_a_thread_team_that_ends_when_the_zygote_is_idle(server: Zygote) -> None:
    """If there are more threads than CPUs, libgomp lets them spin only briefly."""
    threads = psutil.Process(server.pid).num_threads
    before = threads()
    with _Wires() as wires:
        server.fork(ORDER, wires.theirs, crowded=True)
        assert threads() == before + len(os.sched_getaffinity(0))
        assert wires.printed()
    until(lambda: threads() <= before)


@pytest.mark.parametrize(
    ("ranks", "threads", "expected"), [(1, 1, False), (1, None, False), (8192, 1, False), (8192, 2, True)]
)
def test_launches_are_oversubscribed_by_ranks_with_several_threads(
    ranks: int, threads: int | None, expected: bool
) -> None:
    orders = [WorkerOrder(rank, {}, threads, InheritedState()) for rank in range(ranks)]
    assert is_crowded(orders) is expected


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("TORCH_LOGS", True),
        ("OMP_WAIT_POLICY", True),
        ("OMP_NUM_THREADS", False),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", False),
    ],
)
def test_a_server_is_replaced_only_for_variables_that_its_imports_read(name: str, *, is_read: bool) -> None:
    assert (name in zygote.server_variables({name: "1"})) is is_read
