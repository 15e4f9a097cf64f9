"""Cells on warm ranks: an interrupt reaches the cell, and never loses its reply."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from notebook_accelerate.launch import warm_ranks
from notebook_accelerate.telemetry import ExceptionInfo, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest

INTERRUPT = "import signal\nsignal.raise_signal(signal.SIGINT)\n"


@pytest.fixture
def gate() -> Iterator[warm_ranks.InterruptGate]:
    """Take interrupts as a warm rank does."""
    before = signal.getsignal(signal.SIGINT)
    yield warm_ranks.InterruptGate()
    signal.signal(signal.SIGINT, before)


def run(source: str, gate: warm_ranks.InterruptGate) -> CellReply:
    return warm_ranks._run(CellRequest(1, source, "<cell>"), {}, gate)


def test_an_interrupt_ends_the_cell(gate: warm_ranks.InterruptGate) -> None:
    for _ in range(2):
        assert [each.type for each in run(INTERRUPT + "6 * 7", gate).chain] == ["KeyboardInterrupt"]
    assert run("6 * 7", gate).shown == "42"


def test_an_interrupt_after_the_cell_loses_no_reply(
    gate: warm_ranks.InterruptGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain_of = tracebacks.chain_of

    def interrupted(error: BaseException) -> tuple[ExceptionInfo, ...]:
        signal.raise_signal(signal.SIGINT)
        return chain_of(error)

    monkeypatch.setattr(tracebacks, "chain_of", interrupted)
    for source, kind in (("1 / 0", "ZeroDivisionError"), (INTERRUPT, "KeyboardInterrupt")):
        assert run(source, gate).chain[-1].type == kind
    reply = run("6 * 7", gate)
    signal.raise_signal(signal.SIGINT)  # while the reply is sent
    assert reply.shown == "42"
