"""Trackers: required attributes, selection, and failures."""

from __future__ import annotations

import copy
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accelerate import Accelerator, telemetry, tracking
from notebook_accelerate.config.enums import LoggerType
from notebook_accelerate.state.warn_once import reset_warnings
from notebook_accelerate.telemetry.events import Event, MetricEvent
from notebook_accelerate.tracking import GeneralTracker, on_main_process, tracker_table


class Memory(GeneralTracker):
    """A tracker that records all calls."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", fails_in: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.kwargs, self.fails_in = run_name, kwargs, fails_in
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def _note(self, what: str, *details: Any) -> None:
        self.calls.append((what, *details))
        if what == self.fails_in:
            raise ConnectionError(f"call {len(self.calls)}: the vendor is away")

    def start(self) -> None:
        self._note("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._note("store_init_configuration", values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._note("log", values, step, kwargs)

    def finish(self) -> None:
        self._note("finish")


@pytest.fixture(autouse=True)
def builtin_trackers() -> Iterator[None]:
    """Restore the table of trackers after the test."""
    before = dict(tracker_table.TRACKERS)
    yield
    tracker_table.TRACKERS.clear()
    tracker_table.TRACKERS.update(before)


class Channel:
    """Stands in for a worker's sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Make this process look like a rank of a launch."""
    sink = Channel()
    telemetry.install_sink(sink)  # type: ignore[arg-type]
    yield sink
    telemetry.install_sink(None)


def test_a_class_must_define_the_required_attributes() -> None:
    class Bare(GeneralTracker):
        pass

    class Named(GeneralTracker):
        name = "named"

    with pytest.raises(NotImplementedError, match=r"`name`, `requires_logging_directory`, `tracker`"):
        Bare()
    with pytest.raises(NotImplementedError, match=r"class definition: `requires_logging_directory`, `tracker`"):
        Named()
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.log({"a": 1}, step=1)
    blank.finish()


def test_an_instance_is_started_used_and_closed() -> None:
    memory = Memory()
    accelerator = Accelerator(cpu=True, log_with=memory)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.5, "text": "x"}, step=3, log_kwargs={"memory": {"z": 1}, "wandb": {"commit": False}})
    assert accelerator.get_tracker("memory") is memory
    assert accelerator.get_tracker("memory", unwrap=True) is memory.calls
    accelerator.end_training()
    assert memory.calls == [
        ("start",),
        ("store_init_configuration", {"lr": 0.1}),
        ("log", {"loss": 1.5, "text": "x"}, 3, {"z": 1}),
        ("finish",),
    ]


def test_a_registered_class_is_created_with_the_projects_name() -> None:
    tracking.register_tracker_class(Memory)
    accelerator = Accelerator(cpu=True, log_with=["memory"])
    accelerator.init_trackers("project", init_kwargs={"memory": {"color": "red"}, "wandb": {"entity": "me"}})
    memory = accelerator.get_tracker("memory")
    assert (memory.run_name, memory.kwargs) == ("project", {"color": "red"})
    assert "memory" in tracking.get_available_trackers()


def test_classes_that_are_not_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="subclass of `GeneralTracker`, but got <class 'int'>"):
        tracking.register_tracker_class(int)  # type: ignore[arg-type]

    class Nameless(Memory):
        name = ""

    with pytest.raises(ValueError, match="needs a unique name"):
        tracking.register_tracker_class(Nameless)

    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(ValueError, match="Incomplete must define the class attribute `requires_logging_directory`"):
        tracking.register_tracker_class(Incomplete)

    class Other(Memory):
        pass

    tracking.register_tracker_class(Memory)
    with pytest.warns(UserWarning, match="'memory' is replaced by Other"):
        tracking.register_tracker_class(Other)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unsupported logging capability: wanbd.*all, aim, .*tensorboard.*wandb"):
        Accelerator(cpu=True, log_with="wanbd")
    with pytest.raises(ValueError, match="Unsupported logging capability: 3"):
        tracking.filter_trackers([3])  # type: ignore[list-item]
    accelerator = Accelerator(cpu=True, log_with=Memory())
    with pytest.raises(ValueError, match=r"unknown trackers \['wanbd'\]"):
        accelerator.init_trackers("p", init_kwargs={"wanbd": {}})
    accelerator.init_trackers("p")
    with pytest.raises(ValueError, match=r"tensorboard is not an available tracker.*It has memory"):
        accelerator.get_tracker("tensorboard")


