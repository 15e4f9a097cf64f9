from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from notebook_accelerate.config.kwargs_handlers import ProfileKwargs
from notebook_accelerate.tracking import profiled
from notebook_accelerate.tracking.profiler_traces import _write_trace


def _settings(folder: Path, **more: object) -> ProfileKwargs:
    return ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder / "traces"), **more)  # type: ignore[arg-type]


def _operations(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}


@pytest.mark.parametrize("end", [ValueError("of the training"), SystemExit(0), KeyboardInterrupt()])
def test_a_block_that_ends_early_leaves_a_complete_trace(tmp_path: Path, end: BaseException) -> None:
    waited: list[int] = []

    def train() -> None:
        with profiled(_settings(tmp_path), 3, lambda: waited.append(1)):
            torch.ones(2) @ torch.ones(2)
            raise end

    with pytest.raises(type(end)) as caught:
        train()
    assert caught.value is end
    assert "aten::dot" in _operations(tmp_path / "traces" / "profile_3.json")
    assert [file.name for file in (tmp_path / "traces").iterdir()] == ["profile_3.json"]
    assert waited == []  # The rank must not wait for others, which may never arrive.


def test_ranks_wait_for_each_other_once_their_traces_are_written(tmp_path: Path) -> None:
    trace = tmp_path / "traces" / "profile_0.json"
    waited: list[bool] = []
    with profiled(_settings(tmp_path), 0, lambda: waited.append(trace.exists())):
        torch.ones(1)
    assert waited == [True]


def test_a_schedule_that_never_records_warns(tmp_path: Path) -> None:
    settings = _settings(tmp_path, schedule_option={"wait": 5, "warmup": 1, "active": 1})
    with (
        pytest.warns(UserWarning, match=r"recorded nothing for profile_0\.json.*profiler\.step\(\)"),
        profiled(settings, 0, lambda: None) as profiler,
    ):
        profiler.step()
    assert not (tmp_path / "traces").exists()


def test_a_trace_that_cannot_be_written_does_not_hide_the_error_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    with (
        pytest.warns(UserWarning, match=r"cannot write the profiler\'s trace .*profile_0\.json \(FileExistsError"),
        pytest.raises(ValueError, match="of the training"),
        profiled(_settings(tmp_path), 0, lambda: None),
    ):
        raise ValueError("of the training")


def test_a_failed_write_leaves_no_partial_trace(tmp_path: Path) -> None:
    class Failing:
        profiler = object()

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("{")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        _write_trace(Failing(), tmp_path / "profile_0.json")
    assert list(tmp_path.iterdir()) == []
