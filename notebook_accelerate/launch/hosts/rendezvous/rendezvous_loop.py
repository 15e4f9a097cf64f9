"""The child process of a kernel for the rendezvous: it waits for, listens to and keeps in touch with other notebooks.

It is one loop over the kernel's orders and the state of the rendezvous: ``joining`` until all have arrived,
``keep_alive`` while their ranks run, then the farewell. It ends with the run, and soon after its kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NoReturn

from torch.distributed.elastic.rendezvous.api import RendezvousError

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.joining import BrokenError, Joining
from notebook_accelerate.launch.hosts.rendezvous.keep_alive import Watch
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import ForgedError
from notebook_accelerate.telemetry import Channel, Event

TICK = 0.1
"""Seconds between two polls of the store."""
LINGER = 3.0
"""Seconds that a store outlives its notebook's kernel after a crash, so that the others can read the reason."""
PARTING = 0.6
"""Seconds that a store stays open for waiting or running notebooks to read why its notebook leaves."""
FAREWELL = 5.0
"""Seconds that a store stays open for the others to read the final decision."""


class Child:
    """One notebook's part in the rendezvous.

    Args:
        channel: The channel to the kernel.
        order: The kernel's first message.
    """

    def __init__(self, channel: Channel, order: say.RendezvousOrder) -> None:
        self._channel = channel
        self._seat = Participant(channel, order)
        self._joining = Joining(self._seat)
        self._watch: Watch | None = None
        self._phase: Callable[[], None] = self._idle
        self._orders: deque[Event] = deque()
        self._aside = ThreadPoolExecutor(1)
        self._over = False
        self._broken = ""
        self._leave_by = 0.0

    def run(self, orders: Sequence[Event]) -> None:
        """Serve until the kernel ends this process or is lost.

        Calls to the store run on another thread: they block for minutes when the store's machine has vanished.

        Args:
            orders: Orders that have already arrived.
        """
        self._orders.extend(orders)
        try:
            while not self._over:
                step, began = self._aside.submit(self._step), time.monotonic()
                self._hear()
                while not step.done() and not self._overdue(began):
                    self._hear()
                if step.done():
                    step.result()
        except ChannelClosedError:
            self._bereaved()

    def _hear(self) -> None:
        self._orders.extend(event for _, event in self._channel.receive(TICK))

    def _overdue(self, began: float) -> bool:
        """Check whether the store has not answered for so long that its host counts as lost."""
        limit = stores.keep_alive(self._seat.order)[1]
        if self._seat.connection is None or self._seat.hosting or time.monotonic() - began < limit:
            return False
        self._aside = ThreadPoolExecutor(1)  # the old thread may block for minutes, and its result no longer matters
        self._store_failed(TimeoutError(f"it did not answer for {limit:g} s"))
        return True

    def _step(self) -> None:
        """Carry out the kernel's orders, then advance the current phase."""
        try:
            while self._orders:
                self._obey(self._orders.popleft())
            if not self._over:
                self._phase()
        except BrokenError as error:
            self._break(error.kind, str(error))
        except ForgedError as error:
            self._break("secret", str(error))
        except (RuntimeError, OSError, ValueError, RendezvousError) as error:  # what torch raises without a store
            self._store_failed(error)

    # ---- orders from the kernel

    def _obey(self, event: Event) -> None:
        if isinstance(event, say.JoinOrder):
            self._watch = None
            self._phase = self._gathering
            self._joining.begin(event.attempt)
        elif isinstance(event, say.LeaveOrder):
            self._leave(event.text or "it has left")
        elif self._watch is not None:
            with self._store_errors():
                self._pass_on(event, self._watch)

    def _pass_on(self, event: Event, watch: Watch) -> None:
        if isinstance(event, say.NewsOrder):
            watch.tell("news", {"kind": event.kind, "text": event.text, "failures": event.failures})
        elif isinstance(event, say.StandOrder):
            watch.tell("stand", {"standing": event.standing, "text": event.text})
        elif isinstance(event, say.EndOrder):
            watch.tell_end(
                {"outcome": event.outcome, "text": event.text, "failures": event.failures, "final": event.final}
            )
        elif isinstance(event, say.ListenerEvent):
            watch.open_door({"address": event.address, "port": event.port})

    def _leave(self, why: str) -> None:
        self._go(why)
        if self._seat.hosting:
            time.sleep(PARTING)
        self._over = True

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._store_failed(error)

    # ---- phases

    def _idle(self) -> None:
        """Wait for an order."""

    def _gathering(self) -> None:
        """Wait until all notebooks have arrived."""
        members = self._joining.step()
        if members:
            self._watch = Watch(self._seat, members)
            self._phase = self._running

    def _running(self) -> None:
        """Keep in touch with the others while the ranks run."""
        assert self._watch is not None
        decision = self._watch.step()
        if decision is not None:
            self._channel.send(decision)
            self._joining.end_attempt()
            self._decided(decision.action, orphaned=self._watch.orphaned)

    def _decided(self, action: str, *, orphaned: bool) -> None:
        seat = self._seat
        if action == "restart" and seat.node.name in seat.left:
            self._phase = self._idle
            return
        self._leave_by = time.monotonic() + FAREWELL
        self._phase = self._leaving
        if orphaned:
            self._over = True
        elif seat.hosting:
            seat.directory.post("closed", {})
        else:
            seat.round.count("byes", 1)

    def _leaving(self) -> None:
        """Host the store until the others have read the final decision."""
        seat = self._seat
        if not seat.hosting or seat.round.count("byes") >= len(seat.left) - 1 or time.monotonic() > self._leave_by:
            self._over = True

    # ---- failures

    def _break(self, kind: str, text: str) -> None:
        self._channel.send(say.BrokenEvent(kind, text))
        self._broken = kind
        self._go(text)
        self._phase = self._idle

    def _store_failed(self, error: Exception) -> None:
        if self._phase == self._leaving:
            self._over = True
        elif self._watch is not None:
            self._watch.store_gone()
        else:
            text = f"the notebook that hosts the rendezvous at {self._seat.where} left before all had joined"
            detail = str(error).partition("\n")[0][:200]
            self._channel.send(say.BrokenEvent("connection", f"{text} ({type(error).__name__}: {detail})"))
            self._phase = self._idle

    def _bereaved(self) -> None:
        """Notify the others that this kernel has died, if the store still answers."""
        leaving = self._phase == self._leaving
        wait([self._aside.submit(self._wait_for_byes if leaving else self._say_farewell)], 2 * FAREWELL)

    def _say_farewell(self) -> None:
        self._go("its kernel ended")
        if self._seat.hosting:
            time.sleep(LINGER)

    def _wait_for_byes(self) -> None:
        while not self._over:
            self._step()
            time.sleep(TICK)

    def _go(self, why: str) -> None:
        """Notify the others that they need not wait for this notebook."""
        if self._seat.connection is None or (self._watch is not None and self._watch.orphaned):
            return
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            if self._watch is not None:
                self._watch.leave(why)
            else:
                self._joining.leave(why, self._broken)


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
        assert isinstance(first, say.RendezvousOrder)
        Child(channel, first).run(more)
    os._exit(0)  # torch's blocked threads must not delay the exit
