"""Ranks on TPUs that torch_tpu registers: real processes with a stub of torch_tpu and a TPU machine's variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.hardware import device_counts
from notebook_accelerate.launchers import notebook_launcher

STAND_IN = Path(__file__).resolve().parents[2] / "support" / "fake_tpu"
OURS = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID")


@pytest.fixture
def tpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulate a machine with four chips of a TPU v5p, and with torch_tpu."""
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "PJRT_DEVICE", *OURS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    # If the real package is installed, this disables its entry point.
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    device_counts._cached_count.cache_clear()
    yield
    device_counts._cached_count.cache_clear()


def _describe() -> dict[str, Any]:
    import os

    import torch
    import torch_tpu

    from notebook_accelerate import Accelerator
    from notebook_accelerate.checkpointing import state_files
    from notebook_accelerate.utils import set_seed

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(17)
    state = state_files.rng_state("tpu")
    drawn = torch.rand(3, generator=torch.tpu.default_generators[0])
    state_files.restore_rng_state(state, "tpu")
    return {
        "device": str(accelerator.device),
        "type": accelerator.distributed_type.value,
        "backend": accelerator.state.backend,
        "rank": (os.environ["LOCAL_RANK"], accelerator.process_index, accelerator.num_processes),
        "variables": [os.environ.get(name) for name in OURS],
        "strategy": type(accelerator.strategy).__name__,
        "seeds": torch_tpu.seeds,
        "again": torch.equal(drawn, torch.rand(3, generator=torch.tpu.default_generators[0])),
    }


def test_two_ranks_form_a_group_of_tpus_with_one_address_each(tpus: None) -> None:
    run: Any = notebook_launcher(_describe, num_processes=2, use_port=0)
    assert "Set timeout" not in "".join(line.text for rank in (0, 1) for line in run._internals.store.log_lines(rank))
    assert run.plan.start_method == "spawn"
    first, second = run.results
    for rank, found in enumerate((first, second)):
        assert (found["device"], found["type"], found["backend"]) == ("tpu", "MULTI_TPU", "tpu_dist")
        assert tuple(found["rank"]) == (str(rank), rank, 2)
        assert found["strategy"] == "DDPStrategy"
        assert 17 in found["seeds"]
        assert found["again"], "the state of the TPU's generator was restored"
    addresses, mesh, session = first["variables"]
    assert first["variables"] == second["variables"]
    assert mesh == "1,2,1"
    assert session.isdigit()
    assert len(set(addresses.split(","))) == 2
    assert all(address.startswith("localhost:") for address in addresses.split(","))


def _fails() -> None:
    import sys

    # This imitates a torch_tpu that finds no TPU and registers nothing.
    sys.modules["torch_tpu"] = type(sys)("torch_tpu")
    from notebook_accelerate import Accelerator

    Accelerator()


def test_a_tpu_that_torch_tpu_does_not_find_is_named(tpus: None) -> None:
    with pytest.raises(Exception, match="torch_tpu is installed but found no TPU"):
        notebook_launcher(_fails, num_processes=1, start_method="spawn")
