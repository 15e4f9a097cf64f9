"""Cell magics for warm ranks: ``%%ranks``, ``%%rank``, ``%rank_start``, ... (``%load_ext notebook_accelerate``).

Several notebooks that share a secret, in the environment variable NOTEBOOK_ACCELERATE_SECRET or in a ``LaunchConfig``,
can share warm ranks: cells of the first notebook run on all ranks, and cells of another notebook run only on the ranks
of that notebook.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.warm_ranks import CellResult, WarmRanks


@magics_class
class RankMagics(Magics):
    """Magics whose cells run in a persistent group of ranks."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.group: WarmRanks | None = None

    @cell_magic
    @reports_mistakes
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every warm rank. The first use starts the ranks.

        ``%%ranks [-n N] [-i a,b] [-o c] [-s START_METHOD] [-p PRECISION] [-c CONFIG] [--on WHERE]``: ``-i`` sends
        variables of the kernel, ``-o`` returns variables as a list with one value per rank, ``-c`` names a variable
        with a ``LaunchConfig``, and ``--on`` starts the ranks on a cluster: ray, ray://host:port, or the name of a
        variable with a ``RayCluster``. ``[--num-nodes N] [--node-rank I] [--master-addr ADDRESS] [--port PORT]
        [--rdzv-backend static|c10d]`` start the ranks together with the ranks of other notebooks that run
        ``%rank_start``.

        Raises:
            ValueError: An option is invalid, or ``-n`` is not the number of warm ranks that are running.
            LaunchError: The ranks could not be started.
            WorkerError: The cell failed on a rank (the ranks keep running), or a rank died (WorkerDiedError).
        """
        options = _with_variables(_start_parser("%%ranks")).parse_args(shlex.split(line))
        group = self._group(options)
        self._execute(group, cell, None, options.inputs, options.outputs)

    @cell_magic
    @reports_mistakes
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some warm ranks: ``%%rank 0,1 [-i a,b] [-o c]``.

        Raises:
            ValueError: An option or a rank is invalid, or there are no warm ranks.
            WorkerError: The cell failed on a rank (the ranks keep running), or a rank died (WorkerDiedError).
        """
        parser = _Parser("%%rank", add_help=False)
        parser.add_argument("ranks")
        options = _with_variables(parser).parse_args(shlex.split(line))
        try:
            ranks = [int(rank) for rank in options.ranks.split(",")]
        except ValueError:
            raise ValueError(f"{options.ranks!r} is not a list of ranks; write %%rank 0,1") from None
        self._execute(self._running(), cell, ranks, options.inputs, options.outputs)

    @line_magic
    @reports_mistakes
    def rank_start(self, line: str) -> None:
        """Start the warm ranks without running a cell. The options are the same as for ``%%ranks``.

        If several notebooks share ranks, use this in all but the first one, so that their ranks run the first one's
        cells.

        Raises:
            ValueError: An option is invalid, or warm ranks are already running.
            LaunchError: The ranks could not be started.
        """
        if self.group is not None and self.group.alive:
            raise ValueError("warm ranks are running; end them first: %rank_stop")
        self._group(_start_parser("%rank_start").parse_args(shlex.split(line)))

    @line_magic
    @reports_mistakes
    def rank_status(self, line: str) -> None:
        """Print the state of the warm ranks."""
        if self.group is None:
            print("no warm ranks; start some: %%ranks -n 2")  # noqa: T201 - the output of a command in a cell
            return
        print(self.group.run)  # noqa: T201 - shown in the cell
        if not self.group.alive:
            print("the warm ranks have ended; start new ones: %%ranks")  # noqa: T201 - shown in the cell
            return
        for info in self.group.run.ranks:
            print(f"  rank {info.rank}: pid {info.pid}, {info.state}")  # noqa: T201 - shown in the cell

    @line_magic
    @reports_mistakes
    def rank_restart(self, line: str) -> None:
        """End the warm ranks, and start the same number again. The variables of the ranks are lost.

        Raises:
            ValueError: There are no warm ranks.
            LaunchError: The ranks could not be started.
        """
        if self.group is None:
            raise ValueError("there are no warm ranks; start some: %%ranks -n 2")
        self.group.restart()

    @line_magic
    @reports_mistakes
    def rank_stop(self, line: str) -> None:
        """End the warm ranks, if there are any."""
        if self.group is not None:
            self.group.stop()
            self.group = None

    def _group(self, options: argparse.Namespace) -> WarmRanks:
        if self.group is not None and self.group.alive:
            size = self.group.size
            if options.num_processes not in (None, size):
                raise ValueError(
                    f"-n {options.num_processes}: {size} warm ranks are running; end them first: %rank_stop"
                )
            return self.group
        self.group = WarmRanks(self._config(options))
        return self.group

    def _config(self, options: argparse.Namespace) -> LaunchConfig:
        """Return the named or default configuration, changed by the options on the line."""
        known = LaunchConfig.__dataclass_fields__
        given = {name: value for name, value in vars(options).items() if name in known and value is not None}
        cluster = self.shell.user_ns.get(options.on)
        if isinstance(cluster, RayCluster):
            given["on"] = cluster
        if options.config is not None:
            named = self.shell.user_ns.get(options.config)
            if not isinstance(named, LaunchConfig):
                raise ValueError(
                    f"-c {options.config}: the kernel has no LaunchConfig with this name; create one first: "
                    f"{options.config} = LaunchConfig(num_processes=2)"
                )
            return named.changed(**given)
        if given.get("num_nodes", 1) == 1:
            given.setdefault("use_port", 0)
        return LaunchConfig(**given)

    def _running(self) -> WarmRanks:
        if self.group is None or not self.group.alive:
            raise ValueError("there are no warm ranks; start some: %%ranks -n 2")
        return self.group

    def _execute(
        self, group: WarmRanks, cell: str, ranks: list[int] | None, inputs: list[str], outputs: list[str]
    ) -> None:
        user = self.shell.user_ns
        if missing := [name for name in inputs if name not in user]:
            raise ValueError(f"-i {','.join(missing)}: no such variable in the kernel; assign a value in a cell first")
        source = "\n" + cell  # The line with the magic counts as the cell's first line.
        filename = self.shell.compile.cache(source, self.shell.execution_count)
        result = group.execute(source, filename, ranks, {name: user[name] for name in inputs}, outputs)
        for name in outputs:
            user[name] = [values[name] for _, values in sorted(result.fetched.items())]
        _show(result)


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError in cases where argparse would exit the kernel."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.format_usage().strip()}")


