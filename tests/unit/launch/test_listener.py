"""The listener of a run and its connections to hosts, with peers, networks and processes that misbehave."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from notebook_accelerate import LaunchConfig
from notebook_accelerate._collection import instances
from notebook_accelerate.errors import AuthenticationError, ChannelClosedError, LaunchError
from notebook_accelerate.launch.hosts import joining
from notebook_accelerate.launch.hosts.host_facts import own_hello
from notebook_accelerate.launch.hosts.remote import listener, stream
from notebook_accelerate.launch.hosts.remote.host_protocol import FramesEvent, HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import Stream
from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, dispatch
from notebook_accelerate.telemetry import Event, Stamped, encode
from tests.support.connections import connections
from tests.support.loopback_proxy import LoopbackProxy
from tests.support.runs import launch
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
SECRET = stream.new_secret()
THREADS = ("notebook-accelerate-listener", "notebook-accelerate-connection")


class _Kernel:
    """A kernel's listener, with the hosts that are connected to it."""

    def __init__(self, keep_alive: tuple[float, float] = stream.KEEP_ALIVE) -> None:
        self.reports: list[str] = []
        self.listener = HostListener("127.0.0.1", SECRET, report=self.reports.append, keep_alive=keep_alive)
        self.port = self.listener.port
        self.ends: list[Stream] = []

    def connect_host(self, node: int = 1) -> tuple[Stream, Stream]:
        """Connect a host. Return the host's and the kernel's end of the stream."""
        host = connect_to_kernel("127.0.0.1", self.port, SECRET, HelloEvent(node, f"machine-{node}"))
        self.ends.append(host)
        return host, self.next_end(node)

    def next_end(self, node: int = 1) -> Stream:
        incoming = self.listener.next_host(SECONDS)
        assert incoming is not None, self.reports
        assert incoming.hello.node == node
        self.ends.append(incoming.stream)
        return incoming.stream

    def close(self) -> None:
        self.listener.close()
        for end in self.ends:
            end.close()
        until(lambda: not _threads())


def _count(kind: str) -> int:
    """Return the number of open files ("fd") or threads ("task") of this process."""
    return len(list(Path("/proc/self", kind).iterdir()))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in THREADS]


@pytest.fixture
def kernel() -> Iterator[_Kernel]:
    made = _Kernel()
    yield made
    made.close()


def _output(text: bytes = b"x") -> FramesEvent:
    return FramesEvent(0, text)


def _exchange(host: Stream, kernel: Stream) -> None:
    """Check that a connection carries data both ways."""
    for sender, receiver in ((host, kernel), (kernel, host)):
        sender.send(_output(b"are you there"))
        assert [event for _, event in receiver.receive(SECONDS)] == [_output(b"are you there")]


def _until_end(end: Stream) -> list[Any]:
    found: list[Any] = []
    with suppress(ChannelClosedError):
        while True:
            found += [event for _, event in end.receive(SECONDS)]
    return found


# ---- hosts that join


def test_a_selector_waits_for_hosts_that_join_while_others_are_connected(kernel: _Kernel) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(kernel.listener, selectors.EVENT_READ)
        for node in (1, 2, 3):
            assert not selector.select(0)
            assert kernel.listener.next_host(0) is None
            host = connect_to_kernel("127.0.0.1", kernel.port, SECRET, HelloEvent(node, "late"))
            kernel.ends.append(host)
            assert selector.select(SECONDS)
            incoming = kernel.listener.next_host(0)
            assert incoming is not None
            kernel.ends.append(incoming.stream)
            assert incoming.hello.node == node
            for earlier in range(0, len(kernel.ends), 2):
                _exchange(*kernel.ends[earlier : earlier + 2])


def test_hosts_that_joined_together_are_announced_until_all_are_returned(kernel: _Kernel) -> None:
    for node in range(5):
        kernel.ends.append(connect_to_kernel("127.0.0.1", kernel.port, SECRET, HelloEvent(node, "together")))
    until(lambda: kernel.listener._incoming.qsize() == 5)
    with selectors.DefaultSelector() as selector:
        selector.register(kernel.listener, selectors.EVENT_READ)
        for _ in range(5):
            assert selector.select(SECONDS)
            incoming = kernel.listener.next_host(0)
            assert incoming is not None
            kernel.ends.append(incoming.stream)
        assert kernel.listener.next_host(0) is None
        assert not selector.select(0)


def test_a_name_with_several_addresses_is_tried_until_one_accepts(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, port: int, **options: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port)) for ip in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    host = connect_to_kernel("head", kernel.port, SECRET, HelloEvent(1, "machine-1"))
    kernel.ends.append(host)
    _exchange(host, kernel.next_end())


