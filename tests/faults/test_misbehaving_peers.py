"""Peers that are suspended, fall silent, disconnect or send garbage, at each socket that the package reads."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import notebook_accelerate
from notebook_accelerate import LaunchError, RayCluster, Run, notebook_launcher, shutdown
from notebook_accelerate.errors import AskError
from notebook_accelerate.launch.hosts.ray import ray_actor, ray_backend
from notebook_accelerate.launch.hosts.remote import listener
from notebook_accelerate.launch.state.run_events import StopAdvanced
from notebook_accelerate.telemetry.debug_protocol import StacksRequest
from notebook_accelerate.telemetry.sink import current_sink
from tests.support.peers import PEERS, SENDS, misbehaving_peer
from tests.support.waiting import until
from tests.unit.launch.test_listener import _Kernel


def _launch(function: Callable[..., Any], *arguments: Any) -> Run:
    settings: dict[str, Any] = {"num_processes": 2, "use_port": 0, "start_method": "fork", "block": False}
    return notebook_launcher(function, arguments, panel=False, **settings)


# ---- ranks


def _misbehaves(data: bytes, then: str, began: str) -> None:
    """Let rank 1 send bytes to its kernel, and then fall silent, close its channel, or suspend itself."""
    if os.environ["RANK"] == "1":
        sink = current_sink()
        assert sink is not None
        sink.channel.send_bytes(data)
        Path(began).touch()
        if then == "closes":
            sink.channel.shut()
        elif then == "suspended":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


@pytest.mark.parametrize(("sends", "then"), PEERS)
def test_a_rank_that_sends_garbage_does_not_harm_the_others(tmp_path: Path, sends: str, then: str) -> None:
    run = _launch(_misbehaves, SENDS[sends], then, str(tmp_path / "began"))
    try:
        until((tmp_path / "began").exists, seconds=60)
        if then == "closes":
            assert run.wait(60), "a rank without a channel ends"
            assert run.status == "failed"
        else:
            time.sleep(0.2)
            assert run.ask("1 + 1", [0], timeout=60.0) == {0: 2}
    finally:
        run.stop(grace=0.5)
    assert not any(psutil.pid_exists(info.pid or 0) for info in run.ranks)


def test_requests_to_a_suspended_rank_do_not_block() -> None:
    """A few hundred requests fill the socket of a suspended rank, and so does a single large one."""
    run = _launch(time.sleep, 600)
    until(lambda: run._internals.commands.requests.open_ranks() == [0, 1] and run.status == "running")
    suspended = psutil.Process(run.ranks[1].pid)
    suspended.suspend()
    try:
        for _ in range(1000):
            run._internals.commands.requests.forget(run._internals.commands.requests.send([1], StacksRequest))
        assert run.ask("1 + 1", [0], timeout=60.0) == {0: 2}
        for code in ("1 + 1", f"{'x' * 3_000_000!r} and 1"):
            (error,) = run.ask(code, [1], timeout=1.0).values()
            assert isinstance(error, AskError)
            assert "SIGSTOP" in str(error) or "suspended" in str(error) or "stopped" in str(error)
        suspended.resume()
        until(lambda: run.ask("1 + 1", [1], timeout=5.0) == {1: 2})
    finally:
        suspended.resume()
        run.stop(grace=1.0)


def _outlasts_interrupts() -> None:
    while True:
        with suppress(KeyboardInterrupt):
            time.sleep(600)


def test_shutdown_stops_all_runs_at_the_same_time() -> None:
    """If runs were stopped one after the other, each would take a grace period."""
    both = [_launch(_outlasts_interrupts) for _ in range(2)]
    until(lambda: all(run.status == "running" for run in both))
    shutdown()
    for run, other in (both, both[::-1]):
        asked = next(record.time for record in run._internals.journal.records if isinstance(record.event, StopAdvanced))
        assert asked < (other.ended or 0.0)


# ---- other machines


@pytest.mark.parametrize(("sends", "then"), PEERS)
def test_a_peer_of_the_listener_that_sends_garbage_harms_no_host(
    sends: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, the peer is still connected when the host is accepted.
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 1e6)
    kernel = _Kernel()
    try:
        with misbehaving_peer(("127.0.0.1", kernel.port), SENDS[sends], then):
            kernel.connect_host()
    finally:
        kernel.close()


# ---- Ray


@pytest.mark.parametrize(("sends", "then"), PEERS)
def test_a_driver_that_sends_garbage_ends_its_launch(sends: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads nothing, so the launch's order does not fit into the socket."""
    ends = {"silent": "", "closes": "end.close()", "suspended": "os.kill(os.getpid(), signal.SIGSTOP)"}[then]
    started: list[subprocess.Popen[bytes]] = []

    def misbehaving(_call: str, descriptors: Sequence[int], log: int) -> subprocess.Popen[bytes]:
        code = f"import os, signal, socket, time\nend = socket.socket(fileno={descriptors[0]})\n"
        code += f"end.sendall({SENDS[sends]!r})\n{ends}\ntime.sleep(600)"
        command = [sys.executable, "-S", "-c", code]
        started.append(subprocess.Popen(command, pass_fds=descriptors, stdout=log, stderr=log))
        return started[-1]

    monkeypatch.setattr(ray_backend, "start_interpreter", misbehaving)
    driver = ray_backend.DriverProcess(RayCluster())
    try:
        driver.channel.send(ray_backend.PlaceOrder(2, b"x" * (8 << 20)))
        with pytest.raises(LaunchError, match=r"reaching the cluster (failed|took longer)"):
            driver.next(ray_backend.ConnectedEvent, 1.0, "reaching the cluster", lambda _: None)
    finally:
        driver.end(0.1)
    assert started[0].poll() is not None


