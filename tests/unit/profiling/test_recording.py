"""The recordings of live ranks contain whole optimizer steps, whatever else the function does, and always end."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, notebook_launcher, torch_internals
from notebook_accelerate.launch import Profile, Run
from notebook_accelerate.profiling.facts import RankReader
from notebook_accelerate.profiling.tables import SampledLines
from notebook_accelerate.profiling.trace import parse, read_trace
from notebook_accelerate.telemetry.debug_protocol import TRACE_KEY, ProfileReply, ProfileRequest
from notebook_accelerate.utils import ProfileKwargs
from notebook_accelerate.worker import (
    exit_handlers,
    held_tensors,
    memory_report,
    stacks,
    step_profiler,
    timed_samples,
)
from tests.support.waiting import until


@contextmanager
def launched(function: Callable[..., None], *args: object, ranks: int = 1) -> Iterator[Run]:
    torch_internals.import_inductor()
    run = notebook_launcher(function, args, ranks, use_port=0, block=False, panel=False, start_method="fork")
    try:
        until(lambda: run.ended is not None or bool(run.stacks()[0]))
        yield run
    finally:
        run.stop(grace=1.0)


def trained(run: Run, steps: int = 3) -> None:
    until(lambda: run.ended is not None or run._internals.store.last_step.get(0, 0) > steps)


def optimizer_steps(profile: Profile) -> list[int]:
    """Return how many optimizer steps start in each recorded step."""
    (trace,) = profile._analysis.traces
    begins = [trace.start[i] for i in range(len(trace)) if trace.text(i).startswith("Optimizer.step#")]
    return [sum(start <= begin < end for begin in begins) for start, end in trace.steps()]


class Training:
    """A small model that an Accelerator trains."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(64, 64)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(8, 64)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()


def logs_often() -> None:
    training = Training()
    while True:
        training.step()
        for name in ("loss", "rate", "norm"):
            training.accelerator.log({name: 1.0})


def test_metrics_do_not_end_the_steps_of_an_optimizer() -> None:
    with launched(logs_often) as run:
        trained(run)
        profile = run.profile(steps=4)
    assert (profile.missing, optimizer_steps(profile)) == ({}, [1, 1, 1, 1])


def logs_first() -> None:
    training = Training()
    for _ in range(100):
        time.sleep(0.05)
        training.accelerator.log({"loading": 1.0})
    while True:
        training.step()
        time.sleep(0.05)


def test_the_first_step_of_an_optimizer_ends_the_count_of_metrics() -> None:
    with launched(logs_first) as run:
        until(lambda: run.ended is not None or "loading" in run.metrics)
        profile = run.profile(steps=200)
    assert (profile.missing, set(optimizer_steps(profile)), profile.steps) == ({}, {1}, 200)


def logs_on_a_thread() -> None:
    training = Training()

    def log() -> None:
        while True:
            training.accelerator.log({"temperature": 40.0})
            time.sleep(0.002)

    threading.Thread(target=log, daemon=True).start()
    while True:
        time.sleep(0.05)


def test_metrics_of_another_thread_do_not_end_a_step() -> None:
    with launched(logs_on_a_thread) as run:
        until(lambda: run.ended is not None or "temperature" in run.metrics)
        profile = run.profile(steps=3, seconds=2.0)
        assert run.ended is None
    assert (profile.missing, profile.steps) == ({}, 0)


def slow_steps() -> None:
    training = Training()
    while True:
        training.model(torch.ones(8, 64))
        time.sleep(1.2)
        training.step()


def test_a_recording_that_starts_within_a_step_counts_from_the_next_one() -> None:
    with launched(slow_steps) as run:
        trained(run, 1)
        profile = run.profile(steps=1, seconds=30.0)
    assert (profile.steps, optimizer_steps(profile)) == (1, [1])
    assert profile.seconds > 1.2
    (trace,) = profile._analysis.traces
    (start, end) = trace.steps()[0]
    assert sum(trace.text(i) == "aten::linear" and start <= trace.start[i] < end for i in range(len(trace))) == 2