def test_a_port_without_a_listener_is_not_an_authentication_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=f"nothing listens on 127.0.0.1:{port}"):
        connect_to_kernel("127.0.0.1", port, SECRET, HelloEvent(1, "x"))
    assert not _threads()


def test_a_taken_port_is_reported_and_nothing_stays_open(kernel: _Kernel) -> None:
    before = _count("fd")
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1"):
        HostListener("127.0.0.1", SECRET, kernel.port)
    assert _count("fd") == before
    with pytest.raises(OSError, match=r"cannot listen on nowhere\.invalid"):
        HostListener("nowhere.invalid", SECRET)
    assert _count("fd") == before


def test_connecting_to_a_peer_that_accepts_and_sends_nothing_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        connect_to_kernel("127.0.0.1", silent.getsockname()[1], SECRET, HelloEvent(1, "x"))


def test_a_first_notebook_that_is_killed_before_it_answers_is_not_reported_as_having_another_secret() -> None:
    """The machine of a killed kernel resets the connection, like a notebook that rejects the secret, but only once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        closing = threading.Timer(joining.SURE_SECONDS + 1.0, silent.close)
        closing.start()
        hello = own_hello(processes=1, accelerator="cpu")
        with pytest.raises(LaunchError, match=r"node 0 did not join within 6 s: no run answers"):
            joining.connect((address, port), "secret", hello, 6.0, stream.KEEP_ALIVE)
        closing.join()


# ---- peers that misbehave


def test_silent_connections_are_closed_after_the_handshake_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    with closing(_Kernel()) as kernel:
        with socket.create_connection(("127.0.0.1", kernel.port), timeout=SECONDS) as peer:
            while peer.recv(64):
                pass
        until(lambda: kernel.reports)


def test_the_number_of_connections_in_the_handshake_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 20)
    with closing(_Kernel()) as kernel:
        host, ours = kernel.connect_host()
        peers = [socket.create_connection(("127.0.0.1", kernel.port), timeout=SECONDS) for _ in range(100)]
        until(lambda: kernel.listener._refused >= 80)
        assert len(_accepted(kernel.port)) <= 21
        assert "too many connections were waiting" in kernel.reports[0]
        _exchange(host, ours)
        kernel.connect_host(2)
        for peer in peers:
            peer.close()


def _accepted(port: int) -> list[Any]:
    return [c for c in connections("tcp") if c.laddr.port == port and c.status == "ESTABLISHED"]


def test_thousands_of_connections_leave_the_hosts_connected(kernel: _Kernel) -> None:
    host, ours = kernel.connect_host()
    for number in range(2000):
        with socket.create_connection(("127.0.0.1", kernel.port), timeout=SECONDS) as peer:
            peer.send(os.urandom(number % 200))
            if number % 3:
                # Closing the socket then resets the connection.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _exchange(host, ours)
    kernel.connect_host(2)
    until(lambda: not kernel.listener._waiting)


def _dealer(kernel: _Kernel) -> tuple[Any, Any]:
    """Return the context and the socket of a peer that knows the secret but follows no other rule."""
    keys = stream.derive_keys(SECRET)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = keys.kernel_public
    dealer.curve_publickey, dealer.curve_secretkey = keys.host_public, keys.host_secret
    dealer.connect(f"tcp://127.0.0.1:{kernel.port}")
    return context, dealer


def _message(sent: int, data: bytes) -> bytes:
    return stream.HEADER.pack(sent, 0, False) + data


def _frames(event: Event) -> bytes:
    return encode([Stamped(0.0, event)])


def _await_last(dealer: Any) -> None:
    """Wait until the kernel ends the stream. Pings may arrive before the end."""
    dealer.rcvtimeo = int(1000 * SECONDS)
    while not stream.HEADER.unpack_from(dealer.recv())[2]:
        pass


STRANGE: dict[str, list[bytes]] = {
    "an empty message": [b""],
    "a short message": [b"D123"],
    "data from the middle": [_message(5, b"hello")],
    "bytes that are no frames": [_message(0, b"\xff" * 100)],
    "another event than a hello": [_message(0, _frames(_output()))],
    "several parts": [b"?", b"D"],
    "a message above the maximum": [_message(0, bytes(1 << 20))],
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_host_that_sends_invalid_data_is_refused_and_others_are_served(kernel: _Kernel, name: str) -> None:
    host, ours = kernel.connect_host()
    context, dealer = _dealer(kernel)
    for _ in range(3):
        dealer.send_multipart(STRANGE[name])
    if name != "a message above the maximum":  # libzmq itself closes the connection in this case.
        _await_last(dealer)
    _exchange(host, ours)
    assert kernel.listener.next_host(0) is None
    context.destroy(linger=0)
    kernel.connect_host(2)


def test_a_first_message_that_cannot_be_decoded_ends_the_stream(kernel: _Kernel) -> None:
    context, dealer = _dealer(kernel)
    dealer.send(_message(0, b"\xff" * 100))
    _await_last(dealer)
    context.destroy(linger=0)


def test_a_host_that_exceeds_the_window_is_ended(kernel: _Kernel) -> None:
    context, dealer = _dealer(kernel)
    sent = 0
    hello = _frames(HelloEvent(7, "greedy"))
    for data in (hello, *[bytes(1 << 18)] * 40):
        dealer.send(_message(sent, data))
        sent += len(data)
    ours = kernel.next_end(7)
    until(lambda: ours.ended)
    _until_end(ours)
    context.destroy(linger=0)


@pytest.mark.parametrize("reader", ["kernel", "host"])
def test_a_peer_that_does_not_read_has_bounded_memory_and_delays_no_other(kernel: _Kernel, reader: str) -> None:
    ends = kernel.connect_host()
    writer, silent = ends if reader == "kernel" else ends[::-1]
    sent: list[int] = []

    def send() -> None:
        with suppress(ChannelClosedError):
            while True:
                writer.send(_output(bytes(1 << 20)))
                sent.append(1)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: _is_stalled(sent))
    assert len(sent) < 3 * stream.WINDOW >> 20
    _exchange(*kernel.connect_host(2))
    received, wanted = 0, len(sent) + 20
    while received < wanted:  # Once the peer reads again, everything arrives, including new messages.
        received += sum(len(event.payload) >> 20 for _, event in silent.receive(SECONDS))  # type: ignore[attr-defined]
    silent.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    until(lambda: [each.ended for each in kernel.listener._hosts.values()].count(False) == 1)


def _is_stalled(sent: list[int]) -> bool:
    before = len(sent)
    time.sleep(0.5)
    return bool(sent) and len(sent) == before


@pytest.mark.parametrize("closes", ["kernel", "host"])
def test_closing_an_end_works_while_the_other_does_not_read(
    kernel: _Kernel, closes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FLUSH_SECONDS", 0.5)
    monkeypatch.setattr(stream, "TICK_SECONDS", 0.1)
    ends = kernel.connect_host()
    writer = ends[0] if closes == "host" else ends[1]
    thread = threading.Thread(target=lambda: _send_until_closed(writer))
    thread.start()
    until(lambda: writer._sent - writer._acknowledged >= stream.WINDOW)
    writer.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    if closes == "kernel":
        until(lambda: all(each.is_over(0.0) for each in kernel.listener._hosts.values()))
    else:
        until(lambda: THREADS[1] not in _threads())


def _send_until_closed(end: Stream) -> None:
    with suppress(ChannelClosedError):
        while True:
            end.send(_output(bytes(1 << 20)))


def test_busy_streams_leave_time_for_other_work(kernel: _Kernel) -> None:
    called: list[int] = []
    pairs = [kernel.connect_host(node) for node in range(3)]
    with DispatchSelector() as selector:
        for number, (host, ours) in enumerate(pairs):
            host.send(*[_output(bytes(1 << 16))] * 40)
            ours.register(selector, partial(_read_slowly, ours, number, called))
        until(lambda: len(kernel.listener._arrived) == 3)
        rounds = 0
        while len(called) < 120:
            dispatch(selector, SECONDS)
            rounds += 1
    assert rounds >= 10, "one call must not handle everything that has arrived"
    assert set(called[:20]) == {0, 1, 2}, "one busy stream must not delay the others"


def _read_slowly(end: Stream, number: int, called: list[int]) -> None:
    received = end.receive(0.0)
    time.sleep(0.03 * len(received))
    called += [number] * len(received)


def test_data_sent_before_an_end_closed_arrives(kernel: _Kernel) -> None:
    for count in (1, 3, 20):
        host, ours = kernel.connect_host()
        # The host never reads these messages, so its socket is closed while it has unread data.
        ours.send(*[_output(bytes(1000))] * 50)
        host.send(*[_output(bytes(1 << 17))] * count)
        host.close()
        assert len(_until_end(ours)) == count


# ---- lost hosts


@contextmanager
def _host_process(kernel: _Kernel, then: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host in a separate process, which is killed at the end of the block."""
    code = f"""
import sys, time
from notebook_accelerate.launch.hosts.remote.host_protocol import FramesEvent, HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel
stream = connect_to_kernel("127.0.0.1", {kernel.port}, bytes.fromhex("{SECRET.hex()}"), HelloEvent(1, "machine-1"))
{then}
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=_environment(), **options) as process:
        try:
            yield process
        finally:
            process.kill()


SEND_FOR_EVER = "while True: stream.send(FramesEvent(0, bytes(1 << 16)))"


@pytest.mark.parametrize("then", ["time.sleep(600)", SEND_FOR_EVER])
def test_a_killed_host_is_noticed(kernel: _Kernel, then: str) -> None:
    with _host_process(kernel, then):
        ours = kernel.next_end()
    _until_end(ours)
    ours.close()
    until(lambda: not kernel.listener._hosts)


def test_messages_that_a_host_sent_before_it_was_killed_reach_a_busy_kernel(kernel: _Kernel) -> None:
    """The kernel notices the loss when it cannot send a message, but first reads what libzmq has received."""
    then = 'while sys.stdin.readline(): stream.send(FramesEvent(0, b"x")); time.sleep(0.005)'
    with _host_process(kernel, then, stdin=subprocess.PIPE) as process:
        ours = kernel.next_end()
        assert process.stdin is not None
        killing = subprocess.Popen(["sh", "-c", f"sleep 7; kill -9 {process.pid}"])
        process.stdin.write(b"\n" * 500)
        process.stdin.flush()
        ctypes.PyDLL(None).sleep(9)  # The call holds the GIL, so that the kernel is busy.
        killing.wait()
    assert len(_until_end(ours)) == 500


def test_a_suspended_host_is_lost_after_the_time_of_the_heartbeats() -> None:
    with closing(_Kernel(keep_alive=(1, 2))) as kernel, _host_process(kernel, "time.sleep(600)") as process:
        ours = kernel.next_end()
        process.send_signal(signal.SIGSTOP)
        assert _until_end(ours) == []


def test_a_host_whose_python_code_hangs_stays_connected() -> None:
    hold_the_gil = "import ctypes; ctypes.PyDLL(None).sleep(8)"
    # Let the host join first. Otherwise, its hello would be sent after the sleep, together with the next message.
    then = f"stream.receive(); {hold_the_gil}; stream.send(FramesEvent(0, b'back')); time.sleep(600)"
    # The time to live is less than the time without Python code, but more than a busy machine needs.
    keep_alive = (1, 4)
    with closing(_Kernel(keep_alive)) as kernel, _host_process(kernel, then):
        ours = kernel.next_end()
        ours.send(_output())
        assert [event for _, event in ours.receive(SECONDS)] == [_output(b"back")]


@pytest.mark.parametrize("sends", [False, True])
def test_a_host_notices_that_its_kernel_was_killed(sends: bool) -> None:
    code = f"""
