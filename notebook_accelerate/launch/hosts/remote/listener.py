"""The kernel's listener for the hosts of a run, and a host's connection to it."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import zmq
from zmq.utils import z85

from notebook_accelerate.errors import AuthenticationError, ChannelClosedError
from notebook_accelerate.launch.hosts.remote.exchange import (
    EVENTS,
    FLUSH_SECONDS,
    MESSAGES,
    SOON_SECONDS,
    Exchange,
    local_pair,
    read_event,
)
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.stream import (
    END,
    KEEP_ALIVE,
    NOTHING_SENT,
    PING,
    Link,
    configure,
    derive_keys,
)
from notebook_accelerate.telemetry import Channel

HANDSHAKE_SECONDS = 30.0
"""Seconds for the handshake of a connection; libzmq then closes it."""
LOOK_SECONDS = 0.2
"""Seconds between two looks whether a connection is still wanted."""
MAX_WAITING = 1024
"""Connections in their handshake at a time; one more ends the oldest. Less where the limit of open files is low."""
MAX_REPORTS = 20
"""Refused connections that are reported one by one; for the rest only their number is reported."""
_T = TypeVar("_T")
_ZAP = "inproc://zeromq.zap.01"
_UNKNOWN_PEER = "it does not know the run's secret, or uses another protocol"
_CROWDED = "too many connections were waiting for their handshake"


class IncomingHost(NamedTuple):
    """A host that has authenticated: the stream to it, and its first message."""

    channel: Channel
    hello: HelloEvent


class HostListener(Exchange):
    """Listens for the hosts of one run, and serves their connections; the thread ends with the last one.

    Hosts may connect until `close`, while others are connected. A selector can wait for the next one (`fileno`).

    Args:
        address: The one address of this machine to listen on.
        secret: The secret that a host must know.
        port: The port; 0 means any free one.
        report: Called with a line about each refused connection, on the thread of the listener.
        keep_alive: Seconds between two keep-alives, and those without one after which a host is lost.

    Raises:
        OSError: The address or the port is not available.
    """

    pause_seconds, burst = 0.01, 1000  # the clocks of 64 hosts are measured with 640 messages

    def __init__(
        self,
        address: str,
        secret: bytes,
        port: int = 0,
        *,
        report: Callable[[str], None] = lambda _: None,
        keep_alive: tuple[float, float] = KEEP_ALIVE,
    ) -> None:
        super().__init__("notebook-accelerate-listener")
        self._report = report
        self._hosts: dict[bytes, Link] = {}
        self._ended: dict[bytes, float] = {}
        """Hosts whose stream has ended, and until when their own end is awaited."""
        self._unknown: dict[bytes, Channel] = {}
        self._incoming: SimpleQueue[IncomingHost] = SimpleQueue()
        self._arrived, self._arrival = local_pair()
        self._arrived.setblocking(False)
        self._arrival.setblocking(False)
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
            host = f"[{endpoint[0]}]" if family == socket.AF_INET6 else endpoint[0]
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except (OSError, zmq.ZMQError) as error:
            self._destroy(0)
            raise OSError(error.errno, f"cannot listen on {address}:{port}: {error}") from None
        return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def fileno(self) -> int:
        """Return a descriptor that is readable when `next_host` should be called; -1 after `close`."""
        return self._arrived.fileno()

    def next_host(self, timeout: float) -> IncomingHost | None:
        """Return the next host that has connected; None after ``timeout`` seconds."""
        with suppress(OSError):  # it is empty, or closed
            self._arrived.recv(4096)
        try:
            return self._incoming.get(timeout=timeout)
        except Empty:
            return None
        finally:
            if not self._incoming.empty():
                self._announce()

    def _announce(self) -> None:
        """Make the descriptor readable."""
        with suppress(OSError):  # it is full, and therefore readable, or closed
            self._arrival.send(b"!")

    def close(self) -> None:
        """Refuse new connections, and close those that have not been returned; the others stay open.

        The port is in use until the last one has ended: libzmq ends a listener's connections with the listener.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake_up()
        self._refusing.wait(FLUSH_SECONDS)
        while (incoming := self.next_host(0.0)) is not None:  # arrived too late to be expected
            incoming.channel.close()
        for end in (self._arrived, self._arrival):
            end.close()
        if self._refused > MAX_REPORTS:
            self._report(f"{self._refused - MAX_REPORTS} more connections were refused")

    def wait_until_free(self) -> None:
        """Wait until the port can be used again, after `close` and the ends of all hosts."""
        self._thread.join(2 * FLUSH_SECONDS)

    def _destroy(self, seconds: float) -> None:
        super()._destroy(seconds)
        if not self._thread.is_alive():  # it was not started
            self._arrived.close()
            self._arrival.close()

    # ---- on the listener's thread

    def _links(self) -> Iterable[Link]:
        return self._hosts.values()

    def _is_over(self) -> bool:
        if not self._stopping.is_set():
            return False
        if not self._refusing.is_set():
            for channel in self._unknown.values():
                channel.close()
            self._unknown.clear()
            self._refusing.set()
        now = time.monotonic()
        return not self._hosts and all(deadline <= now for deadline in self._ended.values())

    def _finish(self) -> None:
        super()._finish()
        self._refusing.set()

    def _tick(self) -> None:
        """See `Exchange._tick`; libzmq reports a host that is gone when the next message to it is sent."""
        for identity in [*self._hosts, *self._ended]:
            self._send(identity, PING)

    def _send(self, identity: bytes, message: bytes) -> None:
        try:
            self._router.send_multipart([identity, message], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._ended.pop(identity, None)
            if link := self._hosts.get(identity):
                link.end()
                self._watch(link)

    def _route(self) -> None:
        for _ in range(MESSAGES):
            try:
                identity, message = self._receive_message()
            except zmq.Again:
                return
            if identity in self._ended:
                if message.startswith(END):
                    self._ended[identity] = 0.0
            elif identity in self._hosts or self._connect(identity):
                self._receive(self._hosts[identity], message)
                if identity in self._unknown:
                    self._greet(identity)

    def _receive_message(self) -> tuple[bytes, bytes]:
        if not self._waiting:
            identity, *messages = self._router.recv_multipart(zmq.DONTWAIT)
            return identity, messages[0] if len(messages) == 1 else b"".join(messages)
        frame, *parts = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
        if frame.bytes not in self._hosts:
            self._waiting.pop(int(parts[0].get(zmq.SRCFD)), None)  # it has authenticated
        return frame.bytes, b"".join(part.bytes for part in parts)

    def _connect(self, identity: bytes) -> bool:
        """Make a link for a host that has authenticated; return whether that could be done."""
        if self._stopping.is_set():
            return False
        try:
            ours, inner = local_pair()
        except OSError as error:
            self._refuse(f"a host was refused: {error}")
            self._send(identity, NOTHING_SENT)
            self._ended[identity] = 0.0
            return False
        self._hosts[identity] = link = Link(inner, partial(self._send, identity))
        self._unknown[identity] = Channel(ours)
        self._watch(link)
        return True

    def _greet(self, identity: bytes) -> None:
        """Read the first message of a host; later ones stay in the channel."""
        channel = self._unknown[identity]
        try:
            found = channel.receive(0.0)
        except ChannelClosedError:
            channel.close()
            del self._unknown[identity]
            return
        if not found:
            return
        del self._unknown[identity]
        if isinstance(found[0].event, HelloEvent):
            channel.put_back(found[1:])
            self._incoming.put(IncomingHost(channel, found[0].event))
            self._announce()
        else:
            channel.close()

    def _release(self, link: Link) -> None:
        super()._release(link)
        for identity in [name for name, each in self._hosts.items() if each is link]:
            del self._hosts[identity]
            self._ended[identity] = 0.0 if link.peer_ended else time.monotonic() + FLUSH_SECONDS
            if channel := self._unknown.pop(identity, None):
                channel.close()

    # ---- authentication

    def _authorize(self) -> None:
        """Answer libzmq's question about a client (ZeroMQ RFC 27)."""
        version, number, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) == self._allowed
        known = known and not self._stopping.is_set()
        status = b"200" if known else b"400"
        self._zap.send_multipart([version, number, status, b"", b"host" if known else b"", b""])

    def _observe(self) -> None:
        """Count the connections in their handshake, and report those that are refused."""
        kind, descriptor = read_event(self._monitor)
        if kind == zmq.EVENT_ACCEPTED:
            self._waiting.pop(descriptor, None)
            self._waiting[descriptor] = self._peer_address(descriptor)
            if len(self._waiting) > self._max_waiting:
                oldest = next(iter(self._waiting))
                self._refuse_waiting(oldest, _CROWDED)
                self._use_accepted(oldest, lambda peer: peer.shutdown(socket.SHUT_RDWR))
        elif kind == zmq.EVENT_DISCONNECTED and descriptor in self._waiting:
            self._refuse_waiting(descriptor, _UNKNOWN_PEER)
        elif kind == zmq.EVENT_DISCONNECTED:
            self._next_tick = min(self._next_tick, time.monotonic() + SOON_SECONDS)

    def _refuse_waiting(self, descriptor: int, reason: str) -> None:
        self._refuse(f"a connection from {self._waiting.pop(descriptor)} was refused: {reason}")

    def _peer_address(self, descriptor: int) -> str:
        """Return the address of the peer of a connection, if it is still connected."""
        return self._use_accepted(descriptor, lambda peer: str(peer.getpeername()[0])) or "an unknown address"

    def _use_accepted(self, descriptor: int, use: Callable[[socket.socket], _T]) -> _T | None:
        """Return the result of ``use`` with libzmq's socket; None where libzmq has closed it."""
        with suppress(OSError), os.fdopen(os.dup(descriptor), "rb", buffering=0) as copy:
            peer = socket.socket(fileno=copy.fileno())
            try:
                if peer.family in (socket.AF_INET, socket.AF_INET6) and peer.getsockname()[1] == self.port:
                    return use(peer)  # otherwise another file has the number now
            finally:
                peer.detach()
        return None

    def _refuse(self, text: str) -> None:
        self._refused += 1
        if self._refused <= MAX_REPORTS and not self._stopping.is_set():
            with suppress(Exception):  # the other hosts need this thread
                self._report(text)


