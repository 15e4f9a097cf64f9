"""Single files: shared tensors, shards with their index, loading with weights_only, and files that are refused."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn

from notebook_accelerate import Accelerator, checkpointing, cpu_offload, load_checkpoint_in_model
from notebook_accelerate.checkpointing import model_weights, single_files
from notebook_accelerate.checkpointing.single_files import names_of_same_memory
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from tests.support.trainings import Net


def test_shared_tensors_are_written_once_and_views_are_copied() -> None:
    base = torch.arange(8.0)
    state = {"b": base, "a": base, "part": base[2:4], "turned": base.view(2, 4).t(), "none": torch.empty(0)}
    clean = checkpointing.clean_state_dict_for_safetensors(state)
    assert set(clean) == {"b", "part", "turned", "none"}
    assert clean["part"].tolist() == [2, 3]
    assert all(tensor.is_contiguous() for tensor in clean.values())
    assert names_of_same_memory(state) == [["b", "a"]]
    pointers = [tensor.untyped_storage().data_ptr() for tensor in clean.values() if tensor.numel()]
    assert len(set(pointers)) == 3


class Language(nn.Module):
    """An embedding that is registered before the two heads that share its weight, and overlapping buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.lm_head, self.aux_head = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.aux_head.weight = self.wte.weight
        steps = torch.arange(6.0)
        self.register_buffer("later", steps[2:])
        self.register_buffer("earlier", steps[:4])


