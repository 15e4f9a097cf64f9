"""A launch on an XLA device starts the runtime in the rank, never in the test's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import notebook_launcher, shutdown

pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-xla", exc_type=ImportError)
pytestmark = pytest.mark.xla


def device_and_loss() -> tuple[str, float]:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    return accelerator.device.type, model(torch.ones(3, 2, device=accelerator.device)).sum().item()


def started() -> bool:
    import _XLAC

    return bool(_XLAC._xla_runtime_is_initialized())


def test_devices_can_be_used_one_after_another() -> None:
    before = started()
    try:
        for _ in range(2):
            run: Any = notebook_launcher(device_and_loss, (), panel=False)
            assert run.plan.start_method == "zygote"
            assert "XLA's runtime" in run.plan.reason
            assert run.results[0][0] == "xla"
    finally:
        shutdown()
    assert started() == before


def test_a_kernel_that_has_used_the_runtime_is_not_forked() -> None:
    script = (
        "import torch_xla\n"
        "from notebook_accelerate.launch.processes.fork_probe import fork_hazard\n"
        "print('RESULT', fork_hazard())\n"
        "torch_xla.device()\n"
        "print('RESULT', fork_hazard())"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150, check=True)
    told = [line.removeprefix("RESULT").strip() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told == ["", "the XLA runtime is initialised in the kernel"]


def test_several_devices_of_one_process_are_planned_as_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    try:
        run: Any = notebook_launcher(device_and_loss, (), panel=False)
        assert "1 process on xla, whose 4 devices share each batch (SPMD)" in run.plan.sentence()
        assert len(run.results) == 1
        with pytest.raises(ValueError, match="puts 4 devices into one process; pass num_processes=1"):
            notebook_launcher(device_and_loss, (), num_processes=4, panel=False)
    finally:
        shutdown()