def profiles_itself(file: str) -> None:
    training = Training()
    while True:
        time.sleep(0.005)
        training.step()
        if Path(file).exists():
            Path(file).unlink()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
                training.step()
            assert any(each.key == "aten::addmm" for each in own.key_averages())


def always_profiles_itself() -> None:
    training = Training()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=False):
        while True:
            time.sleep(0.02)
            training.step()


def test_a_profiler_of_the_function_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    with launched(profiles_itself, str(tmp_path / "go")) as run:
        trained(run)
        timer = threading.Timer(2.0, (tmp_path / "go").touch)
        timer.start()
        profile = run.profile(steps=1000)
        timer.join()
        assert (profile.missing, run.ended) == ({}, None)
        assert 1 <= profile.steps < 1000
        assert set(optimizer_steps(profile)) == {1}
        at = run._internals.store.last_step[0]
        until(lambda: run.ended is not None or run._internals.store.last_step[0] > at + 20)
        assert run.ended is None
        assert run.ask("__import__('torch').autograd.profiler.profile._prepare_trace.__qualname__")[0].startswith(
            "prof"
        )


def test_there_is_no_profile_while_the_function_records() -> None:
    with launched(always_profiles_itself) as run:
        trained(run)
        profile = run.profile()
        assert run.ended is None
        at = run._internals.store.last_step[0]
        until(lambda: run.ended is not None or run._internals.store.last_step[0] > at + 3)
        assert run.ended is None
    assert profile.missing == {0: "the function itself records with torch's profiler"}


def waits_for_a_rank(file: str) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        while not Path(file).exists():
            time.sleep(0.05)
    torch.distributed.barrier()
    while True:
        time.sleep(0.02)
        accelerator.log({"loop": 1.0})


def test_a_rank_that_waits_in_native_code_reports_it_soon_and_can_be_profiled_later(tmp_path: Path) -> None:
    with launched(waits_for_a_rank, str(tmp_path / "go"), ranks=2) as run:
        until(lambda: run.ended is not None or "barrier" in repr(run.stacks()[0]))
        begin = time.monotonic()
        profile = run.profile(seconds=0.5, ranks=[0])
        assert "its main thread has not moved for" in profile.missing[0]
        memory = run.memory(ranks=[0], seconds=0.5)
        assert memory.bytes(0)["process, resident"] > 0
        assert "the activations of rank 0 are not known: its main thread has not moved for" in repr(memory)
        assert time.monotonic() - begin < 60
        (tmp_path / "go").touch()
        until(lambda: run.ended is not None or "loop" in run.metrics)
        assert run.profile(steps=2, ranks=[0]).missing == {}


def stops_within_a_step(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        waits_for_a_rank(f"{folder}/go")
    while not Path(folder, "stop").exists():
        time.sleep(0.02)
        accelerator.log({"loop": 1.0})
    torch.distributed.barrier()
    while True:
        time.sleep(0.02)
        accelerator.log({"after": 1.0})


def test_a_recording_that_hangs_in_native_code_ends_and_is_stopped_later(tmp_path: Path) -> None:
    with launched(stops_within_a_step, str(tmp_path), ranks=2) as run:
        until(lambda: run.ended is not None or "loop" in run.metrics)
        timer = threading.Timer(1.5, (tmp_path / "stop").touch)
        timer.start()
        begin = time.monotonic()
        profile = run.profile(steps=1000, seconds=3.0, ranks=[0])
        timer.join()
        assert "its main thread has not moved for" in profile.missing[0]
        assert time.monotonic() - begin < 60
        (tmp_path / "go").touch()
        until(lambda: run.ended is not None or "after" in run.metrics)
        again = run.profile(steps=2, ranks=[0])
        assert (again.missing, again.steps) == ({}, 2)


def test_one_profile_at_a_time() -> None:
    with launched(slow_steps) as run:
        trained(run, 1)
        first: list[Profile] = []
        recording = threading.Thread(target=lambda: first.append(run.profile(steps=2)))
        recording.start()
        loaded = "'notebook_accelerate.worker.step_profiler' in __import__('sys').modules"
        until(lambda: run.ended is not None or run.ask(loaded)[0] is True)
        second = run.profile(steps=1)
        recording.join()
    assert second.missing == {0: "it is already being profiled"}
    assert (first[0].missing, first[0].steps) == ({}, 2)


def ends_soon() -> None:
    training = Training()
    for _ in range(40):
        time.sleep(0.05)
        training.step()


def test_a_rank_that_ends_during_the_recording_reports_it() -> None:
    with launched(ends_soon) as run:
        trained(run, 1)
        profile = run.profile(steps=1000)
        until(lambda: run.ended is not None)
        assert run.status == "succeeded"
    assert profile.missing[0].startswith("it is ")


def records(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    for name in ("first", "second"):
        with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=f"{folder}/{name}")):
            torch.ones(4, 4) @ torch.ones(4, 4)


