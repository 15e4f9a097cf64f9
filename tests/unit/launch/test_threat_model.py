"""SECURITY.md line by line: who may connect to a run, and what peers receive before they are authenticated."""

from __future__ import annotations

import ast
import os
import pickle
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import notebook_accelerate
from notebook_accelerate import LaunchConfig, notebook_launcher, open_run
from notebook_accelerate.config import environ
from notebook_accelerate.config.environ import KERNEL_ONLY
from notebook_accelerate.errors import AuthenticationError, ChannelClosedError, LaunchError, SerializationError
from notebook_accelerate.launch import start
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_protocol import is_own, listen
from notebook_accelerate.launch.hosts.remote import stream
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection, RemoteRank
from notebook_accelerate.launch.hosts.remote.host_protocol import CHANNEL, SAMPLES, EndedEvent, HelloEvent, RelayEvent
from notebook_accelerate.launch.hosts.remote.listener import (
    MAX_REPORTS,
    HostListener,
    connect_to_kernel,
)
from notebook_accelerate.launch.hosts.remote.stream import Stream
from notebook_accelerate.telemetry import Channel, MetricEvent
from notebook_accelerate.telemetry.channel import MAX_JSON_BYTES
from tests.support.connections import connections
from tests.support.loopback_proxy import LoopbackProxy
from tests.support.simulated import Received
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
HELLO = HelloEvent(1, "worker-1", {})


class _Listening:
    """A listener with the secret of its run, and its reports of refused connections."""

    def __init__(self) -> None:
        self.secret = stream.new_secret()
        self.reports: list[str] = []
        self.streams: list[Stream] = []
        self.host_listener = HostListener("127.0.0.1", self.secret, report=self.reports.append)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.host_listener.port), timeout=SECONDS)

    def wait_for_reports(self, count: int = 1) -> None:
        until(lambda: len(self.reports) >= count)

    def connect_host(self) -> tuple[Stream, Stream]:
        """Connect a host that is expected, and check that it is accepted. Return its stream and the kernel's."""
        stream = connect_to_kernel("127.0.0.1", self.host_listener.port, self.secret, HELLO)
        incoming = self.host_listener.next_host(SECONDS)
        assert incoming is not None, self.reports
        assert incoming.hello.host == "worker-1"
        self.streams += [stream, incoming.stream]
        return stream, incoming.stream

    def answers(self) -> bool:
        """Return whether the port of the listener still accepts connections."""
        with suppress(OSError), self.connect():
            return True
        return False


@pytest.fixture
def step() -> Iterator[_Listening]:
    made = _Listening()
    yield made
    made.host_listener.close()
    for made_stream in made.streams:
        made_stream.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "notebook-accelerate-listener"])


# ---- a run on one machine


def _inspect() -> tuple[list[tuple[Any, ...]], str, bool]:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.reduce(torch.ones(1))
    inside = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    found = [(c.family, c.status, c.laddr, c.raddr) for c in connections()]
    accelerator.wait_for_everyone()
    return found, inside, any(name in os.environ for name in KERNEL_ONLY)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_on_one_machine_listens_on_loopback_only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct horse battery staple"
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", secret)
    mine = {(c.laddr, c.status) for c in connections()}
    seen: list[Any] = []
    config = LaunchConfig(num_processes=2, start_method=method, use_port=0, cpu=True, panel=False, block=False)
    run = start(config, _inspect)
    while not run.wait(0.05):
        seen += [c for c in connections() if (c.laddr, c.status) not in mine]
    for found, inside, has_secret in run.results:
        assert found, "the rank has the connections of its process group"
        addresses = {address.ip for _, _, laddr, raddr in found for address in (laddr, raddr) if address}
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        assert secret not in inside, "processes that a rank starts do not inherit the secret"
        assert not has_secret
    # Until rank 0 takes the process group's port over, the kernel may hold it. No peer ever connects to the kernel.
    assert {c.laddr.ip for c in seen} <= {"127.0.0.1"}
    assert not [c for c in seen if c.raddr]
    assert {c.laddr.port for c in seen} <= {run.plan.port}
    assert secret not in run.report().html + run.report().text + repr(run) + "\n".join(run.logs())


