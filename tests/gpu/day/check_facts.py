"""The machine: what ordinary lines do to the driver, how long the probe of a fork takes, and whether waiting spins."""

from __future__ import annotations

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
PROBE = """
import time
from notebook_accelerate.launch.plan import fork_probe
begin = time.perf_counter()
hazard = fork_probe.fork_hazard()
print(hazard or "safe to fork", f"{time.perf_counter() - begin:.3f} s", sep=" | ")
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


def _probed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code + PROBE], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("name", QUIET)
def test_a_kernel_stays_safe_to_fork(name: str, figure: Figure) -> None:
    found = _probed(QUIET[name])
    figure(f"after {name}: fork", found)
    assert found.startswith("safe to fork")


@pytest.mark.parametrize("name", LOUD)
def test_what_initialises_the_driver(name: str, figure: Figure) -> None:
    figure(f"after {name}: fork", _probed(LOUD[name]))


@gpu.only_cuda
@pytest.mark.parametrize("name", ["synchronize", "item"])
def test_whether_a_thread_spins_while_it_waits(name: str, figure: Figure) -> None:
    value = torch.ones(1, device="cuda")
    wait: Callable[[], object] = torch.cuda.synchronize if name == "synchronize" else value.item
    clock = time.pthread_getcpuclockid(threading.get_ident())
    torch.cuda._sleep(3_600_000_000)
    used, begin = time.clock_gettime(clock), time.perf_counter()
    wait()
    share = (time.clock_gettime(clock) - used) / (time.perf_counter() - begin)
    figure(f"processor time while {name}() waits", f"{share:.0%}")


@gpu.only_cuda
def test_nvml_and_torch_name_the_same_gpu(figure: Figure) -> None:
    found, properties = nvml.visible_gpu(0), torch.cuda.get_device_properties(0)
    figure("GPU", f"{properties.name}, driver {nvml.driver_version()}, torch {torch.__version__}")
    assert found is not None
    assert nvml.bare_uuid(found.uuid) == nvml.bare_uuid(properties.uuid)
