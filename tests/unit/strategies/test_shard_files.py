"""The file that a rank writes for a sharded state has the bytes that torch.save would write."""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from notebook_accelerate.strategies.sharding import shard_files

SHAPES = [(), (1,), (3,), (16,), (17, 5), (300, 100), (2, 3, 4, 5)]


class Kept(io.BytesIO):
    """A stream that keeps the bytes in memory."""

    def keep(self, content: Any) -> int:
        """Write the bytes to memory."""
        return self.write(content)


@pytest.mark.parametrize("dtype", sorted(shard_files._DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_framed_tensor_equals_the_output_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    ours, torchs = Kept(), io.BytesIO()
    shard_files._write_tensor(ours, tensor)
    with shard_files.without_record_checksums():
        torch.save(tensor, torchs)
    assert shard_files._can_be_framed(tensor)
    assert ours.getvalue() == torchs.getvalue()


OTHERS = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(12.0)[2:5],
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "trained": torch.zeros(5, requires_grad=True),
    "complex": torch.randn(3, dtype=torch.complex64),
    "eight bits": torch.randn(4).to(torch.float8_e4m3fn),
    "negated": torch._neg_view(torch.ones(3)),
}


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_read_back_unchanged(tensor: torch.Tensor) -> None:
    stream = Kept()
    shard_files._write_tensor(stream, tensor)
    assert len(stream.getvalue()) < 4096
    stream.seek(0)
    found = torch.load(stream, weights_only=True)
    assert found.dtype == tensor.dtype
    assert found.tolist() == tensor.tolist()


def test_a_view_is_written_without_the_rest_of_its_storage() -> None:
    stream = Kept()
    shard_files._write_tensor(stream, torch.zeros(1 << 16, dtype=torch.complex64)[:3])
    assert len(stream.getvalue()) < 4096


@pytest.mark.parametrize("background", [False, True])
def test_checksums_are_computed_while_a_file_is_written(background: bool, tmp_path: Path) -> None:
    files = shard_files.ChecksumFiles(background)
    values = {"small": torch.ones(3), "large": torch.randn(300, 300), "others": torch.randn(1 << 12)}
    values |= {f"many {index}": torch.randn(100, 100) for index in range(shard_files._MAX_PIECES)}
    values |= {"transposed": torch.randn(300, 200).t()}
    contents: list[tuple[MetadataIndex, Any]] = [(MetadataIndex(name), value) for name, value in values.items()]
    contents.append((MetadataIndex("text"), io.BytesIO(b"text")))
    locations = shard_files.write_rank_file(files, tmp_path / "file", contents)
    content = (tmp_path / "file").read_bytes()
    assert files.checksums == {"file": (len(content), zlib.crc32(content))}
    for index, info in locations.items():
        assert info.relative_path == "file"
        piece = content[info.offset : info.offset + info.length]
        if index.fqn == "text":
            assert piece == b"text"
        else:
            assert torch.equal(torch.load(io.BytesIO(piece), weights_only=True), values[index.fqn])


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 20])
def test_partial_writes_are_continued(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [os.urandom(10), os.urandom(1 << 15), os.urandom(3000)]

    def some(file: Any, pieces: list[Any]) -> int:
        return os.write(file.fileno(), b"".join(pieces)[:at_once])

    monkeypatch.setattr(shard_files, "_write_pieces", some)
    with shard_files.ChecksumFiles().create_stream(tmp_path / "file", "wb") as stream:
        for piece in content:
            stream.keep(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(content)


def test_an_error_in_the_background_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        shard_files.ChecksumStream(file, shard_files._call_at_low_priority).write(b"x" * (1 << 15))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has thread priorities")
def test_background_writes_have_low_priority() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert shard_files._call_at_low_priority(priority) == min(priority() + 10, 19)
    assert shard_files._call(priority) == priority()


def test_large_writes_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_MAX_CALL", 10_000)
    pieces = [b"small", bytes(range(256)) * 1_000, b"", bytes(9_000), b"end"]
    with (tmp_path / "written").open("wb", buffering=0) as file:
        stream = shard_files.ChecksumStream(file, shard_files._call)
        for piece in pieces:
            stream.keep(piece)
        stream.close()
    content = b"".join(pieces)
    assert (tmp_path / "written").read_bytes() == content
    assert (stream.size, stream.crc) == (len(content), zlib.crc32(content))
