"""Inspecting ranks before their function starts, stopping ranks in the debugger, and breakpoints in child processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from notebook_accelerate import WorkerError, notebook_launcher
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("zygote")


def loaded(gate: str) -> str:
    while not Path(gate).exists():
        time.sleep(0.02)
    return "loaded"


class Late:
    """An object that takes time to unpickle, like one whose module has to import torch."""

    def __init__(self, gate: Path) -> None:
        self._gate = str(gate)

    def __reduce__(self) -> Any:
        return loaded, (self._gate,)


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_a_rank_survives_a_question_before_its_function_starts(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_processes": 1, "use_port": 0, "start_method": method, "block": False}
    run = notebook_launcher(lambda text: text, (Late(tmp_path / "gate"),), **options)
    asked = run.ask("text", timeout=3.0)[0]
    (tmp_path / "gate").touch()
    assert run.wait(120)
    assert str(asked) == "rank 0 did not reply: it has not called the function yet"
    assert run.results == ("loaded",)


def stopped() -> None:
    for _ in range(2):
        breakpoint()  # noqa: T100 - what is tested


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_stop_quits_debuggers(method: str) -> None:
    """A debugger consumes the interrupt and prompts again."""
    options: dict[str, Any] = {"num_processes": 2, "use_port": 0, "start_method": method, "block": False}
    run = notebook_launcher(stopped, **options)
    until(lambda: run._internals.commands.prompts.debugged() == [0, 1])
    run.stop(grace=100.0)  # The run must end before SIGTERM, which would follow more than a minute later.
    assert [info.exit for info in run.ranks] == ["exit 1", "exit 1"]
    assert run.status == "stopped"


class Stopping(Dataset[int]):
    """A dataset that stops at a breakpoint for every item."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        breakpoint()  # noqa: T100 - what is tested
        return index


def test_a_breakpoint_in_a_child_process_of_a_rank_says_so() -> None:
    with pytest.raises(WorkerError) as caught:
        notebook_launcher(
            lambda: list(DataLoader(Stopping(), num_workers=1)), num_processes=1, use_port=0, start_method="fork"
        )
    text = caught.value.failures[0].chain[-1].message
    assert "a breakpoint in a process that a rank has started, such as a DataLoader worker, cannot be" in text
    assert "DataLoader(..., num_workers=0)" in text
