"""An interrupt of a cell on warm ranks reaches the cell, and the cell's reply is never lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from notebook_accelerate.telemetry import ExceptionInfo, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest
from notebook_accelerate.worker import warm_cells

INTERRUPT = "import signal\nsignal.raise_signal(signal.SIGINT)\n"


@pytest.fixture
def gate() -> Iterator[warm_cells.InterruptGate]:
    """Yield a gate that accepts interrupts as a warm rank does."""
    before = signal.getsignal(signal.SIGINT)
    yield warm_cells.InterruptGate()
    signal.signal(signal.SIGINT, before)


def run(source: str, gate: warm_cells.InterruptGate) -> CellReply:
    return warm_cells._run(CellRequest(1, source, "<cell>"), {}, gate)


def test_an_interrupt_ends_the_cell(gate: warm_cells.InterruptGate) -> None:
    for _ in range(2):
        assert [each.type for each in run(INTERRUPT + "6 * 7", gate).chain] == ["KeyboardInterrupt"]
    assert run("6 * 7", gate).shown == "42"


def test_an_interrupt_after_the_cell_does_not_lose_the_reply(
    gate: warm_cells.InterruptGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain_of = tracebacks.chain_of

    def interrupted(error: BaseException) -> tuple[ExceptionInfo, ...]:
        signal.raise_signal(signal.SIGINT)
        return chain_of(error)

    monkeypatch.setattr(tracebacks, "chain_of", interrupted)
    for source, kind in (("1 / 0", "ZeroDivisionError"), (INTERRUPT, "KeyboardInterrupt")):
        assert run(source, gate).chain[-1].type == kind
    reply = run("6 * 7", gate)
    signal.raise_signal(signal.SIGINT)  # This interrupt arrives while the reply is being sent.
    assert reply.shown == "42"
