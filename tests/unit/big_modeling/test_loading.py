"""Loading checkpoints into models."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from notebook_accelerate.big_modeling.device_map import make_device_map
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError
from notebook_accelerate.utils import load_state_dict, shard_checkpoint
from tests.unit.big_modeling.models import Deep, ThreeLayers, devices

TOKENS = torch.arange(12).reshape(3, 4)


def _empty(**options: Any) -> Deep:
    with init_empty_weights():
        return Deep(**options).eval()


def _save(model: Deep, folder: Path, kind: str) -> Path:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "pickle":
        torch.save(state, folder / "pytorch_model.bin")
    elif kind == "safetensors":
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        shards, index = shard_checkpoint(state, 1000, "model.safetensors")
        for name, shard in shards.items():
            save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["pickle", "safetensors", "shards"])
@pytest.mark.parametrize("place", [None, {"": "cpu"}, "disk"])
def test_every_format_loads_to_every_place(tmp_path: Path, kind: str, place: Any) -> None:
    model = Deep(width=16).eval()
    folder = _save(model, tmp_path, kind)
    if place == "disk":
        place = {"emb": "cpu", "h": "disk", "ln": "cpu", "head": "disk"}
    loaded = load_checkpoint_and_dispatch(_empty(width=16), folder, place, offload_folder=tmp_path / "away")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(loaded(TOKENS), model(TOKENS))
    if place and "h" in place:
        assert devices(loaded)["h.0.a.weight"] == "meta"


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_all_device_map_strategies_load(tmp_path: Path, strategy: str) -> None:
    model = Deep(width=16).eval()
    loaded: Any = load_checkpoint_and_dispatch(
        _empty(width=16), _save(model, tmp_path, "shards"), strategy, max_memory={"cpu": 6000},
        offload_folder=tmp_path / "away",
    )  # fmt: skip
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_low_0_keeps_the_first_accelerator_free() -> None:
    limits = {0: 3000, 1: 3000, 2: 3000, "cpu": 9000}
    usual, low = (
        make_device_map(_empty(), strategy, limits, no_split_module_classes=["Block"])
        for strategy in ("balanced", "balanced_low_0")
    )
    assert 0 in usual.values()
    assert 0 not in low.values()
    assert {1, 2} <= set(low.values())


def test_unknown_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="please choose 'auto'"):
        load_checkpoint_and_dispatch(_empty(), tmp_path, "foo")


def test_dtypes_are_converted_except_for_the_listed_modules(tmp_path: Path) -> None:
    folder = _save(Deep(), tmp_path, "safetensors")
    model = _empty()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["ln"])
    assert model.emb.weight.dtype == torch.float16
    assert model.ln.weight.dtype == torch.float32


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    model = Deep(tied=True)
    save_file({k: v for k, v in model.state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors")
    loaded = _empty(tied=True)
    load_checkpoint_in_model(loaded, tmp_path, strict=True)
    assert loaded.head.weight is loaded.emb.weight
    assert torch.equal(loaded.head.weight, model.emb.weight)


def test_weights_are_loaded_into_existing_memory(tmp_path: Path) -> None:
    model, other = Deep(), Deep()
    address = other.emb.weight.data_ptr()
    load_checkpoint_in_model(other, _save(model, tmp_path, "safetensors"))
    assert other.emb.weight.data_ptr() == address
    assert torch.equal(other.emb.weight, model.emb.weight)


@pytest.mark.parametrize("framework", ["tf", "flax", "other"])
def test_weights_of_other_frameworks_are_refused(tmp_path: Path, framework: str) -> None:
    save_file(
        _empty().to_empty(device="cpu").state_dict(), tmp_path / "model.safetensors", metadata={"format": framework}
    )
    for error in (OSError, ValueError, RuntimeError):  # Accelerate raises one of the first two.
        with pytest.raises(error, match=f"was saved for '{framework}'"):
            load_checkpoint_and_dispatch(_empty(), tmp_path, {"": "cpu"})


def test_names_that_do_not_match_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = dict(ThreeLayers().state_dict())
    state["zip.weight"] = state.pop("linear1.bias")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"Missing key\(s\): linear1.bias; Unexpected key\(s\): zip"):
        load_checkpoint_in_model(ThreeLayers(), tmp_path, strict=True)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(ThreeLayers(), tmp_path)
    assert "linear1.bias" in caplog.text
    assert "zip.weight" in caplog.text


@pytest.mark.parametrize("kind", ["pickle", "safetensors", "shards", "pickled shards"])
@pytest.mark.parametrize("wrong", ["missing", "unexpected"])
def test_names_are_compared_before_anything_is_loaded(tmp_path: Path, kind: str, wrong: str) -> None:
    saved = Deep(blocks=4, own=wrong == "unexpected")
    if kind == "pickled shards":
        _pickled_shards(tmp_path, saved)
    else:
        _save(saved, tmp_path, kind)
    model = Deep(blocks=4, own=wrong == "missing")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=rf"(?i){wrong} key\(s\): scale\. Nothing was loaded"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.emb.weight, saved.emb.weight)


_MEASURED = """
import gc, sys
from pathlib import Path
import torch
from notebook_accelerate import init_empty_weights, load_checkpoint_in_model

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))

class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList([torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)])