@pytest.mark.parametrize("max_shard_size", ["10GB", 100])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_tied_weight_is_saved_under_its_first_name(
    tmp_path: Path, max_shard_size: int | str, offloaded: bool
) -> None:
    accelerator, model = Accelerator(cpu=True), Language()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = cpu_offload(model, torch.device("cpu")) if offloaded else accelerator.prepare(model)
    accelerator.save_model(model, tmp_path, max_shard_size=max_shard_size)
    found = checkpointing.read_weights(tmp_path)
    assert set(expected) - set(found) == {"lm_head.weight", "aux_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("kept", ["wte.weight", "lm_head.weight", "aux_head.weight"])
def test_a_tied_weight_is_loaded_from_any_of_its_names(tmp_path: Path, kept: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Language())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(tmp_path / "out")
    ties = {"wte.weight", "lm_head.weight", "aux_head.weight"} - {kept}
    file = {name: tensor.clone() for name, tensor in expected.items() if name not in ties}
    safetensors.torch.save_file(file, tmp_path / "out" / "model.safetensors", metadata=single_files.METADATA)
    (tmp_path / "out" / "checkpoint_manifest.json").unlink()
    for load in (accelerator.load_state, lambda folder: load_checkpoint_in_model(model, folder)):
        nn.init.zeros_(model.wte.weight)
        load(tmp_path / "out")
        assert model.lm_head.weight is model.wte.weight
        assert torch.equal(model.wte.weight, expected["wte.weight"])


def test_a_safetensors_file_equals_the_one_of_the_library(tmp_path: Path) -> None:
    state = {
        f'{"ab"[place % 2]}.{place} é"\\\n\x01 {shape}': torch.ones(shape).to(dtype)
        for place, dtype in enumerate(single_files._DTYPES)
        for shape in ((3, 5), (), (0, 4), (7,))
    }
    state |= {"large": torch.randn(400, 400), "larger": torch.randn(700, 500), "trained": nn.Parameter(torch.randn(3))}
    state |= {f"small {place}": torch.randn(300) for place in range(2 * single_files._JOINED // 1200)}
    single_files.write_safetensors(state, tmp_path / "here")
    safetensors.torch.save_file(state, tmp_path / "library", metadata=single_files.METADATA)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "library").read_bytes()


def test_safetensors_takes_dtypes_and_views_that_need_another_form(tmp_path: Path) -> None:
    numbers = torch.randn(4, 4, dtype=torch.complex64)
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "fp8": torch.ones(3).to(torch.float8_e5m2)}
    for names in (["fp8"], ["conjugate", "negative"]):
        single_files.write_safetensors({name: state[name] for name in names}, path := tmp_path / "x.safetensors")
        found = load_file(path)
        assert all(torch.equal(found[name].to(torch.complex64), state[name].to(torch.complex64)) for name in names)


class Interrupting:
    """An object whose pickling is interrupted by the user."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    for value in ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": Interrupting()}):
        before = [path.read_bytes() for path in tmp_path.iterdir()]
        with contextlib.suppress(KeyboardInterrupt):
            checkpointing.save(value, tmp_path / "x.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == before


def test_safetensors_refuses_values_other_than_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Key `a` is invalid.*<class 'int'>"):
        checkpointing.save({"a": 1}, tmp_path / "x.safetensors", safe_serialization=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("safe", [True, False])
def test_saved_values_can_be_loaded(tmp_path: Path, safe: bool) -> None:
    value = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    path = tmp_path / ("x.safetensors" if safe else "x.bin")
    checkpointing.save(value, path, safe_serialization=safe)
    loaded = checkpointing.load(path)
    assert torch.equal(loaded["a"], value["a"])
    assert loaded["b"].dtype == torch.bfloat16
    stream = io.BytesIO()
    checkpointing.save(value, stream, safe_serialization=safe)
    stream.seek(0)
    again = safetensors.torch.load(stream.getvalue()) if safe else checkpointing.load(stream)
    assert torch.equal(again["a"], value["a"])


@pytest.mark.parametrize("value", [np.arange(3), np.float64(2.5), np.bool_(True), np.array(["a"]), np.float32(1)])
def test_numpy_values_load_with_weights_only(tmp_path: Path, value: Any) -> None:
    torch.save({"x": value}, tmp_path / "x.bin")
    assert np.array_equal(checkpointing.load(tmp_path / "x.bin")["x"], value)


class Custom:
    """A class whose objects are not plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_other_objects_are_refused_with_weights_only(tmp_path: Path) -> None:
    for value in (Custom(), Custom, {"x": [Custom()]}, Path.cwd):
        torch.save({"x": value}, tmp_path / "x.bin")
        with pytest.raises(CheckpointError, match=r"(?s)x\.bin contains more than data.*add_safe_globals"):
            checkpointing.load(tmp_path / "x.bin")
        assert checkpointing.load(tmp_path / "x.bin", weights_only=False) == {"x": value}


@pytest.mark.parametrize("name", ["x.bin", "x.safetensors"])
def test_every_truncated_file_is_reported_as_broken(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    checkpointing.save({"a": torch.arange(40.0)}, path, safe_serialization=name.endswith("safetensors"))
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(BrokenCheckpointError, match=r"is broken"):
            checkpointing.load(path)


def test_a_sharded_model_is_read_back(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Net())
    for safe, first in ((True, "model-00001-of-00003.safetensors"), (False, "pytorch_model-00001-of-00003.bin")):
        accelerator.save_model(accelerator.prepare(model), tmp_path, max_shard_size="17KB", safe_serialization=safe)
        index = json.loads(next(tmp_path.glob("pytorch*.json" if not safe else "model*.json")).read_text())
        assert first in index["weight_map"].values()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in set(model.parameters())) + 72
        read = checkpointing.read_weights(next(tmp_path.glob("pytorch*.json" if not safe else "model*.json")))
        assert all(torch.equal(read[name], model.state_dict()[name]) for name in read)
        assert ("2.last.weight" in read) is not safe


def test_saving_in_one_file_removes_earlier_shards(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(64, 64)
    accelerator.save_model(model, tmp_path, max_shard_size=1000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_card.md").touch()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    accelerator.save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "model_card.md"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)


def test_save_model_refuses_bad_arguments(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="should be a directory"):
        accelerator.save_model(nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(ValueError, match='"10GB"'):
        accelerator.save_model(nn.Linear(2, 2), tmp_path, max_shard_size="ten")
    with pytest.raises(ValueError, match=r"no weights for weight, bias"):
        accelerator.save_model(nn.Linear(2, 2, device="meta"), tmp_path)


@pytest.mark.parametrize(("text", "count"), [(5, 5), ("5", 5), ("2KB", 2000), ("1.5MiB", 1572864), ("10gb", 10**10)])
def test_sizes_are_parsed(text: int | str, count: int) -> None:
    assert model_weights.parse_size(text) == count


@pytest.mark.parametrize("bad", ["", "GB", "-1MB", 0, -3, True, "1 PB"])
def test_invalid_sizes_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="not a size"):
        model_weights.parse_size(bad)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "link/secret.bin", "a/../../secret.bin"])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "secret.bin")
    (folder / "link").symlink_to(tmp_path)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        checkpointing.read_weights(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_invalid_index_is_reported_as_broken(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BrokenCheckpointError, match="weight_map"):
        checkpointing.read_weights(tmp_path)


def test_a_missing_shard_is_reported_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(nn.Linear(64, 64), tmp_path, max_shard_size=1000)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BrokenCheckpointError, match="model-00002-of-00002"):
        checkpointing.read_weights(tmp_path)


def test_shards_are_divided_by_size() -> None:
    state = {name: torch.zeros(250) for name in "abc"}
    parts, index = checkpointing.shard_checkpoint(state, max_shard_size="2KB")
    assert {name: list(part) for name, part in parts.items()} == {
        "pytorch_model-00001-of-00002.bin": ["a", "b"],
        "pytorch_model-00002-of-00002.bin": ["c"],
    }
    assert index is not None
    assert index["weight_map"]["c"] == "pytorch_model-00002-of-00002.bin"
    assert checkpointing.shard_checkpoint(state) == ({"pytorch_model.bin": state}, None)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    checkpointing.save({"a": 1}, tmp_path / "x.bin")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpointing.save({"a": lambda: None}, tmp_path / "x.bin")
    assert checkpointing.load(tmp_path / "x.bin") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
