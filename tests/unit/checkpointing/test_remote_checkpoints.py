"""Checkpoints at URLs, in one process: in fsspec's memory file system, on disk, and at unreachable URLs."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from notebook_accelerate import load_checkpoint_in_model
from notebook_accelerate.big_modeling import checkpoint_shards
from notebook_accelerate.checkpointing import load, read_weights, save
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.remote_paths import RemotePath, path_of
from notebook_accelerate.utils import merge_fsdp_weights
from tests.support import stores
from tests.support.trainings import Training, same

MANIFEST = "checkpoint_manifest.json"
assert stores.Shelf.protocol == ("shelf",)


@pytest.fixture
def url() -> str:
    """Return a URL in fsspec's memory file system that no other test uses."""
    return f"memory://{uuid.uuid4().hex}"


def names(url: str) -> list[str]:
    return sorted(path_of(url).files())  # type: ignore[union-attr]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", ["memory", "shelf", "file"])
def test_resuming_restores_the_saved_state(url: str, tmp_path: Path, kind: str, blocking: bool) -> None:
    place = {"memory": url, "shelf": f"shelf://{tmp_path}", "file": f"file://{tmp_path}"}[kind] + "/out"
    for _ in range(2):  # The second save overwrites the first.
        training = Training()
        training.epoch()
        assert training.accelerator.save_state(place, blocking=blocking) == place
        expected = training.everything()
        training.accelerator.end_training()
        resumed = Training(seed=7)
        resumed.accelerator.load_state(place)
        assert same(resumed.everything(), expected)
        if kind == "memory":
            assert set(names(place)) == {*json.loads((path_of(place) / MANIFEST).read_text())["files"], MANIFEST}


def test_remote_files_equal_those_on_a_disk(url: str, tmp_path: Path) -> None:
    training = Training()
    training.epoch()
    for place in (f"{url}/out", str(tmp_path / "out")):
        training.accelerator.save_state(place)
    assert names(f"{url}/out") == sorted(path.name for path in (tmp_path / "out").iterdir())
    for path in (tmp_path / "out").iterdir():
        assert fsspec.filesystem("memory").cat_file(f"{url}/out/{path.name}") == path.read_bytes()


def test_other_files_in_the_folder_are_kept(url: str) -> None:
    (path_of(url) / "notes.txt").write_text("mine")
    training = Training()
    training.accelerator.save_state(url)
    training.accelerator.save_state(url)
    assert "notes.txt" in names(url)
    assert not any(name.startswith(".") for name in names(url))


def test_a_remote_folder_without_a_manifest_loads_only_by_name(url: str) -> None:
    options: dict[str, Any] = {"project_dir": url, "automatic_checkpoint_naming": True}
    training = Training(project_config=ProjectConfiguration(**options))
    for _ in range(2):
        training.epoch()
        training.accelerator.save_state()
    (path_of(url) / "checkpoints" / "checkpoint_1" / MANIFEST).unlink()
    training.accelerator.load_state()
    assert training.counter.count == 12
    assert training.accelerator.project_configuration.iteration == 1
    with pytest.raises(ValueError, match=r"checkpoint_1 already exists.*iteration=2"):
        training.accelerator.save_state()
    # Without a manifest, the folder looks like one written by Accelerate.
    training.accelerator.load_state(f"{url}/checkpoints/checkpoint_1")
    assert training.counter.count == 24


def test_a_changed_or_missing_file_is_reported_by_name(url: str) -> None:
    training = Training()
    training.accelerator.save_state(url)
    fsspec.filesystem("memory").pipe_file(f"{url}/scheduler.bin", b"other")
    (path_of(url) / "sampler.bin").unlink()
    with pytest.raises(BrokenCheckpointError, match=r"sampler.bin is missing\n  - scheduler.bin has 5 bytes"):
        training.accelerator.load_state(url)


def test_a_process_that_sees_another_store_raises(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(RemotePath, "read_text", _not_there)
    with pytest.raises(CheckpointError, match="all ranks must reach the same store"):
        training.accelerator.save_state(url)


def _not_there(self: RemotePath, encoding: str = "utf-8") -> str:
    raise FileNotFoundError(str(self))


def test_weights_are_downloaded_once_and_again_when_they_change(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    training, downloads = Training(), []
    download = RemotePath.download

    def counted(self: RemotePath, place: Path) -> None:
        downloads.append(self.name)
        download(self, place)

    monkeypatch.setattr(RemotePath, "download", counted)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    training.accelerator.save_model(model, url, max_shard_size=300)
    for _ in range(2):
        loaded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        load_checkpoint_in_model(loaded, url)
        assert same(list(loaded.state_dict().values()), list(model.state_dict().values()))
        assert sorted(read_weights(url)) == sorted(model.state_dict())
    assert len(downloads) == 3
    training.accelerator.save_model(model, url)
    assert names(url) == ["model.safetensors"]
    nn.init.zeros_(model[0].weight)
    training.accelerator.save_model(model, url)
    assert not read_weights(url)["0.weight"].any()


def test_an_index_that_leaves_its_folder_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    index = path_of(url) / "model.safetensors.index.json"
    assert isinstance(index, RemotePath)
    index.write_text(json.dumps({"weight_map": {"w": "../../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        checkpoint_shards.weights_on_disk(index)
    index.write_text("{}")
    with pytest.raises(BrokenCheckpointError, match="weight_map"):
        checkpoint_shards.weights_on_disk(index)


@pytest.mark.parametrize("safe", [True, False])
def test_a_single_object_is_saved_and_loaded(url: str, safe: bool) -> None:
    name = f"{url}/x.{'safetensors' if safe else 'bin'}"
    save({"a": torch.ones(2)}, name, safe_serialization=safe)
    assert torch.equal(load(name)["a"], torch.ones(2))


def test_urls_that_fsspec_cannot_reach_raise() -> None:
    with pytest.raises(ImportError, match="pip install gcsfs"):
        path_of("gs://bucket/x")
    with pytest.raises(ValueError, match="Protocol not known: nothing"):
        path_of("nothing://bucket/x")
    assert path_of("file:///a/b") == path_of("/a/b") == Path("/a/b")


def test_a_failed_download_leaves_nothing_of_a_merge(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path_of(url) / ".metadata").write_text("{}")

    def fail(*_: Any) -> None:
        raise CheckpointError("the store is gone")

    monkeypatch.setattr(RemotePath, "download", fail)
    # Keep the exception alive, as a notebook does with the last one.
    with pytest.raises(CheckpointError, match="the store is gone") as caught:
        merge_fsdp_weights(url, tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []
    del caught
