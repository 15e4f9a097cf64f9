"""Ranks in separate processes that measure on command. A command is a line of text, and its answer a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tests.support.ranks import reserved_port


class WorkerRanks:
    """A group of ranks that answer commands, and use no CPU time between commands.

    Args:
        arguments: The module of the worker and its arguments, as after `python -m`. The worker writes "= ready" once,
            and then "= " and JSON for each command.
        ranks: The number of processes. A single rank gets none of torchrun's variables and forms no process group.
        environment: Additional environment variables, which override torchrun's.
    """

    def __init__(self, arguments: Sequence[str], ranks: int, environment: Mapping[str, object]) -> None:
        self._stack = ExitStack()
        port = self._stack.enter_context(reserved_port())
        self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=_environment(rank, ranks, port, environment),
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> WorkerRanks:
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.communicate()
        self._stack.close()

    def ask(self, command: str) -> list[Any]:
        """Send a command to all ranks and return their answers."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        return [json.loads(answer) for answer in self._answers()]

    def steps(self, count: int) -> dict[str, float]:
        """Run `count` steps. Return the wall and CPU seconds of one step on the slowest rank."""
        found = self.ask(f"steps {count}")
        return {name: max(answer[name] for answer in found) for name in found[0]}

    def _answers(self) -> list[str]:
        return [self._answer(process) for process in self._ranks]

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("= "):
                return line[2:] if line != "= ready\n" else "null"
        self._log.seek(0)
        raise RuntimeError(self._log.read()[-2000:])


def _environment(rank: int, ranks: int, port: int, more: Mapping[str, object]) -> dict[str, str]:
    group = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    chosen = {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "", **(group if ranks > 1 else {}), **more}
    return {**os.environ, **{name: str(value) for name, value in chosen.items()}}