def test_trackers_are_filtered_by_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in tracker_table.TRACKERS.items():
        there = name in {"tensorboard", "mlflow"}
        monkeypatch.setitem(
            tracker_table.TRACKERS, name, tracker_table.TrackerRow(row.tracker_class, lambda there=there: there, name)
        )
    memory = Memory()
    assert tracking.filter_trackers(None) == []
    assert tracking.filter_trackers([memory, "mlflow", LoggerType.MLFLOW]) == [memory, LoggerType.MLFLOW]
    assert tracking.filter_trackers("all", "logs") == [LoggerType.TENSORBOARD, LoggerType.MLFLOW]
    assert tracking.filter_trackers("all") == [LoggerType.MLFLOW]
    with pytest.raises(ValueError, match=r"`tensorboard` requires a `logging_dir`.*project_dir"):
        tracking.filter_trackers(["tensorboard"])
    with pytest.warns(UserWarning, match="pip install wandb"):
        assert tracking.filter_trackers("wandb") == []


def test_an_entry_point_adds_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_tracker.py").write_text(
        textwrap.dedent("""
        from notebook_accelerate.tracking import GeneralTracker
        class Foreign(GeneralTracker):
            name = "foreign"
            requires_logging_directory = False
            tracker = None
            def __init__(self, run_name):
                super().__init__()
                self.run_name = run_name
        """)
    )
    info = tmp_path / "foreign_tracker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{tracker_table.ENTRY_POINTS}]\nforeign = foreign_tracker:Foreign\n")
    monkeypatch.syspath_prepend(tmp_path)
    accelerator = Accelerator(cpu=True, log_with="foreign")
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("foreign").run_name == "project"
    assert "foreign" in tracker_table.known_trackers()


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_failing_tracker_warns_once_and_does_not_stop_the_others(method: str) -> None:
    broken, sound = Memory(fails_in=method), Memory()
    sound.name = "sound"  # type: ignore[misc]
    accelerator = Accelerator(cpu=True, log_with=[broken, sound])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.init_trackers("p", config={})
        for step in range(3):
            accelerator.log({"loss": step}, step=step)
        accelerator.get_tracker("memory")
        accelerator.end_training()
    (message,) = [str(warning.message) for warning in said]
    assert f"'memory' failed in {method} (ConnectionError: call" in message
    assert "Training continues" in message
    assert [call[0] for call in sound.calls] == ["start", "store_init_configuration", "log", "log", "log", "finish"]


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("aim", "writer"), ("clearml", "task"), ("comet_ml", "writer"), ("dvclive", "live"), ("mlflow", "active_run"),
        ("tensorboard", "writer"), ("wandb", "run"),
    ],
)  # fmt: skip
def test_a_subclass_with_its_own_run_has_it_under_every_name(name: str, attribute: str) -> None:
    base: Any = tracker_table.TRACKERS[name].tracker_class

    class Shared(base):  # type: ignore[misc]
        tracker = "a run of the user's"

    assert getattr(Shared.__new__(Shared), attribute) == "a run of the user's"