@pytest.mark.parametrize(("sends", "then"), [("nothing", "silent"), ("nothing", "closes"), ("garbage", "suspended")])
def test_a_foreign_peer_of_a_tunnel_is_rejected(sends: str, then: str) -> None:
    """Any user of the node can connect to the tunnel's port, even before the actor does."""
    node = ray_actor.NodeHost()
    node.open_tunnel()
    assert node._tunnel is not None
    address = node._tunnel.getsockname()
    with misbehaving_peer(address, SENDS[sends], then), socket.create_connection(address) as own:
        own.sendall(b"up")
        until(lambda: node.pull() == b"up")
        node.push(b"down")
        assert own.recv(10) == b"down"
    assert node._connection is not None
    node._connection.close()


# ---- all sockets

OWN = "both ends belong to this process or to processes that it has started"
PROBE = "reads nothing from it"
SOCKETS = {
    "telemetry/channel.py": test_a_rank_that_sends_garbage_does_not_harm_the_others,
    "launch/hosts/remote/listener.py": test_a_peer_of_the_listener_that_sends_garbage_harms_no_host,
    "launch/hosts/ray/ray_backend.py": test_a_driver_that_sends_garbage_ends_its_launch,
    "launch/hosts/ray/ray_actor.py": test_a_foreign_peer_of_a_tunnel_is_rejected,
    "launch/hosts/ray/ray_driver.py": "the kernel is its parent, and it only forwards messages",
    "launch/detached/control_protocol.py": "tests/faults/test_detached_peers.py",
    "launch/detached/control_client.py": "tests/faults/test_detached_peers.py",
    "launch/detached_process.py": OWN,
    "launch/detached_launch.py": OWN,
    "launch/processes/event_loop.py": OWN,
    "launch/processes/zygote.py": OWN,
    "launch/processes/zygote_server.py": OWN,
    "worker/entry.py": OWN,
    "worker/debug_agent.py": "debugpy listens",
    "hardware/addresses.py": PROBE,
    "utils/other.py": PROBE,
    "launch/processes/ports.py": PROBE,
}
"""The modules that open sockets, each with the test of its peers, or the reason why it needs none."""


def test_the_table_covers_the_peers_of_all_sockets() -> None:
    root = Path(notebook_accelerate.__file__).parent
    opens = re.compile(
        r"\bsocket\.(socket|socketpair|create_server|create_connection|fromfd)\(|\.socket\(zmq\.|debugpy\.listen"
    )
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if opens.search(path.read_text())}
    assert found == set(SOCKETS)
