"""``join``: runs ranks on this machine for a run that a notebook elsewhere has started."""

from __future__ import annotations

import argparse
import signal
import sys

from notebook_accelerate.commands.parsers import Subparsers, command_parser
from notebook_accelerate.launch.hosts.first_notebook import JOIN_SECONDS
from notebook_accelerate.launch.hosts.host_facts import SECRET_VARIABLE, secret_for_command


def join_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``join``, standalone or as one of ``subparsers``."""
    parser = command_parser(
        subparsers,
        "join",
        "Run ranks on this machine for a run that a notebook has started with num_nodes.",
        "Run ranks on this machine for a run that a notebook has started with num_nodes. The exit code is 0 if the "
        f"run succeeded. The run's secret is read from {SECRET_VARIABLE}, or from --secret_file: other users of a "
        "machine can read the command lines of its processes.",
    )
    parser.add_argument("address", metavar="ADDRESS:PORT", help="Address of the run's first notebook.")
    parser.add_argument("--num_processes", "--num-processes", type=int, default=0, metavar="N",
                        help="Ranks to start here (default: as many as the first notebook starts).")  # fmt: skip
    parser.add_argument("--secret_file", "--secret-file", metavar="FILE", help="File with the run's secret.")
    wait = f"Seconds to wait for the first notebook (default: {JOIN_SECONDS:g})."
    parser.add_argument("--join_timeout", "--join-timeout", type=float, default=JOIN_SECONDS, metavar="S", help=wait)
    parser.set_defaults(func=join_command)
    return parser


def join_command(args: argparse.Namespace) -> None:
    """Run ranks until the run ends."""
    from notebook_accelerate.launch.hosts.joining import join

    address, _, port = str(args.address).rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{args.address!r} is not ADDRESS:PORT; pass what the first notebook shows, such as 10.0.0.1:29500"
        )
    if args.num_processes < 0:
        raise ValueError(f"--num_processes {args.num_processes} is not allowed; pass a number of at least 1")
    secret = secret_for_command(args.secret_file)
    before = signal.signal(signal.SIGTERM, _on_termination)  # Job schedulers end a command with SIGTERM.
    try:
        join((address.strip("[]"), int(port)), secret, args.num_processes, seconds=args.join_timeout, show=_print_line)
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_termination(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
