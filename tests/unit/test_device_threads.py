"""Streams, events and threads must name their device. `torch.cuda` is a stub with a current device for each thread."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notebook_accelerate.big_modeling import disk_offload, prefetch
from notebook_accelerate.checkpointing import snapshot, state_files
from notebook_accelerate.files.tensor_sources import FileSource, MemorySource
from notebook_accelerate.hardware import device_table
from notebook_accelerate.telemetry import pickling
from notebook_accelerate.telemetry.automatic_metrics import event_on
from tests.support.threaded_cuda import ThreadedCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ThreadedCuda:
    monkeypatch.setattr(device_table, "_selected", {})
    return ThreadedCuda().install(monkeypatch)


def _in_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


class _Job:
    """A copy of a storage on a device. It records the current device of the thread that copies."""

    version = 0

    def __init__(self, cuda: ThreadedCuda, index: int) -> None:
        self._cuda = cuda
        self.source = SimpleNamespace(device=torch.device("cuda", index), is_inference=lambda: True)

    def run(self) -> None:
        self._cuda._write("copy", None)


def test_deferred_copies_run_on_a_stream_of_each_source_device_and_are_awaited(cuda: ThreadedCuda) -> None:
    cuda.set_device(1)  # This thread is the rank's own, and finish runs on another one.
    shot = snapshot.Snapshot([], _deferred=[_Job(cuda, 1), _Job(cuda, 0), _Job(cuda, 1)])  # type: ignore[list-item]
    _in_thread(shot.finish)
    assert cuda.log == [
        ("stream", 1), ("copy", 1), ("stream", 0), ("copy", 0), ("copy", 1),
        ("synchronize stream", 1), ("synchronize stream", 0),
    ]  # fmt: skip
    assert shot.copied.is_set()


def test_a_thread_of_this_package_continues_on_the_device_that_the_rank_selected(cuda: ThreadedCuda) -> None:
    device_table.row("cuda").select(1)

    def current() -> tuple[int, int]:
        before = cuda.current_device()
        device_table.select_again()
        return before, cuda.current_device()

    assert _in_thread(current) == (0, 1)


def test_an_event_is_recorded_on_the_stream_of_the_tensors_device(cuda: ThreadedCuda) -> None:
    event_on(torch.device("cuda", 1))
    assert cuda.log == [("record", 1)]


@pytest.mark.parametrize(("saved_on", "resumed_on", "devices"), [(0, 0, 1), (1, 0, 1), (0, 1, 4)])
def test_the_ranks_own_device_continues_its_random_numbers_on_other_devices(
    cuda: ThreadedCuda, monkeypatch: pytest.MonkeyPatch, saved_on: int, resumed_on: int, devices: int
) -> None:
    cuda.set_device(saved_on)
    torch.rand(3, generator=cuda.generators[saved_on])
    state = state_files.rng_state("cuda")
    expected = torch.rand(4, generator=cuda.generators[saved_on])
    elsewhere = ThreadedCuda(devices).install(monkeypatch)
    elsewhere.set_device(resumed_on)
    state_files.restore_rng_state(state, "cuda")
    assert torch.equal(torch.rand(4, generator=elsewhere.generators[resumed_on]), expected)


def test_a_state_of_accelerate_without_the_ranks_device_is_reported_and_the_rest_restored(
    cuda: ThreadedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state file from two devices lacks the generator for a rank that resumes on a third one."""
    state = state_files.rng_state("cuda")
    del state["torch_cuda_device"]
    expected = random.random()
    elsewhere = ThreadedCuda(3).install(monkeypatch)
    elsewhere.set_device(2)
    with pytest.warns(UserWarning, match="saved with 2 visible cuda devices, but this rank uses cuda:2"):
        state_files.restore_rng_state(state, "cuda")
    assert random.random() == expected