def _max_waiting() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_WAITING if limit == resource.RLIM_INFINITY else min(MAX_WAITING, max(limit // 4, 1))


class KernelConnection(Exchange):
    """A host's connection to the kernel.

    Args:
        address: Where the kernel listens.
        port: The listener's port.
        secret: The run's secret.
        keep_alive: Seconds between two keep-alives, and those without one after which the kernel is lost.
        stopping: Returns whether to give up.

    Attributes:
        local_end: A socket with the stream; closing it waits until what was sent has left, or cannot leave.

    Raises:
        AuthenticationError: The listener has another secret, or is none.
        OSError: Nothing listens there, or ``stopping``.
    """

    pause_seconds, burst = 0.02, 50

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        keep_alive: tuple[float, float] = KEEP_ALIVE,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        super().__init__("notebook-accelerate-connection")
        self._keep_alive, self._stopping = keep_alive, stopping
        self._keys = derive_keys(secret)
        self._lost = False
        self._deadline = 0.0
        try:
            self._connect([str(each[4][0]) for each in found], port, address)
        except BaseException:
            self._destroy(0)
            raise
        self.local_end, inner = local_pair()
        self.local_end.after_close = partial(self._thread.join, 2 * FLUSH_SECONDS)
        self._link = Link(inner, self._send)
        self._watch(self._link)
        self._handle(self._monitor, self._observe)
        self._handle(self._dealer, self._route)
        self._thread.start()

    def _connect(self, hosts: list[str], port: int, address: str) -> None:
        """Connect to the first address of the listener that accepts."""
        for index, host in enumerate(hosts):
            self._open_dealer()
            self._dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            try:
                return self._await_handshake(f"{address}:{port}")
            except OSError:
                self._monitor.close(0)
                self._dealer.close(0)
                if index == len(hosts) - 1:
                    raise
        return None

    def _open_dealer(self) -> None:
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        configure(dealer, self._keep_alive)
        dealer.curve_serverkey = self._keys.kernel_public
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.host_public, self._keys.host_secret
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 0)  # a kernel that is silent, as a suspended one, has not refused
        dealer.ipv6 = True
        self._monitor = dealer.get_monitor_socket(EVENTS)

    def _await_handshake(self, where: str) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        connected = False
        while (left := deadline - time.monotonic()) > 0:
            if self._stopping():
                raise InterruptedError("the connection is not wanted any more")
            if not self._monitor.poll(int(1000 * min(left, LOOK_SECONDS))):
                continue
            kind, _ = read_event(self._monitor)
            connected = connected or kind == zmq.EVENT_CONNECTED
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if kind == zmq.EVENT_CLOSED and not connected:
                raise ConnectionRefusedError(f"nothing listens at {where}, or it cannot be reached")
            if kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                raise AuthenticationError(f"{where} has another secret, or is no listener of a run")
        if not connected:
            raise TimeoutError(f"{where} cannot be reached: no answer within {HANDSHAKE_SECONDS:g} s")
        raise TimeoutError(f"{where} did not complete the handshake within {HANDSHAKE_SECONDS:g} s")

    # ---- on the connection's thread

    def _links(self) -> Iterable[Link]:
        return (self._link,)

    def _is_over(self) -> bool:
        if not self._link.closed or self._link.peer_ended or self._lost:
            return self._link.closed
        now = time.monotonic()
        self._deadline = self._deadline or now + FLUSH_SECONDS
        return now >= self._deadline

    def _send(self, message: bytes) -> None:
        try:
            self._dealer.send(message, zmq.DONTWAIT)
        except zmq.Again:  # only a connection that has ended accepts no message
            self._lose()

    def _route(self) -> None:
        for _ in range(MESSAGES):
            try:
                message = self._dealer.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(self._link, message)

    def _observe(self) -> None:
        if read_event(self._monitor)[0] == zmq.EVENT_DISCONNECTED:
            self._lose()

    def _lose(self) -> None:
        self._lost, self._flush = True, 0.0
        self._next_tick = min(self._next_tick, time.monotonic() + SOON_SECONDS)

    def _tick(self) -> None:
        """See `Exchange._tick`."""
        if self._lost and int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._lose()  # first, read what has arrived
        elif self._lost:
            self._link.end()
            self._watch(self._link)


def connect_to_kernel(
    address: str,
    port: int,
    secret: bytes,
    hello: HelloEvent,
    keep_alive: tuple[float, float] = KEEP_ALIVE,
    stopping: Callable[[], bool] = lambda: False,
) -> Channel:
    """Connect to a kernel's listener, send ``hello``, and return the channel to the kernel.

    Args:
        address: See `KernelConnection`, as for the others.
        port: See there.
        secret: See there.
        hello: The host's first message.
        keep_alive: See there.
        stopping: See there.

    Raises:
        AuthenticationError: The listener has another secret, or is none.
        OSError: The connection failed.
    """
    channel = Channel(KernelConnection(address, port, secret, keep_alive, stopping).local_end)
    channel.send(hello)
    return channel