def _inspect_store() -> dict[str, Any]:
    """Use three process groups one after the other, and check how the ranks find each other."""
    import torch
    import torch.distributed as dist

    from notebook_accelerate import Accelerator
    from notebook_accelerate.state import AcceleratorState

    for _ in range(3):
        total = int(Accelerator().reduce(torch.ones(1)))
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    folder = os.environ[environ.STORE]
    with socket.socket() as client:
        listens = client.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0
    as_another = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else None
    refused = as_another and subprocess.run(["ls", folder], capture_output=True, check=False, **as_another).returncode
    return {
        "total": total, "folder": folder, "mode": stat.S_IMODE(Path(folder).stat().st_mode), "listens": listens,
        "refused": refused,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
@pytest.mark.usefixtures("zygote")
def test_no_other_user_can_join_the_process_group(method: str) -> None:
    run = start(LaunchConfig(num_processes=2, start_method=method, cpu=True, panel=False), _inspect_store)
    for found in run.results:
        assert found["total"] == 2
        assert found["mode"] == 0o700
        assert not found["listens"]
        assert found["refused"] != 0
        assert not Path(found["folder"]).exists(), "the folder is removed with the run"


_CONNECT = """
import os, socket, sys
os.setgroups([]) if os.getuid() == 0 else None
os.setuid(65534) if os.getuid() == 0 else None
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""


def test_no_other_user_can_attach_to_a_detached_run(monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_directory.new_socket()
    with listen(path) as listener:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if os.getuid() == 0:  # Only root can switch to another user.
            done = subprocess.run(
                [sys.executable, "-c", _CONNECT, str(path)], capture_output=True, text=True, check=True
            )
            assert done.stdout == "refused\n"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert is_own(ours)
            monkeypatch.setattr(os, "getuid", lambda: 12345)
            assert not is_own(ours)
        assert listener.fileno() >= 0
    path.unlink()


_PREPARE = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.umask(0)
os.makedirs(sys.argv[1])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_no_other_user_can_prepare_the_folders_of_a_detached_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)  # This is like HOME=/tmp in a container.
    for folder in (tmp_path.parent, tmp_path.parent.parent):  # Otherwise, other users cannot enter pytest's folders.
        folder.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    runs = tmp_path / ".local" / "state" / "notebook-accelerate" / "runs"
    subprocess.run([sys.executable, "-c", _PREPARE, str(runs)], check=True)
    with pytest.raises(LaunchError, match=r"\.local belongs to .* set XDG_STATE_HOME"):
        notebook_launcher(print, num_processes=1, detach=True)
    assert not list(runs.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_results_of_another_user_are_not_unpickled(tmp_path: Path) -> None:
    run = notebook_launcher(int, num_processes=1, start_method="fork", save=tmp_path, panel=False)
    assert run.folder is not None
    file = run.folder / "result-0.pickle"
    os.chown(file, 65534, 65534)
    with pytest.raises(SerializationError, match=r"belongs to .* cp -r"):
        _ = open_run(run.folder).results
    os.chown(file, 0, 0)
    assert open_run(run.folder).results == (0,)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SerializationError, match="not a regular file"):
        _ = open_run(run.folder).results


# ---- listening for other machines


def test_the_kernel_listens_on_one_address_for_the_hosts_it_expects() -> None:
    one = _Listening()
    listening = [c for c in connections() if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == one.host_listener.port] == ["127.0.0.1"]
    kept = one.connect_host()
    one.host_listener.close()
    with pytest.raises(AuthenticationError):
        connect_to_kernel("127.0.0.1", one.host_listener.port, one.secret, HELLO)
    for kept_stream in kept:
        kept_stream.close()
    until(lambda: not one.answers())


def test_a_peer_without_the_secret_is_refused_and_reported(step: _Listening) -> None:
    with pytest.raises(AuthenticationError, match="with this secret"):
        connect_to_kernel("127.0.0.1", step.host_listener.port, stream.new_secret(), HELLO)
    step.wait_for_reports()
    assert re.fullmatch(
        r"a connection from (127\.0\.0\.1|an unknown address) was refused: "
        r"it does not know the run's secret, or uses another protocol", *step.reports,
    ), "the address is unknown if the connection was closed before the lookup"  # fmt: skip
    step.connect_host()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200, b"\xff" * 200, os.urandom(4096), b"\x16\x03\x01" * 99]
)
def test_a_peer_of_another_protocol_is_refused(step: _Listening, data: bytes) -> None:
    with step.connect() as peer:
        peer.sendall(data)
        _read_to_end(peer)
    step.wait_for_reports()
    assert "uses another protocol" in step.reports[0]
    step.connect_host()


def test_an_unauthenticated_peer_receives_no_data_that_helps_to_guess_the_secret(step: _Listening) -> None:
    another = _Listening()
    received = []
    for listening in (step, another):
        with listening.connect() as peer:
            peer.sendall(GREETING)
            greeting = b""
            while len(greeting) < len(GREETING):
                greeting += peer.recv(len(GREETING) - len(greeting))
            peer.sendall(_frame(b"\x05HELLO\x01\x00" + os.urandom(192)))
            received.append(greeting + _read_to_end(peer))
    another.host_listener.close()
    assert received[0] == received[1], "the greeting does not depend on the secret"
    assert len(received[0]) == len(GREETING)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The first bytes that a client sends (ZeroMQ RFC 23)."""


def _frame(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body)]) + body


