"""Calls that initialize CUDA's driver. torch's build for CUDA runs on a stub driver that records such calls."""

from __future__ import annotations

import pytest

from tests.cuda.conftest import Machine

HAZARD = """
from notebook_accelerate.launch.processes import fork_probe
print(repr(fork_probe.fork_hazard()))
"""
QUIET = {
    "import torch": "import torch",
    "import the package": "import torch, notebook_accelerate as n; n.Accelerator; n.notebook_launcher",
    "detect": "from notebook_accelerate import hardware; assert hardware.detect().count == 1; import torch",
    "Accelerator on the CPU, and its loader": """
import torch
from notebook_accelerate import Accelerator
accelerator = Accelerator(cpu=True)
for _ in accelerator.prepare(torch.utils.data.DataLoader(list(range(4)), batch_size=2)): pass
""",
    "the imports of the zygote": """
import importlib
from notebook_accelerate.launch.processes import zygote_server
for name in (*zygote_server.PRELOADED, *zygote_server.PRELOADED_WHEN_IDLE): importlib.import_module(name)
""",
    "features": "from notebook_accelerate import utils as u; u.is_cuda_available(); u.is_bf16_available()",
    "estimate_memory": """
import torch
from notebook_accelerate.big_modeling import estimate_memory
estimate_memory(lambda: torch.nn.Linear(2, 2), inputs=torch.ones(1, 2))
""",
    "seeds": "import torch; from notebook_accelerate.utils import set_seed; torch.manual_seed(1); set_seed(2)",
}
LOUD = {
    "a backward pass": "import torch; torch.ones(2, requires_grad=True).sum().backward()",
    "torch.cuda.is_available": "import torch; torch.cuda.is_available()",
}


@pytest.mark.parametrize("what", QUIET)
def test_nothing_in_this_package_initialises_the_driver(machine: Machine, what: str) -> None:
    assert machine.run(QUIET[what] + HAZARD).splitlines()[-1] == "''", "the kernel is safe to fork"
    assert machine.initialised() == []


@pytest.mark.parametrize("what", LOUD)
def test_a_driver_that_the_user_has_initialised_is_detected(machine: Machine, what: str) -> None:
    assert machine.run(LOUD[what] + HAZARD).splitlines()[-1] == "'CUDA is initialised in the kernel'"
    assert len(machine.initialised()) == 1


def test_ranks_forked_from_a_kernel_find_an_uninitialised_driver(machine: Machine) -> None:
    code = """
import os, sys
from notebook_accelerate import notebook_launcher
def train():
    import torch
    return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), os.environ["CUDA_VISIBLE_DEVICES"]
import torch
run = notebook_launcher(train, num_processes=2, use_port=0, env={"CUDA_VISIBLE_DEVICES": "0,1"}, panel=False)
print(run.plan.start_method, run.results)
"""
    lines = machine.run(code, FAKE_NVML_COUNT="2", FAKE_CUDA_COUNT="2").splitlines()
    assert lines[-1] == f"fork {((False, False, '0,1'),) * 2}"
    assert machine.initialised() == []


def test_ranks_of_the_zygote_find_an_uninitialised_driver(machine: Machine) -> None:
    code = """
import torch
from notebook_accelerate import notebook_launcher
def train():
    import torch
    return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
torch.cuda.is_available()
run = notebook_launcher(train, num_processes=2, use_port=0, panel=False)
print(run.plan.start_method, run.plan.reason, run.results)
"""
    lines = machine.run(code, FAKE_NVML_COUNT="2", FAKE_CUDA_COUNT="2").splitlines()
    assert lines[-1] == f"zygote CUDA is initialised in the kernel {((False, False),) * 2}"
    assert len(machine.initialised()) == 1, "only the user's call in the kernel is recorded"


@pytest.mark.parametrize(
    ("busy", "expected"),
    [({}, False), ({"FAKE_CUDA_BUSY": "0"}, True), ({"FAKE_CUDA_BUSY": "13"}, True), ({"FAKE_CUDA_BUSY": "20"}, False)],
    ids=["idle", "a default stream", "a stream of the second device", "a device without a context"],
)
def test_streams_with_unfinished_work_are_found(machine: Machine, busy: dict[str, str], expected: bool) -> None:
    code = """
import ctypes
from types import SimpleNamespace
from notebook_accelerate.worker.waits import cuda_is_busy
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
streams = [SimpleNamespace(device_index=1, cuda_stream=3), SimpleNamespace(device_index=0, cuda_stream=7)]
print(cuda_is_busy(driver, streams))
"""
    found = machine.run(code, FAKE_CUDA_COUNT="3", FAKE_CUDA_CONTEXTS="2", **busy)
    assert found.splitlines()[-1] == str(expected)
