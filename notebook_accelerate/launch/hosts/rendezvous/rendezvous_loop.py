"""The child process of a kernel for the rendezvous: it waits for, listens to and keeps in touch with other notebooks.

It is one loop over the kernel's orders and the state of the rendezvous: ``joining`` until all have arrived,
``keep_alive`` while their ranks run, then the departure. It ends with the run, and soon after its kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import NoReturn

from torch.distributed.elastic.rendezvous.api import RendezvousError

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.joining import JoinError, Joining
from notebook_accelerate.launch.hosts.rendezvous.keep_alive import Attempt
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import ForgedError
from notebook_accelerate.telemetry import Channel, Event

POLL_SECONDS = 0.1
"""Seconds between two polls of the store."""
CRASH_SECONDS = 3.0
"""Seconds that a store outlives its notebook's kernel after a crash, so that the others can read the reason."""
LEAVE_SECONDS = 0.6
"""Seconds that a store stays open for waiting or running notebooks to read why its notebook leaves."""
DECISION_SECONDS = 5.0
"""Seconds that a store stays open for the others to read the final decision."""


class Child:
    """One notebook's part in the rendezvous.

    Args:
        channel: The channel to the kernel.
        order: The kernel's first message.
    """

    def __init__(self, channel: Channel, order: protocol.RendezvousOrder) -> None:
        self._channel = channel
        self._participant = Participant(channel, order)
        self._joining = Joining(self._participant)
        self._attempt: Attempt | None = None
        self._phase: Callable[[], None] = self._idle
        self._orders: deque[Event] = deque()
        self._executor = ThreadPoolExecutor(1)
        self._ended = False
        self._failed = False
        self._leave_by = 0.0

    def run(self, orders: Sequence[Event]) -> None:
        """Serve until the kernel ends this process or is lost.

        Calls to the store run on another thread: they block for minutes when the store's machine has vanished.

        Args:
            orders: Orders that have already arrived.
        """
        self._orders.extend(orders)
        try:
            while not self._ended:
                step, began = self._executor.submit(self._step), time.monotonic()
                self._receive()
                while not step.done() and not self._overdue(began):
                    self._receive()
                if step.done():
                    step.result()
        except ChannelClosedError:
            self._on_kernel_lost()

    def _receive(self) -> None:
        self._orders.extend(event for _, event in self._channel.receive(POLL_SECONDS))

    def _overdue(self, began: float) -> bool:
        """Check whether the store has not answered for so long that its host counts as lost."""
        limit = stores.keep_alive(self._participant.order)[1]
        if self._participant.connection is None or self._participant.hosting or time.monotonic() - began < limit:
            return False
        self._executor = ThreadPoolExecutor(1)  # the old thread may block for minutes, and its result no longer matters
        self._store_failed(TimeoutError(f"it did not answer for {limit:g} s"))
        return True

    def _step(self) -> None:
        """Carry out the kernel's orders, then advance the current phase."""
        try:
            while self._orders:
                self._handle_order(self._orders.popleft())
            if not self._ended:
                self._phase()
        except (JoinError, ForgedError) as error:
            self._fail(str(error))
        except (RuntimeError, OSError, ValueError, RendezvousError) as error:  # what torch raises without a store
            self._store_failed(error)

    # ---- orders from the kernel

    def _handle_order(self, event: Event) -> None:
        if isinstance(event, protocol.JoinOrder):
            self._attempt = None
            self._phase = self._joining_others
            self._joining.begin(event.attempt)
        elif isinstance(event, protocol.LeaveOrder):
            self._leave(event.text or "it has left")
        elif self._attempt is not None:
            self._publish(event, self._attempt)

    def _publish(self, event: Event, attempt: Attempt) -> None:
        values = asdict(event)
        if isinstance(event, protocol.EndOrder):
            attempt.publish_end(values)
        elif isinstance(event, protocol.ListenerEvent):
            attempt.publish_listener(values)
        else:
            attempt.publish("news" if isinstance(event, protocol.NewsOrder) else "pause", values)

    def _leave(self, why: str) -> None:
        self._report_leaving(why)
        if self._participant.hosting:
            time.sleep(LEAVE_SECONDS)
        self._ended = True

    # ---- phases

    def _idle(self) -> None:
        """Wait for an order."""

    def _joining_others(self) -> None:
        """Wait until all notebooks have arrived."""
        members = self._joining.step()
        if members:
            self._attempt = Attempt(self._participant, members)
            self._phase = self._running

    def _running(self) -> None:
        """Keep in touch with the others while the ranks run."""
        assert self._attempt is not None
        decision = self._attempt.step()
        if decision is not None:
            self._channel.send(decision)
            self._joining.end_attempt()
            self._decided(decision.action, store_lost=self._attempt.store_lost)

    def _decided(self, action: str, *, store_lost: bool) -> None:
        participant = self._participant
        if action == "restart" and participant.node.name in participant.remaining:
            self._phase = self._idle
            return
        self._leave_by = time.monotonic() + DECISION_SECONDS
        self._phase = self._leaving
        if store_lost:
            self._ended = True
        elif participant.hosting:
            participant.directory.post("closed", {})
        else:
            participant.round.count("departures", 1)

    def _leaving(self) -> None:
        """Host the store until the others have read the final decision."""
        participant = self._participant
        others = len(participant.remaining) - 1
        if (
            not participant.hosting
            or participant.round.count("departures") >= others
            or time.monotonic() > self._leave_by
        ):
            self._ended = True

    # ---- failures

    def _fail(self, text: str) -> None:
        self._channel.send(protocol.JoinFailedEvent(text))
        self._failed = True
        self._report_leaving(text)
        self._phase = self._idle

    def _store_failed(self, error: Exception) -> None:
        if self._phase == self._leaving:
            self._ended = True
        elif self._attempt is not None:
            self._attempt.on_store_lost()
        else:
            text = f"the node that hosts the rendezvous at {self._participant.endpoint} left before all had joined"
            detail = str(error).partition("\n")[0][:200]
            self._channel.send(protocol.JoinFailedEvent(f"{text} ({type(error).__name__}: {detail})"))
            self._phase = self._idle

    def _on_kernel_lost(self) -> None:
        """Notify the others that this kernel has died, if the store still answers."""
        leaving = self._phase == self._leaving
        last = self._await_departures if leaving else self._report_kernel_end
        wait([self._executor.submit(last)], 2 * DECISION_SECONDS)

    def _report_kernel_end(self) -> None:
        self._report_leaving("its kernel ended")
        if self._participant.hosting:
            time.sleep(CRASH_SECONDS)

    def _await_departures(self) -> None:
        while not self._ended:
            self._step()
            time.sleep(POLL_SECONDS)

    def _report_leaving(self, why: str) -> None:
        """Notify the others that they need not wait for this notebook."""
        if self._participant.connection is None or (self._attempt is not None and self._attempt.store_lost):
            return
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            if self._attempt is not None:
                self._attempt.leave(why)
            else:
                self._joining.leave(why, failed=self._failed)


def main(descriptor: int) -> NoReturn:
    """Run the child process; never returns.

    Args:
        descriptor: Its end of the socket pair with the kernel.
    """
    # torch would open a store of its own for the ranks, on every interface; they use the rendezvous store's address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosedError):
        first, *more = [event for _, event in channel.receive()]
        assert isinstance(first, protocol.RendezvousOrder)
        Child(channel, first).run(more)
    os._exit(0)  # torch's blocked threads must not delay the exit
