"""Warm ranks: a function that keeps its variables and runs one notebook cell after another."""

from __future__ import annotations

import ast
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

from notebook_accelerate.telemetry import ExceptionInfo, StatusEvent, current_sink
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.worker import debug_agent

ChainOf = Callable[[BaseException], tuple[ExceptionInfo, ...]]


class Interrupts:
    """Let interrupts into cells only: one that comes when a cell is over must not cost its answer."""

    def __init__(self) -> None:
        self.allowed = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.allowed:
            signal.default_int_handler(number, frame)


def serve(chain_of: ChainOf, install_sources: Callable[[dict[str, str]], None]) -> None:
    """Be a warm rank until the kernel ends it; every rank of the group runs this.

    The process group is open from the start, so that collectives work in the first cell.

    Args:
        chain_of: Turns an exception into what the kernel shows.
        install_sources: Makes the source of a cell known to tracebacks.
    """
    # By name: the kernel's side imports this module for `serve` alone, and must not depend on the worker's rooms.
    state = import_module("notebook_accelerate.state").PartialState()
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    namespace |= {"rank": state.process_index, "world_size": state.num_processes, "device": state.device}
    sys.modules["__main__"].__dict__.update(namespace)
    namespace = sys.modules["__main__"].__dict__
    sink = current_sink()
    assert sink is not None, "a warm rank is a launched worker"
    interrupts = Interrupts()
    sink.send(StatusEvent("running", "warm"))
    while True:
        try:
            request = debug_agent.cell_requests.get()
            install_sources({request.filename: request.source})
            reply = _run(request, namespace, chain_of, interrupts)
            sys.stdout.flush()
            sys.stderr.flush()
            sink.send(reply)
        except KeyboardInterrupt:
            continue  # a cell has let it in again, and it came between two cells


def _run(request: CellRequest, namespace: dict[str, Any], chain_of: ChainOf, interrupts: Interrupts) -> CellReply:
    try:
        interrupts.allowed = True
        if request.payload:
            namespace.update(load_bytes(request.payload))
        value = run_cell(request.source, request.filename, namespace)
        fetched = {name: namespace[name] for name in request.fetch}
        payload = dump_bytes(fetched, f"one of {', '.join(request.fetch)}") if fetched else b""
        reply = CellReply(request.number, debug_agent.shown(value) if value is not None else "", payload=payload)
        interrupts.allowed = False
        return reply
    except BaseException as error:  # noqa: BLE001 - a cell's error is an answer, and the rank lives on
        interrupts.allowed = False
        return CellReply(request.number, "", chain_of(error), time.time())


def run_cell(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression; None when it ends with a statement or a semicolon."""
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)  # noqa: S102 - the user's own cell
    if not isinstance(last, ast.Expr):
        return None
    code: CodeType = compile(ast.Expression(last.value), filename, "eval")
    value = eval(code, namespace)  # noqa: S307 - the same
    return None if source.rstrip().endswith(";") else value