def _read_to_end(connection: socket.socket) -> bytes:
    connection.settimeout(SECONDS)
    data = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


class _Wire(LoopbackProxy):
    """Carries a host's connection. A test can change the frames that the host sends after its hello.

    Args:
        port: The port of the listener.
        change: A function that is called with three frames, and returns the bytes to send instead.
    """

    def __init__(self, port: int, change: Callable[[list[bytes]], bytes] = b"".join) -> None:
        super().__init__(port)
        self.sent, self.answered = bytearray(), bytearray()
        self.frames: list[bytes] = []
        self._change = change
        self._start()

    def _copy_up(self, caller: socket.socket, called: socket.socket) -> None:
        host, kernel = caller, called
        buffer, place = bytearray(), 0
        with suppress(OSError):
            while data := host.recv(1 << 16):
                self.sent += data
                buffer += data
                if place < len(GREETING):  # The greeting may arrive in parts.
                    greeting = bytes(buffer[place : len(GREETING)])
                    kernel.sendall(greeting)
                    place += len(greeting)
                while place >= len(GREETING) and (end := _frame_end(buffer, place)) is not None:
                    self._pass(bytes(buffer[place:end]), kernel)
                    place = end
            kernel.shutdown(socket.SHUT_WR)

    def _pass(self, frame: bytes, kernel: socket.socket) -> None:
        self.frames.append(frame)
        if (own := len(self.frames) - HANDSHAKE_FRAMES) <= 0:
            kernel.sendall(frame)
        elif own % 3 == 0:
            kernel.sendall(self._change(self.frames[-3:]))

    def _copy_down(self, called: socket.socket, caller: socket.socket) -> None:
        with suppress(OSError):
            while data := called.recv(1 << 16):
                self.answered += data
                caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


HANDSHAKE_FRAMES = 3
"""The number of frames before the first one that a test changes: HELLO, INITIATE, and the one with the `HelloEvent`."""


def _frame_end(data: bytes | bytearray, start: int) -> int | None:
    if len(data) < start + 2:
        return None
    long = data[start] & 2
    size = int.from_bytes(data[start + 1 : start + 9], "big") if long else data[start + 1]
    end = start + (9 if long else 2) + size
    return end if len(data) >= end else None


@contextmanager
def _connected(step: _Listening, change: Callable[[list[bytes]], bytes] = b"".join) -> Iterator[tuple[Any, ...]]:
    """Connect a host through a `_Wire`. Yield the wire, and the streams of the host and of the kernel."""
    wire = _Wire(step.host_listener.port, change)
    host = connect_to_kernel("127.0.0.1", wire.port, step.secret, HELLO)
    incoming = step.host_listener.next_host(SECONDS)
    assert incoming is not None
    try:
        yield wire, host, incoming.stream
    finally:
        host.close()
        incoming.stream.close()
        wire.close()


