"""The number of ranks and the variables that a launch plans on machines with NVIDIA GPUs. Nothing is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda.conftest import Machine

PLAN = """
import json, os, sys
from notebook_accelerate import LaunchConfig, hardware
from notebook_accelerate.launch.processes.fork_probe import kernel_facts
from notebook_accelerate.launch.plan.planner import make_plan, rank_environment

def plan(**options):
    environment = {**os.environ, **options.get("env", {})}
    found = make_plan(LaunchConfig(use_port=0, **options), hardware.detect(environment), kernel_facts())
    ranks = [rank_environment(found, rank) for rank in range(found.num_processes)]
    names = ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")
    return [found.accelerator, found.backend, [{name: rank[name] for name in names if name in rank} for rank in ranks]]
"""
TWO_4090S = {"FAKE_NVML_COUNT": "2", "FAKE_NVML_NAME": "NVIDIA GeForce RTX 4090"}
MACHINES = {
    "two T4s": {"FAKE_NVML_COUNT": "2", "FAKE_NVML_NAME": "Tesla T4", "FAKE_NVML_DRIVER": "535.104.05"},
    "two 4090s, old driver": {**TWO_4090S, "FAKE_NVML_DRIVER": "535.104.05"},
    "two 4090s, new driver": {**TWO_4090S, "FAKE_NVML_DRIVER": "550.40.07"},
    "eight H100s": {"FAKE_NVML_COUNT": "8"},
}


def _planned(machine: Machine, expression: str, **variables: str) -> Any:
    return json.loads(machine.run(PLAN + f"print(json.dumps({expression}))", **variables).splitlines()[-1])


@pytest.mark.parametrize("name", MACHINES)
def test_each_rank_has_a_gpu_and_the_variables_that_its_model_needs(machine: Machine, name: str) -> None:
    count = int(MACHINES[name]["FAKE_NVML_COUNT"])
    accelerator, backend, ranks = _planned(machine, "plan()", **MACHINES[name], OMP_NUM_THREADS="3")
    assert (accelerator, backend) == ("cuda", "nccl")
    without = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if name == "two 4090s, old driver" else {}
    assert ranks == [
        {
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "3",
            "NCCL_SOCKET_IFNAME": "lo",
            **without,
        }
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("kernel", "run", "count"),
    [
        ({}, {}, 8),
        ({"CUDA_VISIBLE_DEVICES": "3,4,5"}, {}, 3),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,7"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "9"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "MIG-slice"}, {}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"}, {}, 2),
    ],
)
def test_ranks_are_counted_by_the_devices_visible_to_them(
    machine: Machine, kernel: dict[str, str], run: dict[str, str], count: int
) -> None:
    """Without a visible GPU, the run uses the CPU, with one process."""
    accelerator, _, ranks = _planned(machine, f"plan(env={run!r})", **{**MACHINES["eight H100s"], **kernel})
    assert (accelerator, len(ranks)) == (("cuda", count) if count else ("cpu", 1))


def test_more_ranks_than_visible_gpus_are_refused(machine: Machine) -> None:
    code = "try: plan(num_processes=3, env={'CUDA_VISIBLE_DEVICES': '0,1'})\nexcept ValueError as error: print(error)"
    said = machine.run(PLAN + code, **MACHINES["eight H100s"])
    assert "num_processes=3, but this machine has 2 cuda devices; pass num_processes=2" in said


def test_ranks_are_bound_to_the_cores_near_their_gpu(machine: Machine) -> None:
    code = """
import json, os
from pathlib import Path
from notebook_accelerate.state import process_group
core = min(os.sched_getaffinity(0))
folder = Path("devices")
for slot in ("0000:41:00.0", "0000:51:00.0"):
    (folder / slot).mkdir(parents=True)
    (folder / slot / "local_cpulist").write_text(str(core) if slot.startswith("0000:5") else "4094-4095")
process_group.Path = lambda path: folder if path == "/sys/bus/pci/devices" else Path(path)
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
process_group.override_numa_affinity(0)
print(os.sched_getaffinity(0) == {core})
"""
    assert machine.run(code, **MACHINES["two T4s"]).splitlines()[-1] == "True"


@pytest.mark.parametrize(
    ("gpu", "visible", "fits"),
    [("two T4s", "0,1", False), ("eight H100s", "0,1", True), ("eight H100s", "MIG-slice", False)],
)
def test_the_form_warns_of_models_that_exceed_the_memory_of_a_gpu(
    machine: Machine, gpu: str, visible: str, fits: bool
) -> None:
    code = (
        PLAN
        + """
import torch
from notebook_accelerate.widgets.memory_panel import MemoryCheck
from notebook_accelerate.widgets.training_options import TrainingOptions
found = make_plan(LaunchConfig(), machine := hardware.detect(), kernel_facts())
model = lambda: torch.nn.Linear(32768, 32768)  # 4 GiB in single precision, four times that with AdamW
check = MemoryCheck(model, {"optimizer": "adamw", "inputs": torch.ones(1, 32768)})
print(repr(check.warning(found, TrainingOptions(), machine)))
"""
    )
    said = machine.run(code, **MACHINES[gpu], CUDA_VISIBLE_DEVICES=visible).splitlines()
    assert said[-1] == "''" if fits else "This will not fit" in said[-1], said


def test_a_slice_of_a_gpu_has_its_own_memory(machine: Machine) -> None:
    code = """
from notebook_accelerate.hardware import nvml
from notebook_accelerate.hardware import nvml
from notebook_accelerate.utils import check_cuda_fp8_capability
print(nvml.visible_gpu(0).memory_bytes >> 30, check_cuda_fp8_capability())
"""
    assert machine.run(code, CUDA_VISIBLE_DEVICES="MIG-slice").split() == ["10", "True"]
