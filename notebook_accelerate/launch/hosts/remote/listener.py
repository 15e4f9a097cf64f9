"""The kernel's listener for the hosts of a run, and a host's connection to the kernel."""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from notebook_accelerate.errors import AuthenticationError, ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.stream import (
    FLUSH_SECONDS,
    KEEP_ALIVE,
    Exchange,
    Keys,
    RateLimiter,
    Stream,
    configure,
    derive_keys,
)
from notebook_accelerate.telemetry import Stamped, encode, steady_time

EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED
EVENTS |= zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""The events to request from libzmq's monitor. EVENT_HANDSHAKE_FAILED_PROTOCOL must not be among them.

libzmq 4.3.5 also emits this event for a forged message on an established connection. Emitting it resets `errno`, so
that libzmq stops reading the connection instead of ending it. If the peer then disconnects, the next heartbeat fails
the assertion `!_io_error`, and the process aborts (compare zeromq/libzmq#4841).
"""
HANDSHAKE_SECONDS = 30.0
"""How many seconds a connection's handshake may take before libzmq closes the connection."""
CHECK_SECONDS = 0.2
"""Seconds between two checks of whether a connection is still needed."""
MESSAGES = 100
"""Maximum number of messages to read before other sockets get their turn."""
MAX_WAITING = 1024
"""Maximum number of connections in their handshake, or fewer if the limit on open files is low. A further connection
closes the oldest one."""
MAX_REPORTS = 20
"""Maximum number of refused connections to report one by one. Of the others, only the number is reported."""
_T = TypeVar("_T")
_ZAP = "inproc://zeromq.zap.01"
_UNKNOWN_PEER = "it does not know the run's secret, or uses another protocol"
_CROWDED = "too many connections were waiting for their handshake"


class IncomingHost(NamedTuple):
    """A host that has authenticated: the stream, the first message, and the messages that arrived along with it."""

    stream: Stream
    hello: HelloEvent
    early: list[Stamped]


class HostListener(Exchange):
    """Listens for the hosts of one run, and carries their streams. The thread ends with the last stream.

    Hosts may connect until `close` is called, even while others are connected. A selector can wait for the next host
    (`fileno`).

    Args:
        address: The only address of this machine to listen on.
        secret: The secret that a host must know.
        port: The port to listen on, or 0 for any free port.
        report: A function to call, on the listener's thread, with a line about each refused connection.
        keep_alive: The keep-alive interval, and how long a host may be silent before it counts as lost, in seconds.

    Raises:
        OSError: The address or the port is not available.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        port: int = 0,
        *,
        report: Callable[[str], None] = lambda _: None,
        keep_alive: tuple[float, float] = KEEP_ALIVE,
    ) -> None:
        # Allow a burst of 1000 messages, because measuring the clocks of 64 hosts takes 640 of them.
        super().__init__("notebook-accelerate-listener", RateLimiter(0.01, burst=1000))
        self._report = report
        self._hosts: dict[bytes, Stream] = {}
        self._unknown: set[Stream] = set()
        self._incoming: SimpleQueue[IncomingHost] = SimpleQueue()
        self._waiting: dict[int, str] = {}
        self._refused, self._max_waiting = 0, _max_waiting()
        self._stopping, self._refusing = threading.Event(), threading.Event()
        self._allowed = derive_keys(secret).host_public
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._open_router(secret, keep_alive)
        self._monitor = self._router.get_monitor_socket(EVENTS)
        self.address, self.port = address, self._bind(address, port)
        self._handle(self._zap, self._authorize)
        self._handle(self._monitor, self._observe)
        self._handle(self._router, self._route)
        self._thread.start()

    def _open_router(self, secret: bytes, keep_alive: tuple[float, float]) -> None:
        keys = derive_keys(secret)
        self._router = router = self._context.socket(zmq.ROUTER)
        configure(router, keep_alive)
        router.router_mandatory = True
        router.curve_server = True
        router.curve_secretkey, router.curve_publickey = keys.kernel_secret, keys.kernel_public
        router.zap_domain = b"notebook_accelerate"
        router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_SECONDS))

    def _bind(self, address: str, port: int) -> int:
        try:
            family, _, _, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            self._router.ipv6 = family == socket.AF_INET6
            self._router.bind(_endpoint(str(endpoint[0]), port or "*"))
        except (OSError, zmq.ZMQError) as error:
            self._destroy(0)
            raise OSError(error.errno, f"cannot listen on {address}:{port}: {error}") from None
        return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def next_host(self, timeout: float) -> IncomingHost | None:
        """Return the next host that has connected, or None if there is none within ``timeout`` seconds."""
        self._ready.clear()
        try:
            # Don't call get(timeout=0.0), because in Python 3.10, the remaining time becomes negative, which means no
            # limit.
            return self._incoming.get(timeout > 0, timeout)
        except Empty:
            return None
        finally:
            if self._arrived or not self._incoming.empty():
                self._ready.set()

    def close(self) -> None:
        """Refuse new connections, and close those that `next_host` has not returned. The others stay open.

        The port remains in use until the last connection closes, because libzmq ends a listener's connections together
        with the listener.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake.set()
        self._refusing.wait(FLUSH_SECONDS)
        while (incoming := self.next_host(0.0)) is not None:  # No caller will ask for these hosts again.
            incoming.stream.close()
        if self._refused > MAX_REPORTS:
            self._report(f"{self._refused - MAX_REPORTS} more connections were refused")

    def wait_until_free(self) -> None:
        """Wait until the port can be used again, after `close` and after all hosts have ended."""
        self._thread.join(2 * FLUSH_SECONDS)

    # ---- on the listener's thread

    def _streams(self) -> Iterable[Stream]:
        return self._hosts.values()

    def _is_over(self) -> bool:
        if not self._stopping.is_set():
            return False
        if not self._refusing.is_set():
            for stream in self._unknown:
                stream.close()
            self._unknown.clear()
            self._refusing.set()
        now = time.monotonic()
        return all(stream.is_over(now) for stream in self._hosts.values())

    def _tick(self) -> None:
        """Check for hosts that are gone. libzmq reports a lost host only when a message is sent to that host."""
        for identity, stream in list(self._hosts.items()):
            if stream.lost:
                if stream.is_over(0.0):
                    del self._hosts[identity]
            elif stream.gone:
                self._lose(stream)
            else:
                stream.ping()

    def _send(self, identity: bytes, message: bytes) -> None:
        try:
            self._router.send_multipart([identity, message], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._hosts[identity].gone = True
            self._tick_soon()  # Read what has arrived before treating the host as lost.

    def _route(self) -> None:
        for _ in range(MESSAGES):
            try:
                identity, message = self._receive_message()
            except zmq.Again:
                return
            if identity not in self._hosts:
                if self._stopping.is_set():
                    continue
                self._hosts[identity] = stream = Stream(self, partial(self._send, identity))
                self._unknown.add(stream)
            stream = self._hosts[identity]
            self._take(stream, message)
            if stream in self._unknown:
                self._read_hello(stream)

    def _receive_message(self) -> tuple[bytes, bytes]:
        if not self._waiting:
            identity, *messages = self._router.recv_multipart(zmq.DONTWAIT)
            return identity, messages[0] if len(messages) == 1 else b"".join(messages)
        frame, *parts = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
        if frame.bytes not in self._hosts:
            # The host has authenticated and is no longer waiting for its handshake.
            self._waiting.pop(int(parts[0].get(zmq.SRCFD)), None)
        return frame.bytes, b"".join(part.bytes for part in parts)

    def _read_hello(self, stream: Stream) -> None:
        """Read the first message of a host, and close the stream if it is not a `HelloEvent`."""
        found: list[Stamped] = []
        with suppress(ChannelClosedError):
            if not (found := stream.receive(0.0)):
                return
        if found and isinstance(found[0].event, HelloEvent):
            self._incoming.put(IncomingHost(stream, found[0].event, found[1:]))
            self._ready.set()
        else:
            stream.close()
        self._unknown.discard(stream)

    # ---- authentication

    def _authorize(self) -> None:
        """Answer libzmq's question whether to accept a client (ZeroMQ RFC 27)."""
        self._observe()  # Count the client's connection now, while it is still in its handshake.
        version, number, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) == self._allowed
        known = known and not self._stopping.is_set()
        status = b"200" if known else b"400"
        self._zap.send_multipart([version, number, status, b"", b"host" if known else b"", b""])

    def _observe(self) -> None:
        """Count the connections that are in their handshake, and report those that are refused."""
        for kind, descriptor in _events(self._monitor):
            if kind == zmq.EVENT_ACCEPTED:
                self._count(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED and descriptor in self._waiting:
                self._refuse(descriptor, _UNKNOWN_PEER)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._tick_soon()

    def _count(self, descriptor: int) -> None:
        self._waiting.pop(descriptor, None)
        self._waiting[descriptor] = self._peer_address(descriptor)
        if len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            self._refuse(oldest, _CROWDED)
            self._use_accepted(oldest, lambda peer: peer.shutdown(socket.SHUT_RDWR))

    def _peer_address(self, descriptor: int) -> str:
        """Return the address of a connection's peer, or a placeholder if the peer has disconnected."""
        return self._use_accepted(descriptor, lambda peer: str(peer.getpeername()[0])) or "an unknown address"

    def _use_accepted(self, descriptor: int, use: Callable[[socket.socket], _T]) -> _T | None:
        """Call ``use`` with one of libzmq's sockets, and return the result, or None if the socket is closed."""
        with suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as peer:
            if peer.getsockname()[1:2] == (self.port,):  # Otherwise, the descriptor now belongs to another socket.
                return use(peer)
        return None

    def _refuse(self, descriptor: int, reason: str) -> None:
        text = f"a connection from {self._waiting.pop(descriptor)} was refused: {reason}"
        self._refused += 1
        if self._refused <= MAX_REPORTS and not self._stopping.is_set():
            with suppress(Exception):  # An error in the report must not end this thread, which other hosts need.
                self._report(text)


def _max_waiting() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_WAITING if limit == resource.RLIM_INFINITY else min(MAX_WAITING, max(limit // 4, 1))


class KernelConnection(Exchange):
    """A host's connection to the kernel.

    Args:
        endpoint: The kernel's address and port, in libzmq's format.
        where: The kernel's address and port, for messages.
        secret: The run's secret.
        keep_alive: See `connect_to_kernel`.
        stopping: See `connect_to_kernel`.

    Attributes:
        stream: The stream to the kernel. Closing it waits until all data has been sent, unless the kernel is lost.

    Raises:
        AuthenticationError: See `connect_to_kernel`.
        OSError: See `connect_to_kernel`.
    """

    def __init__(
        self,
        endpoint: str,
        where: str,
        secret: bytes,
        keep_alive: tuple[float, float],
        stopping: Callable[[], bool],
    ) -> None:
        super().__init__("notebook-accelerate-connection", RateLimiter(0.02, burst=50))
        self._lost = False
        self._open_dealer(derive_keys(secret), keep_alive)
        try:
            self._dealer.connect(endpoint)
            self._await_handshake(where, stopping)
        except BaseException:
            self._destroy(0)
            raise
        self.stream = Stream(self, self._send)
        self._handle(self._monitor, self._observe)
        self._handle(self._dealer, self._route)
        self._thread.start()

    def _open_dealer(self, keys: Keys, keep_alive: tuple[float, float]) -> None:
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        configure(dealer, keep_alive)
        dealer.curve_serverkey = keys.kernel_public
        dealer.curve_publickey, dealer.curve_secretkey = keys.host_public, keys.host_secret
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        # Set no limit, because a kernel that does not answer, for example a suspended one, has not refused the host.
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 0)
        dealer.ipv6 = True
        self._monitor = dealer.get_monitor_socket(EVENTS)

    def _await_handshake(self, where: str, stopping: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        connected = False
        while (left := deadline - time.monotonic()) > 0:
            if stopping():
                raise InterruptedError("the connection is no longer wanted")
            self._monitor.poll(int(1000 * min(left, CHECK_SECONDS)))
            for kind, _ in _events(self._monitor):
                connected = connected or kind == zmq.EVENT_CONNECTED
                if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                if kind == zmq.EVENT_CLOSED and not connected:
                    raise ConnectionRefusedError(f"nothing listens on {where}, or it cannot be reached")
                if kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                    raise AuthenticationError(f"no run with this secret listens on {where}")
        if not connected:
            raise TimeoutError(f"{where} cannot be reached: no answer within {HANDSHAKE_SECONDS:g} s")
        raise TimeoutError(f"{where} did not complete the handshake within {HANDSHAKE_SECONDS:g} s")

    def after_close(self) -> None:
        self._thread.join(2 * FLUSH_SECONDS)

    # ---- on the connection's thread

    def _streams(self) -> Iterable[Stream]:
        return (self.stream,)

    def _is_over(self) -> bool:
        return self.stream.is_over(time.monotonic())

    def _send(self, message: bytes) -> None:
        try:
            self._dealer.send(message, zmq.DONTWAIT)
        except zmq.Again:  # Only a closed connection does not accept a message.
            self._expect_end()

    def _route(self) -> None:
        for _ in range(MESSAGES):
            try:
                message = self._dealer.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(self.stream, message)

    def _observe(self) -> None:
        if any(kind == zmq.EVENT_DISCONNECTED for kind, _ in _events(self._monitor)):
            self._expect_end()

    def _expect_end(self) -> None:
        self._lost, self._linger = True, 0.0
        self._tick_soon()

    def _tick(self) -> None:
        if self._lost and int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._expect_end()  # Read what has arrived before treating the kernel as lost.
        elif self._lost and not self.stream.lost:
            self._lose(self.stream)


def connect_to_kernel(
    address: str,
    port: int,
    secret: bytes,
    hello: HelloEvent,
    keep_alive: tuple[float, float] = KEEP_ALIVE,
    stopping: Callable[[], bool] = lambda: False,
) -> Stream:
    """Connect to a kernel's listener, send ``hello``, and return the stream to the kernel.

    Args:
        address: The address on which the kernel listens. If it is a name with several addresses, the first one that
            accepts the connection is used.
        port: The port on which the kernel listens.
        secret: The run's secret.
        hello: The host's first message.
        keep_alive: The keep-alive interval, and how long the kernel may be silent before it counts as lost, in seconds.
        stopping: A function that returns whether to give up.

    Raises:
        AuthenticationError: The listener has another secret, or does not belong to a run.
        OSError: Nothing listens on the address and port, or ``stopping`` returned True.
    """
    problem = OSError(f"{address} has no address")
    for *_, found in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        endpoint = _endpoint(str(found[0]), port)
        try:
            stream = KernelConnection(endpoint, f"{address}:{port}", secret, keep_alive, stopping).stream
        except OSError as error:
            problem = error
        else:
            stream.queue((encode([Stamped(steady_time.now(), hello)]),))
            return stream
    raise problem


def _endpoint(ip: str, port: int | str) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _events(monitor: Any) -> Iterator[tuple[int, int]]:
    """Yield each event of a monitor that has arrived, and its value, which is a descriptor for most events."""
    with suppress(zmq.Again):
        while True:
            event = recv_monitor_message(monitor, zmq.DONTWAIT)
            yield event["event"], event["value"]