load_checkpoint_in_model(Blocks(), f"{sys.argv[1]}/bin")  # what the first load imports is in memory now
for kind, dtype in (("safetensors", None), ("safetensors", torch.float64), ("bin", None)):
    with init_empty_weights():
        model = Blocks()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory("VmRSS")
    load_checkpoint_in_model(model, f"{sys.argv[1]}/{kind}", {"": "cpu"}, dtype=dtype)
    total = sum(parameter.sum().item() for parameter in model.parameters())  # what is mapped is in memory now
    print(memory("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()), total)
    del model
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system cannot reset its peak")
def test_the_peak_of_memory_is_bounded(tmp_path: Path) -> None:
    state = {f"h.{number}.weight": torch.full((2048, 2048), 1.0) for number in range(12)}
    for kind in ("safetensors", "bin"):
        (tmp_path / kind).mkdir()
        weight_map = {}
        for first in range(0, 12, 3):
            part = dict(list(state.items())[first : first + 3])
            file = tmp_path / kind / f"part-{first}.{kind}"
            save_file(part, file) if kind == "safetensors" else torch.save(
                {k: v.clone() for k, v in part.items()}, file
            )
            weight_map.update(dict.fromkeys(part, file.name))
        (tmp_path / kind / "model.index.json").write_text(json.dumps({"weight_map": weight_map}))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # This makes malloc return freed memory to the system.
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    largest = 3 * 2048 * 2048 * 4
    for line in done.stdout.splitlines():
        peak, share, total = (float(word) for word in line.split())
        assert total == 12 * 2048 * 2048
        assert share <= peak + 20e6, "the whole checkpoint was in memory"
        assert peak <= share + 1.1 * largest
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("place", [None, {"": "cpu"}])
def test_mismatched_shapes_do_not_change_the_model(tmp_path: Path, place: Any) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in ThreeLayers().state_dict().items()}
    state["linear2.bias"] = torch.zeros(9)
    save_file(state, tmp_path / "model.safetensors")
    model = ThreeLayers()
    with pytest.raises(CheckpointMismatchError, match=r"linear2.bias: \(9,\) in the checkpoint, \(5,\) in the model"):
        load_checkpoint_in_model(model, tmp_path, place)
    assert model.linear1.weight.any()


def test_broken_files_are_reported(tmp_path: Path) -> None:
    folder = _save(Deep(), tmp_path, "shards")
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(BrokenCheckpointError, match="is broken"):
        load_checkpoint_in_model(_empty(), folder)
    shard.unlink()
    with pytest.raises(BrokenCheckpointError, match=f"model.safetensors.index.json lists: {shard.name}"):
        load_checkpoint_in_model(_empty(), folder)


def _pickled_shards(folder: Path, model: nn.Module | None = None) -> list[Path]:
    state = list((model or Deep()).state_dict().items())
    weight_map = {}
    for number in range(3):
        file = f"pytorch_model-{number + 1:05d}-of-00003.bin"
        part = dict(state[number::3])
        torch.save(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sorted(folder.glob("*.bin"))


def test_a_partial_load_is_reported(tmp_path: Path) -> None:
    shard = _pickled_shards(tmp_path)[1]
    content = shard.read_bytes()
    for broken in (content[: len(content) // 2], content[:2], b""):
        shard.write_bytes(broken)
        with pytest.raises(BrokenCheckpointError, match=r"00002.* partly loaded: 1 of 3 files, and \d+ of 20 tensors"):
            load_checkpoint_in_model(_empty(), tmp_path)


def test_a_full_disk_is_reported_while_loading(tmp_path: Path) -> None:
    _pickled_shards(tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    (away / "h.1.a.weight.dat.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"h\.1\.a\.weight .* No space left"):
        load_checkpoint_in_model(_empty(), tmp_path, {"emb": "cpu", "h": "disk", "ln": "cpu", "head": "cpu"}, away)
    assert not (away / "index.json").exists(), "an incomplete folder must not look complete"


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"emb.weight": torch.zeros(20, 10)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"emb.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_checkpoint_in_model(_empty(), folder)


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_pickles_may_contain_only_weights(tmp_path: Path) -> None:
    torch.save({"emb.weight": _Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="contains more than data"):
        load_checkpoint_in_model(_empty(), tmp_path)


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder containing"):
        load_checkpoint_in_model(_empty(), tmp_path)
    with pytest.raises(ValueError, match="should be the path to a file"):
        load_checkpoint_in_model(_empty(), tmp_path / "nothing")
    folder = _save(Deep(), tmp_path, "safetensors")
    with pytest.raises(ValueError, match="please pass along an `offload_folder`"):
        load_checkpoint_in_model(_empty(), folder, {"": "disk"})


def test_a_single_file_loads(tmp_path: Path) -> None:
    model = ThreeLayers()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = load_state_dict(tmp_path / "model.safetensors", {"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"})
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def _sparse(path: Path, size: int) -> None:
    """Write a file with one square float32 tensor. The file is sparse, so it takes no disk space."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [size, size], "data_offsets": [0, 4 * size * size]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(path, 8 + len(header) + 4 * size * size)


def test_a_map_that_overflows_the_memory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    size = 2**20
    _sparse(tmp_path / "model.safetensors", size)
    # With include_buffers=False, each parameter would be allocated before it is dropped.
    with init_empty_weights(include_buffers=True):
        model = torch.nn.Linear(size, size, bias=False)
    with pytest.raises(ValueError, match=r"puts 2.20 TB on device cpu, which has .* free. Nothing was moved or loaded"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype="bfloat16")
    assert model.weight.is_meta


def test_a_given_map_is_checked_against_max_memory(tmp_path: Path) -> None:
    folder = _save(Deep(), tmp_path, "safetensors")
    with pytest.raises(ValueError, match=r"puts 5.20 kB on device cpu, which is limited to 4.00 kB by max_memory"):
        load_checkpoint_and_dispatch(_empty(), folder, {"": "cpu"}, max_memory={"cpu": "4KB"})
    load_checkpoint_and_dispatch(_empty(), folder, {"": "cpu"}, max_memory={"cpu": "6KB"})