def test_recordings_of_the_function_are_in_profiles(tmp_path: Path) -> None:
    with launched(records, str(tmp_path), ranks=2) as run:
        until(lambda: run.ended is not None)
        assert run.status == "succeeded", run.error
        first, second = run.profiles
        assert (first.ranks, first.missing) == ([0, 1], {})
        assert "aten::mm" in repr(first)
        assert "<svg" in first.html or "<img" in first.html
        assert {path.parent.name for path in second.paths.values()} == {"second"}
        first.paths[0].unlink()
        second.paths[1].write_text("{")
        first, second = sorted(run.profiles, key=lambda each: tuple(each.missing))
        assert first.missing == {0: f"there is no file {tmp_path}/first/profile_0.json on this machine"}
        assert "is not a trace of torch's profiler" in second.missing[1]


# ---- things that a recording must not do


class Large:
    """A large value that a variable refers to."""


def test_reading_variables_keeps_none_of_them_alive() -> None:
    def train() -> tuple[bool, bool]:
        value = Large()
        known = weakref.ref(value)
        found = held_tensors.variables_of(sys._getframe())
        seen = found.pop("value") is value
        del found, value
        return seen, known() is None

    assert train() == (True, True)


def test_a_dictionary_of_locals_that_a_function_holds_is_unchanged() -> None:
    def train(rate: float) -> dict[str, Any]:
        settings = locals()
        assert held_tensors.variables_of(sys._getframe())["rate"] == rate
        return settings

    assert train(0.5)["rate"] == 0.5


def test_threads_have_no_processor_time_before_their_start_and_after_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, over = threading.Thread(target=int), threading.Thread(target=int)
    over.start()
    over.join()
    time.sleep(0.05)
    monkeypatch.setattr(threading, "enumerate", lambda: [waiting, over, threading.main_thread()])
    found = timed_samples._seconds_of(timed_samples._thread_numbers())
    assert list(found) == [threading.main_thread().ident]
    assert found[threading.main_thread().ident or 0] > 0.01


def test_frames_outside_the_launched_function_are_excluded_from_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = timed_samples.TimedSamples()
    monkeypatch.setattr(stacks, "LAUNCHERS", (__file__,))
    samples._index(sys._getframe())
    assert samples._places == {}


def test_samples_without_a_start_end() -> None:
    samples = timed_samples.TimedSamples()
    samples.end()
    assert samples.run()["times"] == []


def test_samples_are_taken_between_start_and_end() -> None:
    samples, found = timed_samples.TimedSamples(), []
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=lambda: found.append(samples.run()))
    thread.start()
    begin = time.time_ns()
    samples.begin()
    until(lambda: len(samples._times) > 5)
    samples.end()
    end, frame = time.time_ns(), sys._getframe().f_code.co_filename
    thread.join()
    assert sys.getswitchinterval() == interval
    assert all(begin <= each <= end for each in found[0]["times"])
    assert frame in {each[0] for each in found[0]["frames"]}
    assert 0 < found[0]["cpu"] <= found[0]["seconds"]


def test_the_precision_of_a_launch_is_known_before_the_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("notebook_accelerate.state.accelerator_state", "accelerate.state"):
        monkeypatch.setitem(sys.modules, room, None)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", " bf16 ")
    assert step_profiler.asked_for()["mixed_precision"] == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "")
    assert step_profiler.asked_for()["mixed_precision"] == "no"