def _start_parser(name: str) -> _Parser:
    parser = _Parser(name, add_help=False)
    parser.add_argument("-n", "--num-processes", type=int)
    parser.add_argument("-s", "--start-method")
    parser.add_argument("-p", "--mixed-precision")
    parser.add_argument("-c", "--config")
    parser.add_argument("--on")
    parser.add_argument("--num-nodes", type=int)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--master-addr")
    parser.add_argument("--port", dest="use_port", type=int)
    parser.add_argument("--rdzv-backend")
    return parser


def _with_variables(parser: _Parser) -> _Parser:
    parser.add_argument("-i", "--input", dest="inputs", type=_names, default=[])
    parser.add_argument("-o", "--output", dest="outputs", type=_names, default=[])
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in names if not name.isidentifier()]:
        # argparse shows an ArgumentTypeError's message, but not a ValueError's.
        raise argparse.ArgumentTypeError(
            f"not valid variable names: {', '.join(bad)}; separate the names with commas, such as a,b"
        )
    return names


def _show(result: CellResult) -> None:
    for rank, text in sorted(result.shown.items()):
        if text:
            label = f"[rank {rank}] "
            print(label + text.replace("\n", "\n" + " " * len(label)))  # noqa: T201 - the value of a cell


def load(shell: Any) -> None:
    """Register the magics with an IPython shell."""
    shell.register_magics(RankMagics)