import time
from notebook_accelerate.launch.hosts.remote.listener import HostListener
listener = HostListener("127.0.0.1", bytes.fromhex("{SECRET.hex()}"))
print(listener.port, flush=True)
incoming = listener.next_host(600)
while {sends}: incoming.stream.receive()
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, env=_environment())
    assert process.stdout is not None
    with process.stdout:
        port = int(process.stdout.readline())
    host = connect_to_kernel("127.0.0.1", port, SECRET, HelloEvent(1, "machine-1"))
    if sends:
        threading.Timer(0.5, process.kill).start()
        _send_until_closed(host)
    else:
        process.kill()
        _until_end(host)
    process.wait()
    host.close()
    until(lambda: not _threads())


def _run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=_environment(), timeout=SECONDS, capture_output=True, text=True, check=False
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# ---- the kernel's process


def test_connections_leave_no_descriptor_and_no_thread() -> None:
    def once() -> None:
        kernel = _Kernel()
        for node in range(1, 11):
            kernel.connect_host(node)
        with pytest.raises(AuthenticationError):
            connect_to_kernel("127.0.0.1", kernel.port, stream.new_secret(), HelloEvent(1, "x"))
        kernel.close()

    once()
    gc.collect()
    before, threads = _count("fd"), _count("task")
    known = kernel_descriptors.known()
    for _ in range(5):
        once()
    until(lambda: _count("task") == threads)
    assert _count("fd") == before
    assert kernel_descriptors.known() == known, "forked ranks must not lose files that now have these numbers"