def test_samples_continue_for_the_requested_time() -> None:
    samples, found = timed_samples.TimedSamples(), []
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=lambda: found.append(samples.run()))
    thread.start()
    begin = time.time_ns()
    samples.begin(0.3)
    samples.end()
    assert samples.running
    assert sum(number * number for number in range(500_000)) > 0
    thread.join(10.0)
    assert not samples.running
    assert sys.getswitchinterval() == interval
    assert found[0]["seconds"] >= 0.3
    assert found[0]["times"][-1] - begin > 0.15e9
    assert 0 < found[0]["cpu"] <= found[0]["seconds"]


def test_facts_are_appended_to_a_trace_of_torch(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2) + 1
    profiler.export_chrome_trace(str(file))
    before = json.loads(file.read_text())
    facts = {"rank": 3, "held": [{"né": {"bytes": 3, "name": 'a "quoted" \\ name'}}]}
    step_profiler.append(file, facts)
    assert json.loads(file.read_text()) == {**before, TRACE_KEY: facts}
    assert read_trace(file).facts == facts
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="does not end with a brace"):
        step_profiler.append(file, facts)


def test_a_trace_is_sent_if_the_ranks_cannot_reach_the_folder_of_the_kernel(tmp_path: Path) -> None:
    def recorded() -> step_profiler.Recorded:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            torch.ones(2) + 1
        return step_profiler.Recorded(profiler, request, facts)

    facts = {"rank": 1, "steps": 2, "seconds": 0.5, "clock": 0.25}
    request = ProfileRequest(7, 2, 0.0, memory=False, folder=str(tmp_path), token="its-mark")
    reply = recorded().complete()
    assert (reply.number, reply.path, reply.steps, reply.seconds, reply.clock) == (7, "", 2, 0.5, 0.25)
    assert json.loads(gzip.decompress(reply.payload))[TRACE_KEY] == facts
    (tmp_path / "its-mark").touch()
    reply = recorded().complete()
    assert (reply.path, reply.payload) == (str(tmp_path / "rank1.7.pt.trace.json"), b"")
    assert read_trace(reply.path).facts == facts


def ends_with_a_profile(file: str) -> None:
    training = Training()
    while not Path(file).exists():
        time.sleep(0.02)
        training.step()
    complete = step_profiler.Recorded.complete

    def complete_late(recorded: step_profiler.Recorded) -> ProfileReply:
        time.sleep(1.0)
        return complete(recorded)

    step_profiler.Recorded.complete = complete_late  # type: ignore[assignment, method-assign]  # in this rank
    for _ in range(1000):
        training.step()
        if exit_handlers.awaited:
            return


def test_an_exiting_rank_waits_until_its_trace_is_written(tmp_path: Path) -> None:
    with launched(ends_with_a_profile, str(tmp_path / "go")) as run:
        trained(run)
        threading.Timer(1.0, (tmp_path / "go").touch).start()
        profile = run.profile(steps=200)
        until(lambda: run.ended is not None)
        assert run.status == "succeeded", run.error
    assert (profile.missing, profile.steps) == ({}, 200)


# ---- memory held by variables


class Holder:
    """An object that the function uses, with an attribute and nested containers."""

    def __init__(self) -> None:
        self.mean: Any = 0.0
        self.history: dict[str, list[torch.Tensor]] = {"train": [], "test": []}
        self.last: Any = None


def looked(steps: int) -> list[dict[str, Any]]:
    """Return the findings before and after this many steps of a training function that keeps references."""
    watch, found = held_tensors.GraphWatch(), []
    weight = torch.ones(600, 600, requires_grad=True)
    holder, losses, hooked, total = Holder(), [], {}, torch.zeros(())
    values: list[torch.Tensor] = []
    for number in range(300 + steps + 1):
        outputs = {"scores": weight * 2}
        loss = outputs["scores"].sum()
        loss.backward()
        hooked["scores"] = outputs["scores"]
        losses.append(loss)
        holder.history["train"].append(loss)
        values.append(loss.detach())
        total = total + loss
        holder.mean = 0.9 * holder.mean + 0.1 * loss
        holder.last = loss
        if number in (300, 300 + steps):
            found.append(watch.look())
    return found


