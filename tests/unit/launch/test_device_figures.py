"""The memory and utilization of devices by rank, from real ranks, even in a container with its own process ids.

The ranks load a stub library with NVML's interface and, on machines without a GPU, a stub of `torch.cuda`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.launch import Run
from notebook_accelerate.launchers import notebook_launcher
from tests.support import fake_gpu
from tests.support.counted_cuda import CountedCuda

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]

SCRIPT = """
import json, os, sys, time
from notebook_accelerate import notebook_launcher

def train(folder):
    from tests.support.counted_cuda import CountedCuda
    cuda, rank = CountedCuda().install(), int(os.environ["LOCAL_RANK"])
    cuda.hold(3 << 30, 4 << 30)
    cuda.hold((rank + 1) << 30, 2 << 30)
    while not os.path.exists(os.path.join(folder, "seen")):
        time.sleep(0.02)
    return os.getpid()

folder = sys.argv[1]
run = notebook_launcher(train, (folder,), 2, use_port=0, block=False)
deadline = time.monotonic() + 200
while time.monotonic() < deadline:
    found = [run._internals.store.devices.of_rank(rank) for rank in (0, 1)]
    if all(devices and devices[0].percent is not None for devices in found):
        break
    time.sleep(0.05)
open(os.path.join(folder, "seen"), "w").close()
run.wait()
report = run.report().text
print(json.dumps([run.results, [[vars(device) for device in devices] for devices in found], report]))
"""


def _launch(folder: Path, before: list[str], library: Path) -> tuple[list[int], list[list[dict[str, Any]]], str]:
    script = folder / "launch.py"
    script.write_text(SCRIPT)
    variables = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_NAME": "Tesla T4", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*before, sys.executable, str(script), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pids, devices, report = json.loads(done.stdout.strip().splitlines()[-1])
    return pids, devices, report


@pytest.mark.parametrize("before", [[], CONTAINER], ids=["host", "container"])
def test_each_rank_counts_its_memory_and_the_driver_measures_utilization(before: list[str], tmp_path: Path) -> None:
    library = fake_gpu.build(tmp_path)
    if before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no pid namespaces")
    pids, found, report = _launch(tmp_path, before, library)
    if before:
        assert max(pids) < 1000, "the pids are those in the namespace, not the host's"
    assert found == [
        [
            {
                "device": f"cuda:{rank}", "name": "Tesla T4", "uuid": f"{rank}abc", "total": 15 * GIB,
                "allocated": (rank + 1) * GIB, "reserved": 2 * GIB, "peak": 3 * GIB,
                "used": (3 + rank) * GIB, "percent": 40.0 + rank,
            }
        ]
        for rank in (0, 1)
    ]  # fmt: skip
    lines = [line.split() for line in report.splitlines()]
    assert ["0", "cuda:0", "Tesla", "T4", "·", "16.1", "GB", "3.22", "GB", "0abc"] in lines, report


def _peak_of_a_short_run() -> None:
    cuda = CountedCuda().install()
    cuda.hold(5 * GIB, 6 * GIB)
    cuda.hold(GIB, 6 * GIB, device=1)
    cuda.hold(0, 0)


def test_the_peak_of_a_short_run_is_kept_and_a_rank_may_hold_several_devices() -> None:
    run: Run = notebook_launcher(_peak_of_a_short_run, num_processes=1, start_method="fork")
    assert [(device.device, device.peak) for device in run._internals.store.devices.of_rank(0)] == [
        ("cuda:0", 5 * GIB),
        ("cuda:1", GIB),
    ]


def _broken_counters() -> int:
    CountedCuda().install().hold(1, 1)

    def fail(_: int) -> int:
        raise RuntimeError("the driver was reset")

    torch.cuda.memory_reserved = fail
    time.sleep(3)
    return 7


def test_failing_counters_are_reported_once_and_do_not_disturb_the_run() -> None:
    run: Run = notebook_launcher(_broken_counters, num_processes=1, start_method="fork")
    assert run.results == (7,)
    notes = [text for text in run.warnings if "driver was reset" in text]
    assert len(notes) == 1
    assert "the memory of its devices cannot be read" in notes[0]
    assert "continues" in notes[0]


def _without_devices() -> None:
    time.sleep(1.5)


def test_a_rank_without_a_device_reports_no_figures() -> None:
    run: Run = notebook_launcher(_without_devices, num_processes=1, start_method="fork")
    assert not run._internals.store.devices
    assert "Devices" not in run.report().text


def _hang() -> None:
    CountedCuda().install().hold(1, 1)
    time.sleep(500)


def test_figures_do_not_count_as_progress() -> None:
    with pytest.raises(RunTimeoutError, match="hang_timeout"):
        notebook_launcher(_hang, num_processes=1, start_method="fork", hang_timeout=4, timeout=240)
