"""Profiles and memory of live ranks: requests that are refused, other ranks, bounds, and failures."""

from __future__ import annotations

import time

import pytest

from notebook_accelerate import notebook_launcher, torch_internals
from notebook_accelerate.launch import Profile, Run
from notebook_accelerate.telemetry import step_time
from tests.support.waiting import until


def train() -> None:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    while True:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_broken_samples() -> None:
    from notebook_accelerate.worker.timed_samples import TimedSamples

    def broken(*_args: object) -> None:
        raise RuntimeError("as planned")

    TimedSamples._sample = broken  # type: ignore[method-assign]
    train()


def logs_only() -> None:
    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    while True:
        time.sleep(0.02)
        accelerator.log({"loop": 1.0})


def sleeps() -> None:
    import torch

    torch.ones(1)
    while True:
        time.sleep(0.01)


def launched(function: object, processes: int = 1, method: str = "fork") -> Run:
    torch_internals.import_inductor()
    return notebook_launcher(function, (), processes, use_port=0, block=False, panel=False, start_method=method)  # type: ignore[call-overload]


def running(run: Run) -> bool:
    return run.ended is not None or bool(run.stacks()[0])


def called_at_steps(run: Run, rank: int) -> bool:
    """Return whether a profiler is still called at the end of a rank's steps."""
    callbacks = "__import__('notebook_accelerate.telemetry.step_time', fromlist='x').at_end"
    return bool(run.ask(f"any('StepProfiler' in repr(each) for each in {callbacks})")[rank])


def test_selected_ranks_are_profiled_and_a_paused_one_reports_it() -> None:
    run = launched(train, 2)
    try:
        until(lambda: run.ended is not None or run._internals.store.last_step.get(1, 0) > 3)
        profile = run.profile(steps=2, ranks=[1], memory=True)
        assert (profile.ranks, profile.steps, profile.missing) == ([1], 2, {})
        assert profile.peaks()[1].nbytes > 64 * 64 * 4
        assert not called_at_steps(run, rank=1)
        assert run.pause(timeout=120) == {0: "paused", 1: "paused"}
        assert {rank: why.split(" at")[0] for rank, why in run.profile(steps=1).missing.items()} == {
            0: "paused",
            1: "paused",
        }
        memory = run.memory(seconds=0)
        assert memory.bytes(0)["parameters"] == 64 * 65 * 4
        assert memory.bytes(0)["optimizer state"] == 2 * 64 * 65 * 4 + 8
        for wrong in ({"steps": 0}, {"steps": 10**9}, {"seconds": -1}, {"ranks": [7]}):
            with pytest.raises(ValueError, match=r"allowed|not ranks of this run"):
                run.profile(**wrong)  # type: ignore[arg-type]
    finally:
        run.stop(grace=1.0)
    assert run.profile().missing[0].startswith("it is ")


def sampled(profile: Profile) -> tuple[int, int, float]:
    """Return the numbers of recorded and of sampled steps, and the seconds for which samples were taken."""
    (trace,) = profile._analysis.traces
    return len(trace.steps()), len(trace.sampled_steps()), trace.facts["samples"]["seconds"]


def test_short_steps_are_sampled_for_longer_than_they_are_recorded() -> None:
    run = launched(train)
    try:
        until(lambda: run.ended is not None or run._internals.store.last_step.get(0, 0) > 3)
        by_default, three = run.profile(), run.profile(steps=3)
        assert not called_at_steps(run, rank=0)
    finally:
        run.stop(grace=1.0)
    assert (by_default.steps, three.steps) == (3, 3)
    steps, more, seconds = sampled(by_default)
    assert steps == 3
    assert more > 10
    assert 0.5 <= seconds < 60
    assert sampled(three)[:2] == (3, 3)
    tracks = {track.name: track for track in by_default.timeline.tracks}
    main = tracks["rank 0 · main thread"]
    if (lines := tracks.get("rank 0 · lines")) is not None:  # Three short steps may end before the first sample.
        assert lines.start[-1] + lines.duration[-1] <= main.start[-1] + 1e6
    assert by_default.lines()[0].share <= 1.0
    assert by_default.lines()[0].line.function == "train"


def test_a_profile_without_samples_gives_the_reason() -> None:
    run = launched(train_with_broken_samples)
    try:
        until(lambda: run.ended is not None or run._internals.store.last_step.get(0, 0) > 3)
        profile = run.profile()
    finally:
        run.stop(grace=1.0)
    assert (profile.steps, profile.lines()) == (3, [])
    assert "the lines of rank 0 are not known: RuntimeError: as planned" in repr(profile)
    assert "as planned" in profile.html


def test_metrics_end_the_steps_of_a_training_without_an_optimizer() -> None:
    run = launched(logs_only)
    try:
        until(lambda: run.ended is not None or "loop" in run.metrics)
        profile = run.profile(steps=3)
    finally:
        run.stop(grace=1.0)
    assert (profile.steps, profile.missing) == (3, {})
    assert 0.015 < profile.seconds < 60


def test_a_recording_without_steps_is_bounded_in_seconds() -> None:
    run = launched(sleeps)
    try:
        until(lambda: running(run))
        profile = run.profile(seconds=1.0)
    finally:
        run.stop(grace=1.0)
    assert (profile.ranks, profile.steps, profile.findings) == ([0], 0, [])
    assert "in which no step was complete" in repr(profile)
    assert any("time.sleep" in line.line.source for line in profile.lines())


def exhausts_memory() -> None:
    import torch

    kept = torch.ones(1000, 1000)
    model = torch.nn.Linear(512, 512)
    model(torch.ones(1, 512)).sum().backward()
    torch.empty(10**15)
    del kept


def test_an_out_of_memory_failure_lists_the_contents_of_memory() -> None:
    run = launched(exhausts_memory)
    until(lambda: run.ended is not None)
    message = run.failures[0].message
    assert "can't allocate memory" in message
    table = message.partition("memory of this rank when it failed:\n")[2]
    rows = {line.rsplit("  ", 1)[0].strip(): line.split()[-2:] for line in table.splitlines() if not line.endswith(":")}
    assert rows["parameters"] == ["1.05", "MB"]
    assert rows["gradients"] == ["1.05", "MB"]
    assert rows["kept in exhausts_memory"] == ["4.00", "MB"]


def test_nothing_is_imported_or_hooked_until_a_profile_is_requested() -> None:
    run = launched(train, method="spawn")  # A spawned rank does not share this process's modules.
    try:
        until(lambda: run.ended is not None or run._internals.store.last_step.get(0, 0) > 3)
        names = "[n for n in __import__('sys').modules if n.startswith('notebook_accelerate.worker.')]"
        loaded = run.ask(names)[0]
    finally:
        run.stop(grace=1.0)
    assert not step_time.at_end
    for name in ("step_profiler", "timed_samples", "recorded_traces", "held_tensors", "memory_report"):
        assert f"notebook_accelerate.worker.{name}" not in loaded
