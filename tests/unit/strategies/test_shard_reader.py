"""Distributed checkpoints are read without calling torch.load for each tensor, but with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from notebook_accelerate.strategies.sharding import shard_files
from notebook_accelerate.strategies.sharding.sharded_checkpoint import read_shards
from notebook_accelerate.strategies.sharding.write_plans import ShardsError, make_part


def state(fill: bool) -> dict[str, Any]:
    """Return tensors of many kinds, filled with random numbers or with zeros."""
    torch.manual_seed(0)
    tensors = {
        f"{dtype} {shape}": (100 * torch.rand(shape)).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
        for shape in ((), (3,), (7, 5), (1, 2, 3))
    }
    tensors["complex"] = torch.randn(4, dtype=torch.complex64)
    tensors["empty"] = torch.zeros(0, 3)
    tensors["transposed"] = torch.rand(4, 6).t()
    if not fill:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return {"model": tensors, "steps": 7 if fill else 0}


@pytest.fixture
def read_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list that receives each tensor that torch.load returns."""
    found: list[torch.Tensor] = []
    torch_load = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = torch_load(*args, **kwargs)
        if isinstance(loaded, torch.Tensor):
            found.append(loaded)
        return loaded

    monkeypatch.setattr(torch, "load", load)
    return found


def assert_read(folder: Path) -> None:
    found, expected = state(fill=False), state(fill=True)
    read_shards(found, folder)
    assert found["steps"] == 7
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name


def test_what_is_framed_is_read_without_torch(tmp_path: Path, read_by_torch: list[torch.Tensor]) -> None:
    make_part("part", state(fill=True)).write_here(tmp_path)
    assert_read(tmp_path / "part")
    assert {tuple(tensor.shape) for tensor in read_by_torch} == {(4,), (6, 4)}, "empty tensors need not be read"


def test_what_torch_wrote_is_read(tmp_path: Path, read_by_torch: list[torch.Tensor]) -> None:
    # Without a process group, torch saves without communicating.
    save(state(fill=True), storage_writer=FileSystemWriter(tmp_path / "part"))
    assert_read(tmp_path / "part")


def test_what_other_versions_of_torch_wrote_is_read(
    tmp_path: Path, read_by_torch: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_part("part", state(fill=True)).write_here(tmp_path)
    bytes_around_values = shard_files.bytes_around_values

    def other_frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
        before, after = bytes_around_values(dtype, shape)
        return before.replace(b"archive", b"envelop"), after

    monkeypatch.setattr("notebook_accelerate.strategies.sharding.sharded_checkpoint.bytes_around_values", other_frame)
    assert_read(tmp_path / "part")
    assert len(read_by_torch) == len(state(fill=True)["model"]) - 1  # Empty entries need not be read.


def test_a_missing_or_truncated_file_is_an_error(tmp_path: Path) -> None:
    make_part("part", state(fill=True)).write_here(tmp_path)
    (file,) = (tmp_path / "part").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ShardsError):
        read_shards(state(fill=False), tmp_path / "part")
    file.unlink()
    with pytest.raises(ShardsError, match="rank 0: FileNotFoundError"):
        read_shards(state(fill=False), tmp_path / "part")
