"""Facts about the machine: which code initializes the driver, how long the fork probe takes, and whether waits spin."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from notebook_accelerate.hardware import nvml
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
NOT_INITIALISED = 3
"""The result of cuDeviceGetCount before cuInit has been called in the process."""
PROBE = """
import ctypes, json, time
from notebook_accelerate.launch.processes import fork_probe
begin = time.perf_counter()
hazard = fork_probe.fork_hazard()
seconds = time.perf_counter() - begin
try:
    driver = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
except OSError:
    driver = None
print(json.dumps([driver, hazard, seconds]))
"""
QUIET = {
    "import torch": "import torch",
    "import the package": "import torch, notebook_accelerate as n; n.Accelerator; n.notebook_launcher",
    "detect": "from notebook_accelerate.hardware import detect; detect(); import torch",
    "device_count": "import torch; torch.cuda.device_count()",
}
LOUD = {
    "is_available": "import torch; torch.cuda.is_available()",
    "an optimizer's step": "import torch; p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); "
    "torch.optim.AdamW([p]).step()",
    "a backward pass": "import torch; torch.ones(2, requires_grad=True).sum().backward()",
    "a context": f"import torch; torch.ones(1, device={gpu.DEVICE!r})",
}


def _probed(code: str) -> tuple[int | None, str | None, float]:
    """Return the driver's status after some code, the hazard of forking its process, and the probe's seconds."""
    done = subprocess.run([sys.executable, "-c", code + PROBE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    driver, hazard, seconds = json.loads(done.stdout.splitlines()[-1])
    return driver, hazard, seconds


@pytest.mark.parametrize("name", QUIET)
def test_a_kernel_stays_safe_to_fork(name: str, figure: Figure) -> None:
    driver, hazard, seconds = _probed(QUIET[name])
    figure(f"the fork probe after {name}", f"{1000 * seconds:.0f} ms")
    assert not hazard
    assert driver in ((NOT_INITIALISED, None) if gpu.DRY else (NOT_INITIALISED,))


@pytest.mark.parametrize("name", LOUD)
def test_a_process_with_an_initialised_driver_is_never_reported_as_safe(name: str, figure: Figure) -> None:
    driver, hazard, _ = _probed(LOUD[name])
    figure(f"the driver after {name}", f"{'not ' * (driver != 0)}initialised; {hazard or 'safe to fork'}")
    assert hazard or driver != 0
    assert gpu.DRY or name != "a context" or driver == 0, "cuDeviceGetCount shows whether the driver is initialised"


@gpu.only_cuda
@pytest.mark.parametrize("name", ["synchronize", "item"])
def test_the_processor_time_of_a_waiting_thread_is_measured(name: str, figure: Figure) -> None:
    value = torch.ones(1, device="cuda")
    wait: Callable[[], object] = torch.cuda.synchronize if name == "synchronize" else value.item
    clock = time.pthread_getcpuclockid(threading.get_ident())
    torch.cuda._sleep(3_600_000_000)
    used, begin = time.clock_gettime(clock), time.perf_counter()
    wait()
    cpu, seconds = time.clock_gettime(clock) - used, time.perf_counter() - begin
    figure(f"processor time while {name}() waits", f"{cpu / seconds:.0%} of {seconds:.1f} s")
    assert seconds > 0.5, "the device was not busy, so the measurement is invalid"


@gpu.only_cuda
def test_nvml_and_torch_name_the_same_gpu(figure: Figure) -> None:
    found, properties = nvml.visible_gpu(0), torch.cuda.get_device_properties(0)
    figure("GPU", f"{properties.name}, driver {nvml.driver_version()}, torch {torch.__version__}")
    assert found is not None
    assert nvml.bare_uuid(found.uuid) == nvml.bare_uuid(properties.uuid)