def test_the_network_cannot_read_the_messages(step: _Listening) -> None:
    with _connected(step) as (wire, host, kernel):
        for number in range(3):
            host.send(MetricEvent({"confidential": 1.0}, number))
            time.sleep(0.05)  # The pause makes each message a frame of its own.
        kernel.send(MetricEvent({"confidential": 1.0}, 0))
        assert len(_steps(kernel, 3)) == 3
        assert _steps(host, 1) == [0]
        for seen in (wire.sent, wire.answered):
            assert len(seen) > 300
            assert b"confidential" not in seen
            assert b"worker-1" not in seen


def _steps(stream: Stream, count: int) -> list[int]:
    """Return the steps of the metrics that arrive next."""
    found: list[Any] = []
    while len(found) < count:
        found += [event.step for _, event in stream.receive(SECONDS)]  # type: ignore[attr-defined]
    return found


def test_a_recorded_connection_cannot_be_replayed(step: _Listening) -> None:
    with _connected(step) as (wire, _, _), step.connect() as peer:
        peer.sendall(bytes(wire.sent))
        _read_to_end(peer)
    step.wait_for_reports()
    assert "does not know the run's secret" in step.reports[0]
    assert step.host_listener.next_host(0.0) is None


def test_messages_of_the_kernel_that_are_sent_back_do_not_authenticate(step: _Listening) -> None:
    with step.connect() as peer:
        peer.settimeout(SECONDS)
        peer.sendall(peer.recv(64))  # The peer gets its own greeting back.
        peer.shutdown(socket.SHUT_WR)
        _read_to_end(peer)
    assert step.host_listener.next_host(0.2) is None
    step.connect_host()


def test_silent_connections_do_not_delay_a_launch(step: _Listening) -> None:
    peers = [step.connect() for _ in range(200)]
    began = time.monotonic()
    step.connect_host()
    step.host_listener.close()
    assert time.monotonic() - began < SECONDS
    for peer in peers:
        peer.close()


def test_many_refused_connections_do_not_flood_the_notebook() -> None:
    one = _Listening()
    for _ in range(MAX_REPORTS + 30):
        with one.connect() as peer:
            peer.sendall(b"x" * 200)
            _read_to_end(peer)
    until(lambda: one.host_listener._refused >= MAX_REPORTS + 30 and len(one.reports) >= MAX_REPORTS)
    one.host_listener.close()
    assert len(one.reports) == MAX_REPORTS + 1
    assert one.reports[-1] == "30 more connections were refused"


# ---- messages of an authenticated connection


def _flip(frame: bytes, place: int) -> bytes:
    place %= len(frame)
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


TAMPERINGS: dict[str, Callable[[list[bytes]], bytes]] = {
    "changed": lambda f: f[0] + _flip(f[1], -3) + f[2],
    "its nonce changed": lambda f: f[0] + _flip(f[1], 12) + f[2],
    "repeated": lambda f: f[0] + f[0] + f[1] + f[2],
    "in another order": lambda f: f[0] + f[2] + f[1],
    "dropped": lambda f: f[0] + f[2],
    "made up": lambda f: f[0] + b"\x00" + bytes([40]) + b"\x07MESSAGE" + bytes(32),
    "longer than allowed": lambda f: f[0] + b"\x02" + (1 << 40).to_bytes(8, "big") + bytes(100),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_tampered_message_ends_the_connection_and_is_not_read(step: _Listening, tampering: str) -> None:
    with _connected(step, TAMPERINGS[tampering]) as (_, host, kernel):
        for number in range(3):
            host.send(MetricEvent({"loss": 1.0}, number))
            time.sleep(0.05)  # The pause makes each message a frame of its own.
        assert _steps_until_end(kernel) == [0]


def _steps_until_end(stream: Stream) -> list[int]:
    found = []
    with suppress(ChannelClosedError):
        while True:
            found += _steps(stream, 1)
    return found


def test_the_two_directions_have_different_keys(step: _Listening) -> None:
    reflected: list[bytes] = []
    with _connected(step, lambda _: reflected[0]) as (wire, host, kernel):
        before = len(wire.answered)
        kernel.send(MetricEvent({"loss": 1.0}, 0))
        until(lambda: len(wire.answered) > before)
        reflected.append(bytes(wire.answered[before:]))
        for number in range(3):
            host.send(MetricEvent({"loss": 1.0}, number))
            time.sleep(0.05)
        with pytest.raises(ChannelClosedError):
            _steps(kernel, 1)


def test_a_length_above_the_maximum_is_refused_immediately() -> None:
    kernel, peer = Channel.pair()
    peer.sendall(struct.pack("!IQ", MAX_JSON_BYTES + 1, 0))
    with pytest.raises(ChannelClosedError, match="are allowed"):
        kernel.receive(SECONDS)
    kernel.close()
    peer.close()


class _Bomb:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._path),)