def test_growing_variables_are_distinguished_from_constant_ones() -> None:
    rows = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": 1e4 * number, "dur": 1e4}
            for number in range(4)]  # fmt: skip
    trace = parse({TRACE_KEY: {"rank": 0, "steps": 4, "held": looked(4)}}, rows)
    facts = RankReader(trace, SampledLines(trace, str)).read()
    grown = {name: growth for name, _, growth in facts.grown}
    assert {name: grown[name] for name in ("losses", "holder.history")} == {"losses": 4, "holder.history": 4}
    assert grown["total"] > 4
    assert grown["holder.mean"] > 4
    assert set(grown) == {"losses", "holder.history", "total", "holder.mean"}
    assert [row for row in facts.retained if row[1] >= 1 << 20] == [("hooked", 600 * 600 * 4)]


def attends() -> None:
    model = torch.nn.MultiheadAttention(64, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 4, 64)
    while True:
        model(x, x, x)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_memory_is_compared_with_the_size_of_parameters_and_optimizer() -> None:
    with launched(attends) as run:
        trained(run)
        memory = run.memory(seconds=0)
    size = 4 * (192 * 64 + 192 + 64 * 64 + 64)  # The model has parameters of its own, and a child module.
    parts = memory.bytes(0)
    assert (parts["parameters"], parts["gradients"]) == (size, size)
    assert 2 * size <= parts["optimizer state"] <= 2 * size + 64
    assert memory.reports[0]["expected"] == {"parameters": size, "gradients": size, "optimizer state": 2 * size}
    head, row = (line.split() for line in repr(memory).splitlines()[:8] if line.startswith(("bytes of", "optimizer")))
    assert head[-1] == "expected"
    assert row[-4:] == ["133", "kB", "133", "kB"]


def sets_gradients() -> None:
    warnings.simplefilter("error")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_survives_many_memory_reports() -> None:
    with launched(sets_gradients) as run:
        trained(run)
        for _ in range(100):
            memory = run.memory(seconds=0)
            assert memory.missing == {}
            assert memory.bytes(0)["gradients"] == 100 * 4 * (16 * 16 + 16)  # Gradients are read when a step ends.
        assert run.status == "running"


def in_several_groups() -> None:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.distributed.new_group([0, 1])
    number = torch.ones(64, 64)
    while True:
        model(torch.ones(8, 64)).sum().backward()
        if torch.distributed.get_rank() == 1:
            time.sleep(0.05)
        torch.distributed.all_reduce(number, group=other)
        optimizer.step()
        optimizer.zero_grad()


def test_collectives_of_several_groups_are_joined_by_group_and_number() -> None:
    with launched(in_several_groups, ranks=2) as run:
        trained(run)
        profile = run.profile(steps=3)
    assert (profile.missing, profile.steps) == ({}, 3)
    assert [trace.groups for trace in profile._analysis.traces] == [2, 2]
    assert any(row.name == "gloo:all_reduce" for row in profile.ops())
    joined = profile._analysis.joined
    sizes = {call.group: call.nbytes for each in joined for call in each.calls.values()}
    assert sizes == {"0 (0, 1)": 4 * 64 * 65, "1 (0, 1)": 4 * 64 * 64}
    assert all({call.number for call in each.calls.values()} == {each.number} for each in joined)
    late = [each for each in joined if each.calls[0].group == "1 (0, 1)"]
    assert {each.last for each in late} == {1}
    assert max(each.waits()[0] for each in late) > 0.02


def test_the_main_thread_of_a_forked_rank_has_its_own_processor_time() -> None:
    module = "__import__('notebook_accelerate.worker.timed_samples', fromlist=['x'])"
    ask = f"(lambda m: m._seconds_of(m._thread_numbers()))({module})[__import__('threading').main_thread().ident]"
    with launched(logs_often) as run:
        trained(run)
        first = run.ask(ask)[0]
        trained(run, run._internals.store.last_step[0] + 100)
        assert 0.0 < first < run.ask(ask)[0]


def test_the_peak_of_a_process_is_not_below_its_present_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system updates its record of the peak with a delay."""
    monkeypatch.setattr(step_profiler, "resident_bytes", lambda: 1 << 50)
    assert memory_report._process()["peak"] == 1 << 50
