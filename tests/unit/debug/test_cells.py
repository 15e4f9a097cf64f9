"""Cells on warm ranks: an interrupt reaches the cell, and never costs its answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from notebook_accelerate.telemetry import ExceptionInfo, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest
from notebook_accelerate.worker import warm_cells

INTERRUPT = "import signal\nsignal.raise_signal(signal.SIGINT)\n"


@pytest.fixture
def interrupts() -> Iterator[warm_cells.Interrupts]:
    """Take interrupts as a warm rank does."""
    before = signal.getsignal(signal.SIGINT)
    yield warm_cells.Interrupts()
    signal.signal(signal.SIGINT, before)


def interrupted_chain(error: BaseException) -> tuple[ExceptionInfo, ...]:
    signal.raise_signal(signal.SIGINT)
    return tracebacks.chain_of(error)


def answer(
    source: str, interrupts: warm_cells.Interrupts, chain_of: warm_cells.ChainOf = tracebacks.chain_of
) -> CellReply:
    return warm_cells._run(CellRequest(1, source, "<cell>"), {}, chain_of, interrupts)


def test_an_interrupt_ends_the_cell(interrupts: warm_cells.Interrupts) -> None:
    for _ in range(2):
        assert [each.type for each in answer(INTERRUPT + "6 * 7", interrupts).chain] == ["KeyboardInterrupt"]
    assert answer("6 * 7", interrupts).shown == "42"


def test_an_interrupt_that_comes_when_the_cell_is_over_costs_no_answer(interrupts: warm_cells.Interrupts) -> None:
    for source, kind in (("1 / 0", "ZeroDivisionError"), (INTERRUPT, "KeyboardInterrupt")):
        assert answer(source, interrupts, interrupted_chain).chain[-1].type == kind
    reply = answer("6 * 7", interrupts)
    signal.raise_signal(signal.SIGINT)  # while it is sent
    assert reply.shown == "42"