def test_a_connected_host_takes_no_other_descriptor(kernel: _Kernel) -> None:
    host, ours = kernel.connect_host()
    context, dealer = _dealer(kernel)
    until(lambda: kernel.listener._waiting)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))  # This makes poll(2) accept no more descriptors in one call.
    try:
        dealer.send(_message(0, _frames(HelloEvent(2, "machine-2"))))
        kernel.next_end(2)
        _exchange(host, ours)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    context.destroy(linger=0)
    kernel.connect_host(3)


def test_a_failing_report_does_not_end_the_listener() -> None:
    with closing(_Kernel()) as kernel:

        def fail(text: str) -> None:
            kernel.reports.append(text)
            raise RuntimeError("the notebook's front end is gone")

        kernel.listener._report = fail
        with socket.create_connection(("127.0.0.1", kernel.port)) as peer:
            peer.sendall(b"x" * 100)
        until(lambda: kernel.reports)
        kernel.connect_host()


def _touch_zmq() -> tuple[list[str], int, int]:
    """In a forked rank, collect inherited objects and use ZeroMQ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.unfreeze()
        inherited = instances(zmq.Context)
        for each in inherited:
            each.destroy(linger=0)
        count = len(inherited)
        del inherited
        gc.collect()
    files = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    own = HostListener("127.0.0.1", SECRET)
    host = connect_to_kernel("127.0.0.1", own.port, SECRET, HelloEvent(3, "nested"))
    incoming = own.next_host(SECONDS)
    assert incoming is not None
    _exchange(host, incoming.stream)
    host.close()
    incoming.stream.close()
    own.close()
    return [str(each.message) for each in caught], count, sum(name.startswith("socket:") for name in files)


def test_forked_ranks_never_touch_the_kernels_context(kernel: _Kernel) -> None:
    ends = kernel.connect_host()
    run = launch(_touch_zmq, config=LaunchConfig(cpu=True))
    assert run.plan.start_method == "fork"
    for _, contexts, sockets in run.results:
        assert contexts >= 2, "there are the contexts of the listener and of the host"
        assert sockets == 1, "the rank has its own channel"
    _exchange(*ends)
    kernel.connect_host(2)


def test_a_process_exits_with_open_connections() -> None:
    code = f"""
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
secret = bytes.fromhex("{SECRET.hex()}")
listener = HostListener("127.0.0.1", secret)
host = connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(1, "machine-1"))
incoming = listener.next_host(60)
print("done")
"""
    done = _run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_launch_on_one_machine_does_not_import_zeromq() -> None:
    code = """
