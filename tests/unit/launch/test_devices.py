"""The devices of a run: the plan for them, the claims that keep runs apart, and the queue of runs that wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accelerate import DeviceBusyError, LaunchConfig, Run, notebook_launcher, runs
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch.plan.planner import KernelFacts, LaunchPlan, make_plan, placed, rank_environment
from notebook_accelerate.launch.processes.device_claims import DeviceClaim
from notebook_accelerate.launch.report.run_snapshot import status
from notebook_accelerate.widgets.forms import Form
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "notebook-accelerate" / "devices"


# ---- the setting


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (2, 2), ("2", 2), ("2,", (2,)), ("0, 1", (0, 1)), ([0, 1], (0, 1)), ("GPU-1", ("GPU-1",)),
        (["GPU-1", "GPU-2"], ("GPU-1", "GPU-2")), (["MIG-1"], ("MIG-1",)),
    ],
)  # fmt: skip
def test_devices_are_a_number_or_a_list(given: Any, stored: Any) -> None:
    assert LaunchConfig(devices=given).devices == stored


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"devices": 0}, "a number of devices of at least 1"),
        ({"devices": True}, "a number of devices of at least 1"),
        ({"devices": []}, "pass a list of different devices"),
        ({"devices": [1, 1]}, "pass a list of different devices"),
        ({"devices": [0, "GPU-1"]}, "pass a list of different devices"),
        ({"devices": ["MIG-1", "MIG-2"]}, r"Launch one run for each slice, such as devices=\['MIG-1'\]"),
        ({"devices": 1, "num_nodes": 2}, "this machine only; leave it out, or num_nodes=2"),
        ({"queue": True, "on": "ray"}, "queue=True is for devices of this machine only"),
    ],
)
def test_invalid_devices_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LaunchConfig(**values)


# ---- the plan

GPUS = {f"GPU-{index}abc": str(index) for index in range(4)}


def _plan(accelerator: str = "cuda", environment: dict[str, str] | None = None, **values: Any) -> LaunchPlan:
    machine = HardwareInfo(
        accelerator=accelerator, count=0 if accelerator == "cpu" else 4, cpu_count=16, memory_bytes=1, host="jupyter",
        loopback="lo", visible={} if accelerator == "cpu" else GPUS, cores=tuple(range(4, 20)),
    )  # fmt: skip
    return make_plan(LaunchConfig(**values), machine, KernelFacts(environment=environment or {}))


@pytest.mark.parametrize(
    ("devices", "held", "variable", "ranks", "threads"),
    [
        ([2], ["cuda:GPU-2abc"], "2", 1, 4),
        ([2, 0], ["cuda:GPU-2abc", "cuda:GPU-0abc"], "2,0", 2, 4),
        (["GPU-1"], ["cuda:GPU-1abc"], "GPU-1", 1, 4),
        (["MIG-5"], ["cuda:MIG-5"], "MIG-5", 1, 4),
        (3, ["cuda:GPU-0abc", "cuda:GPU-1abc", "cuda:GPU-2abc"], "0,1,2", 3, 4),
    ],
)
def test_ranks_see_the_devices_of_their_run(
    devices: Any, held: list[str], variable: str, ranks: int, threads: int
) -> None:
    plan = placed(_plan(devices=devices), held)
    assert (plan.num_processes, plan.threads, list(plan.slots)) == (ranks, threads, held)
    for rank in range(ranks):
        seen = rank_environment(plan, rank)
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["LOCAL_RANK"]) == (variable, str(rank))
        assert seen["ACCELERATE_CPU_AFFINITY"] == "1", "the rank binds itself to the cores near its GPU"
    assert f"cuda [{', '.join(variable.split(','))}]" in plan.sentence()


def test_without_devices_a_run_holds_all_that_are_visible() -> None:
    plan = _plan()
    assert list(plan.slots) == [f"cuda:{uuid}" for uuid in GPUS]
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(placed(plan, list(plan.slots)), 0)
    assert _plan("cpu").slots == {}, "runs share the CPU"


def test_cores_are_a_number_or_a_list() -> None:
    plan = placed(_plan("cpu", devices=3, num_processes=2), ["cpu:7", "cpu:9", "cpu:11"])
    assert (plan.threads, plan.variables) == (1, {"NOTEBOOK_ACCELERATE_CORES": "7,9,11"})
    assert _plan("cpu", devices=8).threads == 8
    assert list(_plan("cpu", devices=[5, 19]).slots) == ["cpu:5", "cpu:19"]


def test_devices_and_the_queue_are_fields_of_the_form() -> None:
    form = Form(LaunchConfig)
    form.enter("devices", "0, 1")
    form.enter("queue", True)
    assert form.errors == {}
    assert (form.value.devices, form.value.queue) == ((0, 1), True)
    form.enter("devices", "0, 0")
    assert "pass a list of different devices" in form.errors["devices"]


@pytest.mark.parametrize(
    ("accelerator", "values", "match"),
    [
        ("cuda", {"devices": 5}, "this machine has 4 cuda devices; pass at most devices=4"),
        ("cuda", {"devices": [4]}, "pass some of: 0, 1, 2, 3"),
        ("cuda", {"devices": ["GPU-9"]}, "pass some of: GPU-0abc, GPU-1abc"),
        ("cuda", {"devices": ["GPU-"]}, "pass some of: GPU-0abc, GPU-1abc"),
        ("cuda", {"devices": [0, 1], "num_processes": 3}, r"devices=\(0, 1\) selects 2 cuda devices"),
        ("cuda", {"devices": [0], "env": {"CUDA_VISIBLE_DEVICES": "1"}}, "pass one of them"),
        ("cuda", {"devices": [0], "start_method": "inline"}, "does not support block=False|does not support devices"),
        ("cpu", {"devices": [0]}, "not one of the cores that this kernel can use; pass some of: 4, 5"),
        ("cpu", {"devices": ["GPU-1"]}, "not one of the cores that this kernel can use; pass some of: 4, 5"),
        ("tpu", {"devices": [0]}, "not possible with devices of the type tpu"),
    ],
)
def test_devices_that_a_machine_lacks_are_refused(accelerator: str, values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _plan(accelerator, **values)


# ---- claims


def _claim(name: str, *devices: str, count: int = 0) -> DeviceClaim:
    return DeviceClaim(name, 0, devices, count or len(devices), detached=False)


def test_a_device_belongs_to_one_run_at_a_time(state: Path) -> None:
    first, second, third = _claim("first", "a", "b"), _claim("second", "b", "c"), _claim("third", "c")
    assert first.acquire(in_turn=False) is None
    assert (busy := second.acquire(in_turn=False)) is not None
    assert busy.name == "first"
    assert third.acquire(in_turn=False) is None, "a refused launch holds nothing"
    first.release()
    third.release()
    assert second.acquire(in_turn=False) is None
    assert second.devices == ("b", "c")
    second.release()
    assert list(state.iterdir()) == []


def test_the_queue_is_served_in_order() -> None:
    first, wide, narrow = _claim("first", "a"), _claim("wide", "a", "b", "c", count=3), _claim("narrow", "b")
    assert first.acquire(in_turn=True) is None
    assert (ahead := wide.acquire(in_turn=True)) is not None
    assert ahead.name == "first"
    assert (ahead := narrow.acquire(in_turn=True)) is not None, "otherwise, a run on many devices might never start"
    assert ahead.name == "wide"
    now = _claim("now", "c")
    assert now.acquire(in_turn=False) is None, "only live runs refuse a launch"
    for each in (first, now):
        each.release()
    assert wide.acquire(in_turn=True) is None
    wide.release()
    assert narrow.acquire(in_turn=True) is None
    narrow.release()


def test_any_free_devices_are_given() -> None:
    first, second = _claim("first", "a", "b", "c", count=1), _claim("second", "a", "b", "c", count=2)
    assert [first.acquire(in_turn=False), second.acquire(in_turn=True)] == [None, None]
    assert (first.devices, second.devices) == (("a",), ("b", "c"))
    for each in (first, second):
        each.release()


CHILD = """
import sys, time
from notebook_accelerate.launch.processes.device_claims import DeviceClaim
held = DeviceClaim("theirs", 1, ("a",), 1, detached=False).acquire(in_turn=False)
waits = DeviceClaim("waits", 2, ("a", "b"), 2, detached=False).acquire(in_turn=True)
print(held, waits.name, flush=True)
time.sleep(600)
"""


def test_a_dead_kernel_frees_its_devices_and_its_place_in_the_queue(state: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "None theirs\n"
        busy = _claim("ours", "b").acquire(in_turn=True)
        assert busy is not None
        assert (busy.name, busy.is_own) == ("waits", False)
        kernel.kill()
    ours = _claim("ours", "a", "b")
    assert ours.acquire(in_turn=False) is None
    ours.release()


# ---- runs


@pytest.fixture(scope="module")
def launched() -> Iterator[list[Run]]:
    """Yield a list for runs, which are stopped at the end."""
    found: list[Run] = []
    yield found
    for run in found:
        run.stop(0.5)


def _wait(seconds: float) -> tuple[list[int], str]:
    time.sleep(seconds)
    return sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]


@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="needs two cores")
def test_runs_wait_for_their_devices_and_start_in_order(launched: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    one, two = sorted(os.sched_getaffinity(0))[:2]

    def launch(seconds: float, *devices: int, **values: Any) -> Run:
        run = notebook_launcher(_wait, (seconds,), block=False, panel=False, devices=devices, **values)
        launched.append(run)
        return run

    first, second = launch(600.0, one), launch(0.0, two, queue=True)
    second.wait()
    assert second.results == (([two], "1"),), "it ran side by side with the first"
    with pytest.raises(DeviceBusyError) as refused:
        launch(0.0, one, two)
    place = next(place for place, run in enumerate(runs()) if run is first)
    assert str(refused.value) == (
        f"run {first.id} ({first.name}) holds cpu:{one}; wait for it, end it with "
        f"notebook_accelerate.runs()[{place}].stop(), or pass queue=True to start after it"
    )
    both, stopped, last = (launch(0.0, *cores, queue=True) for cores in ((one, two), (one,), (one,)))
    assert [status(run) for run in (both, stopped, last)] == [
        f"queued, behind {first.name}", f"queued, behind {both.name}", f"queued, behind {stopped.name}"
    ]  # fmt: skip
    assert (both.plan, both.ranks, both.done) == (None, (), False)
    stopped.stop()
    assert (stopped.status, stopped.plan) == ("stopped", None)
    until(lambda: status(last) == f"queued, behind {both.name}")
    first.stop(0.5)
    assert both.wait(60)
    assert last.wait(60)
    assert both.results == (([one, two], "2"),)
    assert both.attempts[0].started <= last.attempts[0].started
    assert last.plan is not None
    assert "cpu [" in last.plan.sentence()


def test_the_time_in_the_queue_does_not_count_toward_the_time_limit(launched: list[Run]) -> None:
    first = notebook_launcher(_wait, (4.0,), block=False, panel=False, devices=1)
    assert first.plan is not None
    core = int(next(iter(first.plan.slots.values())))
    second = notebook_launcher(_wait, (0.0,), block=False, panel=False, devices=[core], queue=True, timeout=3.5)
    launched += [first, second]
    assert second.wait(60)
    assert second.status == "succeeded"