def test_an_argument_that_a_tracker_does_not_accept_raises_at_its_start(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    with pytest.raises(TypeError, match="nonsense"):
        accelerator.init_trackers("p", init_kwargs={"tensorboard": {"nonsense": 1}})


def test_logging_without_trackers_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("p")
    accelerator.log({"a": 1, "b": object()})
    accelerator.get_tracker("tensorboard").log({"a": 1})
    with pytest.raises(ValueError, match=r"log\(\) takes a mapping"):
        accelerator.log(3)  # type: ignore[arg-type]


def test_a_launched_run_gets_the_logged_values(channel: Channel) -> None:
    accelerator = Accelerator(cpu=True)
    values = {"a": 1, "b": torch.tensor([2.5]), "c": np.float32(0.5), "d": True, "e": {"x": 3}}
    accelerator.log(values, step=7)
    accelerator.get_tracker("live").log({"by hand": 1})
    assert channel.events == [
        MetricEvent({"a": 1.0, "b": 2.5, "c": 0.5, "d": 1.0, "e/x": 3.0}, 7),
        MetricEvent({"by hand": 1.0}, None),
    ]
    assert accelerator.get_tracker("live", unwrap=True) is channel
    with pytest.warns(UserWarning, match=r"live panel shows only numbers and leaves out 'text' \(str\)"):
        accelerator.log({"text": "x", "loss": 1.0})
    accelerator.log({"text": "y"})
    assert channel.events[2:] == [MetricEvent({"loss": 1.0}, None)]


class Unreadable:
    """An object that looks like a number, but whose methods raise errors."""

    def item(self) -> float:
        """Raise an error."""
        raise RuntimeError("no item")


def test_values_that_cannot_be_read_do_not_end_a_training(channel: Channel) -> None:
    accelerator = Accelerator(cpu=True)
    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    for value in (torch.ones((), device="meta"), nested, Unreadable(), Unreadable, 10**400):
        with pytest.warns(UserWarning, match="live panel shows only numbers and leaves out 'odd'"):
            accelerator.log({"odd": value, "loss": 1.0})
        reset_warnings()
    assert channel.events == 5 * [MetricEvent({"loss": 1.0}, None)]


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        object(),
        10**400,
        torch.ones((), device="meta"),
        Unreadable(),
        None,
        torch.ones(2),
        torch.empty(0),
        [1, 2],
        {"a": "x"},
        {"a": {"b": 1}},
        1j,
        b"x",
        range(2),
    ],
)
def test_values_that_a_tracker_does_not_record_are_skipped(value: Any, texts: bool) -> None:
    from notebook_accelerate.tracking.tracker import scalars

    class Numbers(Memory):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            super().log(scalars(values, "Numbers", texts), step, **kwargs)

    memory = Numbers()
    accelerator = Accelerator(cpu=True, log_with=memory)
    accelerator.init_trackers("p")
    with pytest.warns(UserWarning, match=r"Numbers records numbers.*'train/odd' \(.*loss|'train/odd' .*mean\(\)\.item"):
        accelerator.log({"train/odd": value, "loss": 1.0, "parts": {"a": 2}})
    assert memory.calls[-1][1:2] == ({"loss": 1.0, "parts/a": 2},)


def test_tensorboard_skips_unsupported_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers(
        "run",
        config={
            "lr": 0.1,
            3: "a number as a name",
            "layers": {1: 2},
            "large": 10**400,
            "rate": np.float64(0.5),
            "kind": LoggerType.AIM,
        },
    )  # type: ignore[dict-item]
    with pytest.warns(UserWarning, match=r"TensorBoard records numbers and text; 'odd' \(NoneType\) is left out"):
        accelerator.log({"loss": 1.0, "odd": None}, step=0)
    with pytest.warns(UserWarning, match=r"the name 5 \(int\), which is recorded as '5'"):
        accelerator.log({5: 2.0}, step=1)  # type: ignore[dict-item]
    accelerator.end_training()
    written = EventAccumulator(str(tmp_path / "run"))
    written.Reload()
    assert written.Tags()["scalars"] == ["loss", "5"]
    settings = next(tmp_path.glob("**/hparams.yml")).read_text()
    for line in ("'3': a number as a name", "rate: 0.5", "kind: aim", "lr: 0.1", "layers: '{1: 2}'"):
        assert line in settings


def test_the_tracker_of_ranks_without_one_does_nothing() -> None:
    # As on ranks other than 0, the tracker has not been started.
    accelerator = Accelerator(cpu=True, log_with=Memory())
    tracker = accelerator.get_tracker("memory")
    assert isinstance(tracker, GeneralTracker)
    assert tracker.name == "memory"
    tracker.log({"a": 1}, step=1)
    tracker.log_images({"a": torch.ones(1)}, step=1)  # type: ignore[attr-defined]
    run = accelerator.get_tracker("memory", unwrap=True)
    run.config.update({"a": 1})
    run.summary["best"] = 1.0
    with run.section("x") as section:
        assert list(section["y"]) == []
    assert copy.copy(run).name == "memory"


def test_the_config_may_be_none_and_trackers_can_restart() -> None:
    memory = Memory()
    accelerator = Accelerator(cpu=True, log_with=memory)
    for _ in range(2):
        accelerator.init_trackers("p")
    assert accelerator.trackers == [memory]
