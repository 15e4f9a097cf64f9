"""The backend of the process group, which is chosen without creating a CUDA context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.config.kwargs_handlers import InitProcessGroupKwargs
from notebook_accelerate.config.parallelism_config import ParallelismConfig
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state import AcceleratorState, PartialState, partial_state, process_group

CUDA, BOTH = device_table.row("cuda"), "cuda:nccl,cpu:gloo"


@pytest.mark.parametrize(
    ("device", "requested", "with_cpu", "expected"),
    [
        ("cuda", None, False, "nccl"),
        ("cuda", None, True, BOTH),
        ("cuda", "nccl", True, BOTH),
        ("cuda", "gloo", True, "gloo"),
        ("xpu", None, True, "xpu:xccl,cpu:gloo"),
        ("cpu", None, True, "gloo"),
        ("cpu", "nccl", False, "gloo"),
    ],
)
def test_each_device_has_a_back_end(device: str, requested: str | None, with_cpu: bool, expected: str) -> None:
    assert partial_state.choose_backend(device_table.row(device), requested, with_cpu) == expected


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make this process look like one of two ranks on CUDA. Yield a list of the backends that it would start."""
    backends: list[str] = []
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(partial_state, "device_row", lambda **_: CUDA)
    monkeypatch.setattr(partial_state, "select_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(process_group, "start_group", lambda backend, *_, **__: backends.append(backend))
    monkeypatch.setattr(partial_state, "wait_for_idle_at_exit", lambda: None)
    yield backends
    AcceleratorState._reset_state(reset_partial_state=True)


def _fsdp(**settings: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**settings)


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (None, "nccl"),
        (_fsdp(fsdp_version=2), "nccl"),
        (_fsdp(fsdp_version=2, cpu_offload=True), BOTH),
        (_fsdp(fsdp_version=1, cpu_offload=True), "nccl"),  # FSDP 1 clips gradients on the device.
    ],
    ids=["no plugin", "on the device", "offloaded", "FSDP 1"],
)
def test_fsdp2_with_cpu_offload_starts_gloo_too(plugin: Any, expected: str, started: list[str]) -> None:
    state = AcceleratorState(fsdp_plugin=plugin)
    assert started == [expected] == [state.backend]


def test_a_later_state_keeps_both_back_ends(started: list[str]) -> None:
    AcceleratorState(fsdp_plugin=_fsdp(fsdp_version=2, cpu_offload=True))
    state = AcceleratorState(**InitProcessGroupKwargs().to_kwargs(), backend="nccl")
    assert started == [state.backend] == [BOTH]


@pytest.mark.parametrize("by_layout", [False, True])
def test_offloading_by_the_environment_starts_gloo_too(
    by_layout: bool, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setattr("notebook_accelerate.state.accelerator_state.arrange_ranks", lambda _: {})
    if by_layout:
        AcceleratorState(parallelism_config=ParallelismConfig(dp_shard_size=2))
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        AcceleratorState()
    assert started == [BOTH]


def test_a_group_without_gloo_causes_a_warning(started: list[str]) -> None:
    PartialState()
    with pytest.warns(UserWarning, match=r"backend 'nccl' before .*init_process_group\('cuda:nccl,cpu:gloo'\)"):
        AcceleratorState(fsdp_plugin=_fsdp(fsdp_version=2, cpu_offload=True))
    assert started == ["nccl"]
