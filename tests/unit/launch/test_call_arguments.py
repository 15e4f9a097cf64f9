"""The arguments of a launched function, which are recorded as plain values."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate import notebook_launcher
from notebook_accelerate.launch import runs
from notebook_accelerate.launch.report.document import Cell
from notebook_accelerate.launch.report.run_comparison import better, differences, runs_table
from notebook_accelerate.launch.run import without_results
from notebook_accelerate.launch.state.call_arguments import MAX_ARGUMENTS, call_arguments
from notebook_accelerate.launch.state.run_commands import NoCommands
from notebook_accelerate.launch.state.run_view import RunInternals
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.widgets.compared_run import BestValues, entry_of
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.support.runs import feed, make_run


@dataclass
class Settings:
    lr: float = 0.1
    inner: dict[str, Any] = field(default_factory=lambda: {"depth": 3, "api_key": "very secret"})


def _train(settings: Settings, names: Namespace, *rest: Any, layers: int = 2, token: str = "") -> int:
    return layers


def test_arguments_are_plain_values_by_name() -> None:
    found = call_arguments(
        _train, (Settings(), Namespace(seed=1, path="https://me:pass@host/x"), torch.ones(2), [1, 2])
    )
    assert found == {
        "settings.lr": 0.1, "settings.inner.depth": 3, "settings.inner.api_key": "***", "names.seed": 1,
        "names.path": "https://***@host/x", "rest": "tuple", "layers": 2, "token": "***",
    }  # fmt: skip
    assert call_arguments(lambda service: service, ({"token.prod": "x", "login": {"accessToken": ["x"]}},)) == {
        "service.token.prod": "***", "service.login.accessToken": "***",
    }  # fmt: skip
    assert call_arguments(_train, (1,)) == {"0": 1}, "the ranks report the error in the call"
    assert len(call_arguments(lambda many: many, ({str(n): n for n in range(1000)},))) == MAX_ARGUMENTS


def test_a_run_knows_its_arguments_and_the_list_of_runs_shows_them() -> None:
    run = notebook_launcher(_train, (Settings(lr=0.5), Namespace(seed=7)), 1, start_method="inline", tags=("sweep",))
    assert run.arguments["settings.lr"] == 0.5
    assert without_results(run).arguments == run.arguments
    listed = runs()
    assert listed[-1].id == run.id
    assert "<Run " in repr(listed)


class _Elsewhere(NoCommands):
    """The commands for a run that belongs to another process."""

    refusal = "run 77 is read from a file: stop it where it was launched"


class _FromFile:
    """A run that is known only from its record, without a launch or process. mypy checks that it is a `ComparedRun`."""

    def __init__(self) -> None:
        run = make_run()
        self.id, self.function_name, self.config = 77, "train", run.config
        self._internals = RunInternals(run._internals.journal, _Elsewhere())
        self.plan = run.plan
        self.status, self.started, self.elapsed = "running", run.started, 5.0
        self.ended: float | None = None
        self.arguments = {"lr": 0.1}

    def stop(self, grace: float = 5.0, wait: bool = True) -> None:
        raise AssertionError("the row of this run has no Stop button")


def test_a_record_of_a_run_is_enough_for_the_table() -> None:
    here, there = make_run(), _FromFile()
    for step, value in enumerate((3.0, 1.0, float("nan"), 2.0)):
        feed(here, MetricEvent({"loss": value, "accuracy": value, "step_count": value}, step))
    table = RunsTable([here, there])
    head, second, first = table.rows
    assert head[2:8] == ["lr", "loss", "best loss", "accuracy", "best accuracy", "step_count"]
    assert second[2:8] == ["0.1", "–", "–", "–", "–", "–"]
    assert first[2:8] == ["–", "2", "1", "2", "3", "2"]
    rows = {row.key: row for row in table.table.rows}
    actions = {key: [action.id for action in row.actions] for key, row in rows.items()}
    assert actions == {"77": ["open"], str(here.id): ["open", "stop"]}, (
        "the run of the other process cannot be stopped from here"
    )
    firsts = [row.cells[0] for row in (rows[str(here.id)], rows["77"])]
    assert [cell.colour for cell in firsts if isinstance(cell, Cell)] == [0, 1]
    assert table.plot.order == [f"train {here.id}", "train 77: lr 0.1"]
    assert "run" in table.text
    assert "data:image" in table.html
    table.close()


def test_the_best_value_is_kept_while_points_arrive() -> None:
    run, values = make_run(), BestValues()
    feed(run, MetricEvent({"val/loss": 2.0}, 1))
    assert values.best(run, "val/loss") == 2.0
    feed(run, MetricEvent({"val/loss": 5.0}, 2))
    assert values.best(run, "val/loss") == 2.0
    assert [better(name) for name in ("train/loss", "val/accuracy", "lr")] == [-1, 1, 0]
    entries = [entry_of(each, ["val/loss"], values) for each in (run, _FromFile())]
    kinds = {column.title: column.kind for column in runs_table(entries).columns}
    assert (kinds["function"], kinds["lr"], kinds["val/loss"]) == ("text", "number", "number")
    assert [column.title for column in runs_table(entries[:1]).columns][2:4] == ["val/loss", "best val/loss"]


def test_the_devices_of_a_sweep_come_after_what_readers_compare() -> None:
    settings: list[dict[str, Any]] = [{"devices": (0,)}, {"devices": (1,), "mixed_precision": "bf16"}]
    runs = [make_run(**each) for each in settings]
    for run in runs:
        feed(run, MetricEvent({"loss": 1.0}, 1))
    entries = [entry_of(run, ["loss"], BestValues()) for run in runs]
    titles = [column.title for column in runs_table(entries).columns]
    assert titles == [
        "run",
        "state",
        "mixed_precision",
        "loss",
        "best loss",
        "took",
        "started",
        "ranks",
        "devices",
        "function",
    ]


def test_the_names_of_curves_contain_the_arguments_that_differ() -> None:
    given: list[dict[str, Any]] = [
        {"lr": 1e-3, "width": 64, "data": "a", "rank": 8},
        {"lr": 1e-4, "width": 64, "data": "b" * 90, "rank": 8},
        {"width": 64, "data": "a", "rank": 8},
    ]
    assert differences(given) == ["lr 0.001, data a", f"lr 1e-4, data {'b' * 24}", "data a"]
    assert differences(given[:1]) == [""]
    assert differences([]) == []
    assert differences([{f"a{index}": run for index in range(9)} for run in range(2)])[1] == "a0 1, a1 1, a2 1, a3 1"