def test_data_of_an_unauthenticated_peer_is_not_unpickled(step: _Listening, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    bomb = pickle.dumps(_Bomb(str(trace)))
    for begin in (b"", GREETING, GREETING + _frame(b"\x05HELLO\x01\x00" + os.urandom(192))):
        with step.connect() as peer:
            peer.sendall(begin + bomb * 20)
            _read_to_end(peer)
    step.wait_for_reports(2)
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb itself works"


def test_modules_that_read_from_the_network_do_not_import_pickle() -> None:
    package = Path(notebook_accelerate.__file__).parent
    sources = [*(package / "launch/hosts/remote").glob("*.py"), package / "telemetry/channel.py"]
    assert len(sources) > 4
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}", *(f"{a.name}" for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            bad = [n for n in names if n.split(".")[-1] in ("pickle", "marshal", "shelve", "cloudpickle", "load_bytes")]
            assert not bad, f"{source}: {bad}"


def test_a_host_may_send_events_of_the_ranks_assigned_to_it_only(step: _Listening) -> None:
    peer = connect_to_kernel("127.0.0.1", step.host_listener.port, step.secret, HELLO)
    incoming = step.host_listener.next_host(SECONDS)
    assert incoming is not None
    connection, received = HostConnection(incoming), Received()
    RemoteRank(connection, 8, 1234, 0).listener = received
    pieces = [(rank, source, 1) for rank in (0, 8, 99) for source in ("stdout", CHANNEL, SAMPLES)]
    connection.handle(RelayEvent(pieces, b"x" * len(pieces)))
    for rank in (0, 8, 99):
        connection.handle(EndedEvent(rank, 0, None, 0))
    assert received.calls == [*((8, source, b"x") for source in ("stdout", CHANNEL, SAMPLES)), (8, "end")]
    connection.close()
    peer.close()


# ---- where the secret appears


def test_the_secret_is_in_no_command_line_environment_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a secret that nobody else should see"
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", secret)
    config = LaunchConfig(
        num_processes=2, start_method="spawn", use_port=0, cpu=True, panel=False, block=False,
        rdzv_conf={"secret": secret},
    )  # fmt: skip
    run = start(config, _sleep)
    until(lambda: len(run.logs()) == 2)
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 2
    for child in children:
        assert secret not in " ".join(child.cmdline())
        assert secret not in "".join(child.environ().values()), child.cmdline()
    run.stop()
    report = run.report()
    assert secret not in report.html + report.text + repr(run) + repr(report) + "\n".join(run.logs() + run.notes)
    from notebook_accelerate.widgets.run_panel import RunPanel

    panel = RunPanel(run)
    assert secret not in panel.sections.widgets["setup"].value + panel.html
    panel.close()


def _sleep() -> None:
    print("asleep", flush=True)
    time.sleep(600)


def test_every_line_of_the_threat_model_names_an_existing_test() -> None:
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("- ")]
    named = [re.findall(r"`(test_\w+)`$", line) for line in lines]
    assert len(lines) >= 10
    assert [len(names) for names in named] == [1] * len(lines)
    there = {name for name in globals() if name.startswith("test_") and "threat_model" not in name}
    assert {name for names in named for name in names} == there
