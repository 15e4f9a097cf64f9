"""Warm ranks: processes that keep their variables and run one notebook cell after another."""

from __future__ import annotations

import ast
import signal
import sys
from types import CodeType, FrameType
from typing import Any

from notebook_accelerate.telemetry import StatusEvent, steady_time, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.sink import require_sink
from notebook_accelerate.telemetry.tracebacks import install_sources
from notebook_accelerate.worker import debug_agent


class InterruptGate:
    """Allows interrupts only while a cell runs, because an interrupt after a cell must not discard its reply."""

    def __init__(self) -> None:
        self.open = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.open:
            signal.default_int_handler(number, frame)


def warm_rank() -> None:
    """Run cells until the kernel ends this rank. This is the launched function of every warm rank.

    The process group is open from the start, so that collectives work in the first cell.
    """
    # Create the gate first, because an interrupt meant for the first cell may arrive during the imports below.
    gate = InterruptGate()
    from notebook_accelerate.state import PartialState  # Import it here, because the kernel must not import it.

    state = PartialState()
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    namespace |= {"rank": state.process_index, "world_size": state.num_processes, "device": state.device}
    sys.modules["__main__"].__dict__.update(namespace)
    namespace = sys.modules["__main__"].__dict__
    sink = require_sink()
    sink.send(StatusEvent("running", "warm"))
    while True:
        try:
            request = debug_agent.cell_requests.get()
            install_sources({request.filename: request.source})
            reply = _run(request, namespace, gate)
            sys.stdout.flush()
            sys.stderr.flush()
            sink.send(reply)
        except KeyboardInterrupt:
            continue  # The cell has replaced the handler, so an interrupt between two cells raises KeyboardInterrupt.


def _run(request: CellRequest, namespace: dict[str, Any], gate: InterruptGate) -> CellReply:
    try:
        gate.open = True
        if request.payload:
            namespace.update(load_bytes(request.payload))
        value = run_cell(request.source, request.filename, namespace)
        fetched = {name: namespace[name] for name in request.fetch}
        payload = dump_bytes(fetched, f"one of {', '.join(request.fetch)}") if fetched else b""
        reply = CellReply(request.number, debug_agent.value_text(value) if value is not None else "", payload=payload)
        gate.open = False
        return reply
    except BaseException as error:  # noqa: BLE001 - the reply contains the cell's error, and the rank continues
        gate.open = False
        return CellReply(request.number, "", tracebacks.chain_of(error), steady_time.now())


def run_cell(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run a cell and return its last expression's value, or None if it ends with a statement or a semicolon."""
    # Don't use ast.parse, whose frame would be the last one in a SyntaxError's traceback.
    tree: Any = compile(source, filename, "exec", ast.PyCF_ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)  # noqa: S102 - the user's own cell
    if not isinstance(last, ast.Expr):
        return None
    code: CodeType = compile(ast.Expression(last.value), filename, "eval")
    value = eval(code, namespace)  # noqa: S307 - the user's own cell
    return None if source.rstrip().endswith(";") else value