import sys
from notebook_accelerate import notebook_launcher
def train():
    import sys
    return "zmq" in sys.modules
if __name__ == "__main__":
    run = notebook_launcher(train, num_processes=2)
    print("zmq" in sys.modules, *run.results)
"""
    done = _run_python(code)
    assert done.stdout.splitlines()[-1] == "False False False", done.stdout + done.stderr


# ---- the network


class _Network(LoopbackProxy):
    """Carries connections on loopback. Tests can change the host's bytes, stall the data, and reset the connections."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.change: Callable[[bytes], bytes] = bytes
        self.flows = threading.Event()
        self.flows.set()
        self._start()

    def _copy_up(self, caller: socket.socket, called: socket.socket) -> None:
        self._copy(caller, called, lambda data: self.change(data))  # noqa: PLW0108 - a test sets it later

    def _copy_down(self, called: socket.socket, caller: socket.socket) -> None:
        self._copy(called, caller, bytes)

    def _copy(self, source: socket.socket, to: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.flows.wait()
                to.sendall(change(data))
            to.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR if each is self._listener else socket.SHUT_RD)
            each.close()


def test_data_sent_before_an_end_closed_arrives_over_a_network_that_stalls(kernel: _Kernel) -> None:
    network = _Network(kernel.port)
    for _ in range(3):
        host = connect_to_kernel("127.0.0.1", network.port, SECRET, HelloEvent(1, "machine-1"))
        ours = kernel.next_end()
        network.flows.clear()
        host.send(*[_output(bytes(1 << 17))] * 28)
        closing = threading.Thread(target=host.close)
        closing.start()
        time.sleep(1.0)  # By now, the buffers of the connection are full.
        network.flows.set()
        assert len(_until_end(ours)) == 28
        closing.join()
    network.reset()


def test_a_forged_message_and_a_reset_do_not_abort_the_process() -> None:
    with closing(_Kernel(keep_alive=(1, 20))) as kernel:
        network = _Network(kernel.port)
        host = connect_to_kernel("127.0.0.1", network.port, SECRET, HelloEvent(1, "machine-1"))
        ours = kernel.next_end()
        network.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        host.send(_output())
        time.sleep(0.3)
        network.reset()
        assert _until_end(ours) == []
        time.sleep(2.5)  # At the next heartbeat, an assertion in libzmq 4.3.5 would fail.
        host.close()
        kernel.connect_host(2)
