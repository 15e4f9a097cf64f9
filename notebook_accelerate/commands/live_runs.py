"""The commands that read and control runs: ``runs``, ``show``, ``logs``, ``diagnose``, ``stop`` and others."""

from __future__ import annotations

import argparse
import inspect
import json
import queue
import sys
import typing
from collections.abc import Callable, Sequence
from functools import partial

from notebook_accelerate.commands import run_queries as queries
from notebook_accelerate.commands.parsers import Subparsers, command_parser, in_options
from notebook_accelerate.commands.run_queries import Answer
from notebook_accelerate.launch import attaching
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import LogEvent
from notebook_accelerate.telemetry.store import Record

EXIT_CODES = (
    "Exit codes: 0 done, 1 the command failed, 2 wrong options or no such run, 3 refused without --allow, "
    "4 wait: too late, 5 wait: the run ended differently."
)


def _parser(query: Callable[..., Answer], subparsers: Subparsers | None) -> argparse.ArgumentParser:
    """Create the parser of a query from the function's signature."""
    text = (query.__doc__ or "").strip()
    name = "runs" if query is queries.list_runs else query.__name__
    parser = command_parser(subparsers, name, text, f"{text} {EXIT_CODES}")
    hints = typing.get_type_hints(query)
    parameters = inspect.signature(query).parameters
    for each in parameters.values():
        kind, default = hints[each.name], each.default
        if each.name == "run":
            parser.add_argument("run", metavar="RUN", help="The run's name, NAME@PID, or the folder of a kept run.")
        elif default is inspect.Parameter.empty:
            parser.add_argument(each.name, metavar=each.name.upper())
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(f"--{each.name}", choices=typing.get_args(kind), default=default)
        else:
            kind = int if default is None else type(default)
            shown = "" if default in (None, "") else f"(default: {default})"
            parser.add_argument(f"--{each.name}", type=kind, default=default, metavar=each.name.upper(), help=shown)
    parser.add_argument("--json", action="store_true", help="Print the answer, or the error, as one JSON object.")
    if query in queries.CHANGING:
        parser.add_argument("--allow", action="store_true", help="Allow this command to change the run.")
    if query is queries.logs:
        parser.add_argument("--follow", action="store_true", help="Print further lines until the run ends.")
    names = {name: name for name, each in parameters.items() if each.default is not each.empty}
    parser.set_defaults(func=partial(_run, query), names=names)
    return parser


def _run(query: Callable[..., Answer], args: argparse.Namespace) -> None:
    """Answer a query, and exit with the answer's code if it is not 0."""
    options = {name: getattr(args, name) for name in inspect.signature(query).parameters}
    if getattr(args, "follow", False):
        _follow(args)
        return
    answer = queries.answer(
        query, options, allowed=getattr(args, "allow", False), words=partial(in_options, options=args.names)
    )
    if args.json:
        print(json.dumps({"command": args.command, **queries.bounded(answer.data)}))
    else:
        print(queries.shown(answer.text), file=sys.stderr if "error" in answer.data else sys.stdout)
    if answer.code:
        raise SystemExit(answer.code)


def _follow(args: argparse.Namespace) -> None:
    """Print the last lines of the ranks, and all further lines until the run ends."""
    run = attaching.attach(args.run)
    waiting: queue.SimpleQueue[Sequence[Record]] = queue.SimpleQueue()
    journal = internals(run).journal
    with journal.locked():
        lines = run.logs(args.rank, args.last)
        unsubscribe = journal.subscribe(waiting.put)
    try:
        while True:
            for line in lines:
                print(json.dumps({"line": line}) if args.json else queries.shown(line), flush=True)
            over = run.done
            try:
                records = waiting.get(timeout=queries.POLL_SECONDS)
            except queue.Empty:
                if over:
                    return
                records = ()
            lines = [
                f"[rank {rank}] {text}" if args.rank is None else text
                for rank, _, event in records
                if isinstance(event, LogEvent) and args.rank in (None, rank)
                for text in event.text.split("\n")
            ]
    finally:
        unsubscribe()


PARSERS: dict[str, Callable[[Subparsers | None], argparse.ArgumentParser]] = {
    "runs": partial(_parser, queries.list_runs),
    **{query.__name__: partial(_parser, query) for query in (*queries.READING, *queries.CHANGING)},
}
"""The function that creates the parser of each command."""