@pytest.mark.parametrize(
    ("variables", "device", "expected"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cuda:0", "cuda:1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "xla:0", "xla:0"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "cuda:0", "cuda:0"),
        ({}, "cuda:0", "cuda:0"),
    ],
)
def test_an_argument_on_the_kernels_device_arrives_on_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], device: str, expected: str
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    moved: list[str] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    layout = (0, (2,), (1,), device)
    pickling._rebuild_tensor(torch.Tensor, torch.ones(2).untyped_storage(), torch.float32, layout, False, {})
    assert moved == [expected]


def test_locked_memory_has_the_size_of_the_state_and_is_returned(cuda: ThreadedCuda) -> None:
    buffers = snapshot.SnapshotBuffers()
    buffers._reserve(True, 9 << 20)
    assert list(cuda.locked.values()) == [10 << 20], "the size is rounded up to whole huge pages, not to a power of two"
    buffers._reserve(True, 5 << 20)
    assert list(cuda.locked.values()) == [10 << 20], "the memory that is already locked is large enough"
    buffers._reserve(True, 11 << 20)
    assert list(cuda.locked.values()) == [12 << 20], "the smaller memory was unlocked"
    buffers.release()
    assert cuda.locked == {}


def test_memory_that_cannot_be_locked_is_used_unlocked(cuda: ThreadedCuda) -> None:
    cuda.lockable = 0
    buffers = snapshot.SnapshotBuffers()
    with pytest.warns(UserWarning, match=r"could not lock 2\.10 MB of CPU memory"):
        buffers._reserve(True, 100)
    assert len(buffers._buffers[True].memory) == 2 << 20
    assert cuda.last_error() == 0, "torch would raise a remaining error at the training's next kernel"
    buffers.release()


def test_dropped_buffers_unlock_their_memory(cuda: ThreadedCuda) -> None:
    buffers = snapshot.SnapshotBuffers()
    buffers._reserve(True, 100)
    assert cuda.locked
    del buffers
    assert cuda.locked == {}


def test_weights_are_pinned_only_if_main_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: Any = [SimpleNamespace(nbytes=90 << 20, address=-index) for index in range(10)]
    monkeypatch.setattr(prefetch, "machine_memory", lambda: (1 << 40, 2 * (10 * (38 << 20) + (90 << 20))))
    prefetch._check_room(sources)
    monkeypatch.setattr(prefetch, "machine_memory", lambda: (1 << 40, 500 << 20))
    with pytest.raises(RuntimeError, match=r"at most half of the 524 MB of free memory"):
        prefetch._check_room(sources)


def test_mapped_weights_free_no_memory_when_they_are_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"own": torch.ones(1 << 20)}, tmp_path / "weights.bin")
    mapped = torch.load(tmp_path / "weights.bin", mmap=True)["own"]
    monkeypatch.setattr(prefetch, "machine_memory", lambda: (1 << 40, 2 * (6 << 20)))
    prefetch._check_room([MemorySource(torch.ones(1 << 20), {}, "own")])
    with pytest.raises(RuntimeError, match="takes 8"):  # This counts the pinned memory and a copy of one tensor.
        prefetch._check_room([MemorySource(mapped, {}, "own")])
    prefetch._check_room([FileSource(tmp_path / "weights.bin", 0, (1 << 24,), torch.float32)])


class _OnCpu(prefetch.StreamTransfer):
    """Transfers to a device whose memory is the CPU's."""

    def __init__(self, _device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._backend = torch.cuda


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_an_offloaded_model_works_after_an_out_of_memory_error(
    cuda: ThreadedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: int
) -> None:
    monkeypatch.setattr(prefetch, "transfer_to", _OnCpu)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
    empty: Any = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **{**options, "pin_memory": False}))
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)]).eval()
    batch = torch.randn(2, 16)
    expected = model(batch)
    disk_offload(model, tmp_path, "cpu")
    broken = [False]

    def fail(*_: Any) -> None:
        if broken[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model[failing].register_forward_pre_hook(fail)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(batch), expected)
        broken[0] = True
        with pytest.raises(torch.OutOfMemoryError):
            model(batch)
        broken[0] = False
        for _ in range(2):
            assert torch.equal(model(batch), expected)
