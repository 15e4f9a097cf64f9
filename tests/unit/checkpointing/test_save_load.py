"""`save_state` and `load_state` in one process: files, restored states and refused checkpoints."""

from __future__ import annotations

import datetime as dt
import enum
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from notebook_accelerate import Accelerator, DataLoaderConfiguration, checkpointing
from notebook_accelerate.checkpointing import state_saving
from notebook_accelerate.checkpointing.manifest import read_manifest
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError
from tests.support.trainings import Counter, Training, same, seed_everything

ALL_FILES = [
    "checkpoint_manifest.json",
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "sampler.bin",
    "scheduler.bin",
]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbered(tmp_path: Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **options)


def test_the_files_match_accelerate(tmp_path: Path) -> None:
    training = Training()
    training.epoch()
    target = str(tmp_path / "out")
    assert training.accelerator.save_state(target) == target
    assert names_in(tmp_path / "out") == ALL_FILES
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) >= {"first.weight", "norm.running_mean"}
        assert "last.weight" not in set(file.keys())  # last.weight is the same tensor as first.weight.
    assert torch.load(tmp_path / "out" / "custom_checkpoint_0.pkl") == {"count": 12}
    assert set(torch.load(tmp_path / "out" / "optimizer.bin")) == {"state", "param_groups"}


def test_a_second_object_of_a_kind_gets_a_number(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in range(2):
        model = nn.Linear(2, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / "out"), safe_serialization=False)
    assert {"pytorch_model.bin", "pytorch_model_1.bin", "optimizer.bin", "optimizer_1.bin"} < set(
        names_in(tmp_path / "out")
    )


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_resuming_equals_an_uninterrupted_run(tmp_path: Path, safe: bool, blocking: bool) -> None:
    whole = Training()
    for _ in range(3):
        whole.epoch()
    expected = whole.everything()
    first = Training()
    first.epoch()
    first.accelerator.save_state(str(tmp_path / "out"), safe_serialization=safe, blocking=blocking)
    first.epoch()  # Training continues while a thread writes.
    first.accelerator.end_training()
    resumed = Training(seed=99)
    resumed.raw.train()
    # A resumed script has the same data. Only the objects that load_state restores may differ.
    resumed.loader.dataset.tensors = first.loader.dataset.tensors
    resumed.accelerator.load_state(str(tmp_path / "out"))
    resumed.epoch()
    resumed.epoch()
    assert resumed.losses == whole.losses[12:]
    assert same(resumed.everything(), expected)


def test_resuming_in_the_middle_of_an_epoch_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    whole = Training(dataloader_config=config, gradient_accumulation_steps=2)
    for _ in range(3):
        whole.epoch()
    expected = whole.everything()
    first = Training(dataloader_config=config, gradient_accumulation_steps=2)
    first.epoch()
    first.epoch(stop=6)
    first.accelerator.save_state(str(tmp_path / "out"))
    resumed = Training(seed=99, dataloader_config=config, gradient_accumulation_steps=2)
    resumed.loader.dataset.tensors = first.loader.dataset.tensors
    resumed.accelerator.load_state(str(tmp_path / "out"))
    assert resumed.loader.iteration == 1
    resumed.epoch(skip=6)
    resumed.epoch()
    assert resumed.losses == whole.losses[18:]
    assert same(resumed.everything(), expected)


def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=5)
    whole = Training(dataloader_config=config)
    whole.epoch()
    first = Training(dataloader_config=config)
    first.epoch(stop=5)
    first.accelerator.save_state(str(tmp_path / "out"))
    assert "dl_state_dict.bin" in names_in(tmp_path / "out")
    resumed = Training(seed=99, dataloader_config=config)
    resumed.loader.dataset.tensors = first.loader.dataset.tensors
    resumed.accelerator.load_state(str(tmp_path / "out"))
    resumed.epoch()
    assert resumed.losses == whole.losses[5:]


def test_the_scaler_of_fp16_is_restored(tmp_path: Path) -> None:
    training = Training(mixed_precision="fp16")
    training.epoch()
    scaler = training.accelerator.scaler
    assert scaler is not None
    scaler.update(128.0)
    training.accelerator.save_state(str(tmp_path / "out"))
    scaler.update(4.0)
    training.accelerator.load_state(str(tmp_path / "out"))
    assert "scaler.pt" in names_in(tmp_path / "out")
    assert scaler.get_scale() == 128.0


def test_numbered_checkpoints_are_limited(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=2))
    model = accelerator.prepare(nn.Linear(2, 2))
    for value in range(4):
        model.weight.data.fill_(value)
        saved = accelerator.save_state(blocking=value % 2 == 0)
        assert Path(saved).name == f"checkpoint_{value}"
    accelerator.load_state()
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert names_in(tmp_path) == ["checkpoints"]
    assert model.weight[0, 0] == 3
    assert accelerator.save_iteration == 4


def test_numbering_continues_after_a_restart(tmp_path: Path) -> None:
    first = Accelerator(cpu=True, project_config=numbered(tmp_path))
    first.prepare(nn.Linear(2, 2))
    first.save_state()
    again = Accelerator(cpu=True, project_config=numbered(tmp_path))
    again.prepare(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"already exists.*load_state.*iteration=1"):
        again.save_state()
    again.load_state()
    assert again.save_state().endswith("checkpoint_1")


def test_hooks_see_the_folder_and_may_handle_a_model(tmp_path: Path) -> None:
    training = Training()

    def keep_apart(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "adapter").mkdir()
        torch.save(weights.pop(), Path(folder) / "adapter" / "weights.pt")

    def read_apart(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "adapter" / "weights.pt"))

    saving = training.accelerator.register_save_state_pre_hook(keep_apart)
    training.accelerator.register_load_state_pre_hook(read_apart)
    training.accelerator.save_state(str(tmp_path / "out"))
    saving.remove()
    before = training.weights()
    training.epoch()
    training.accelerator.load_state(str(tmp_path / "out"))
    assert same(before, training.weights())
    assert "model.safetensors" not in names_in(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert "adapter/weights.pt" in manifest.files


def test_hooks_get_a_folder_with_the_name_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
    named, numbered = Accelerator(cpu=True), Accelerator(cpu=True, project_config=project)
    got: list[Path] = []
    for accelerator in (named, numbered):
        accelerator.register_save_state_pre_hook(lambda *arguments: got.append(Path(arguments[-1])))
        accelerator.register_load_state_pre_hook(lambda *arguments: got.append(Path(arguments[-1])))
    (tmp_path / "inner").mkdir()
    for folder in ("new", "new", "inner/..", "."):  # The last two folders are the working directory itself.
        named.save_state(folder)
    named.load_state("new")
    numbered.save_state()
    here = tmp_path.name
    assert [folder.name for folder in got] == ["new", "new", here, here, "new", "checkpoint_0"]
    assert got[4] == tmp_path / "new"
    assert not any(tmp_path.rglob("*.incomplete"))


def test_saving_again_into_a_folder_keeps_the_users_files(tmp_path: Path) -> None:
    training = Training()
    folder = tmp_path / "out"
    training.accelerator.save_state(str(folder))
    (folder / "notes.txt").write_text("mine")
    training.epoch()
    training.accelerator.save_state(str(folder), safe_serialization=False)
    assert (folder / "notes.txt").read_text() == "mine"
    assert "model.safetensors" not in names_in(folder)
    after = training.weights()
    training.epoch()
    training.accelerator.load_state(str(folder))
    assert same(after, training.weights())
    assert names_in(tmp_path) == ["out"]


def test_the_working_directory_can_be_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    training = Training()
    training.accelerator.save_state(".")
    training.accelerator.load_state(".")
    assert names_in(tmp_path) == sorted([*ALL_FILES, "script.py"])


def test_missing_folders_and_names_raise(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(ValueError, match="folder does not exist"):
        training.accelerator.load_state(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"No input_dir.*load_state\("):
        training.accelerator.load_state()
    with pytest.raises(ValueError, match=r"no output_dir.*save_state\("):
        training.accelerator.save_state()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a file with this name"):
        training.accelerator.save_state(str(tmp_path / "file"))


def test_an_empty_project_reports_that_nothing_was_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=numbered(tmp_path))
    with pytest.raises(ValueError, match=r"no checkpoint in .* yet"):
        accelerator.load_state()


def test_a_changed_byte_is_reported_with_its_file(tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    path = tmp_path / "out" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match=r"(?s)broken.*optimizer\.bin has changed"):
        training.accelerator.load_state(str(tmp_path / "out"))


def test_a_checkpoint_with_more_ranks_is_refused_unless_elastic(tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    path = tmp_path / "out" / "checkpoint_manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "world_size": 4}))
    with pytest.raises(CheckpointMismatchError, match=r"written by 4 ranks, but this run has 1.*elastic=True"):
        training.accelerator.load_state(str(tmp_path / "out"))
    training.accelerator.load_state(str(tmp_path / "out"), elastic=True)
    path.write_text(json.dumps({**content, "layout": "fsdp"}))
    with pytest.raises(CheckpointMismatchError, match="'fsdp'"):
        training.accelerator.load_state(str(tmp_path / "out"))


def test_other_registered_objects_are_refused(tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    training.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointMismatchError, match=r"(?s)found checkpoints: 1.*registered objects: 2"):
        training.accelerator.load_state(str(tmp_path / "out"))
    training.accelerator._custom_objects.pop()
    training.accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(CheckpointMismatchError, match="model number 1"):
        training.accelerator.load_state(str(tmp_path / "out"))


def test_a_folder_without_a_manifest_loads(tmp_path: Path) -> None:
    training = Training()
    training.epoch()
    training.accelerator.save_state(str(tmp_path / "out"))
    expected = training.everything()
    (tmp_path / "out" / "checkpoint_manifest.json").unlink()
    other = Training(seed=3)
    other.accelerator.load_state(str(tmp_path / "out"))
    assert same(other.everything(), expected)


class Evil:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


class EvilState(Counter):
    def state_dict(self) -> Any:
        return {"count": Evil()}


def test_loading_runs_no_code_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training()
    training.accelerator._custom_objects[:] = [EvilState()]
    with pytest.warns(UserWarning, match=r"contains objects of .*Evil.*load_state reads only plain data"):
        training.accelerator.save_state("out")
    with pytest.raises(CheckpointError, match=r"(?s)more than data.*weights_only"):
        training.accelerator.load_state("out")
    assert not Path("evil").exists()
    training.accelerator.load_state("out", load_kwargs={"weights_only": False})
    assert Path("evil").exists()


def test_strict_is_passed_to_the_model(tmp_path: Path) -> None:
    seed_everything(0)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2, bias=False))
    accelerator.save_state(str(tmp_path / "out"))
    other = Accelerator(cpu=True)
    other.prepare(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="bias"):
        other.load_state(str(tmp_path / "out"))
    other.load_state(str(tmp_path / "out"), strict=False)


def test_a_strategy_may_write_its_own_files(tmp_path: Path) -> None:
    training = Training()

    def write(folder: Path, safe_serialization: bool, **options: Any) -> None:
        (folder / "pieces").mkdir()
        torch.save((training.raw.state_dict(), options), folder / "pieces" / "rank_0.pt")

    def read(folder: Path, models: list[Any], **options: Any) -> None:
        state, _ = torch.load(folder / "pieces" / "rank_0.pt")
        models[0].load_state_dict(state, **options)

    strategy: Any = training.accelerator.strategy
    strategy.checkpoint_layout, strategy.save_state, strategy.load_state = "pieces", write, read
    with pytest.warns(UserWarning, match="writes models and optimizers itself, in the foreground"):
        training.accelerator.save_state(str(tmp_path / "out"), blocking=False, tag="x")
    before = training.weights()
    training.epoch()
    training.accelerator.load_state(str(tmp_path / "out"), strict=True)
    assert same(before, training.weights())
    names = names_in(tmp_path / "out")
    assert "pieces" in names
    assert not {"model.safetensors", "optimizer.bin"} & set(names)
    whole = Training().accelerator
    with pytest.raises(CheckpointMismatchError, match="'pieces', but this run's layout is 'whole'"):
        whole.load_state(str(tmp_path / "out"))


def test_a_checkpoint_that_cannot_be_removed_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=1))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    gone = tmp_path / "checkpoints" / "checkpoint_7"
    with monkeypatch.context() as patch:
        patch.setattr(
            state_saving, "checkpoints_above_limit", lambda *_: [gone]
        )  # This looks as if another process had removed the folder after it was listed.
        with pytest.warns(UserWarning, match=r"checkpoint_1 is written, but .* could not be removed: .*checkpoint_7"):
            accelerator.save_state()
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]
    accelerator.load_state()
    accelerator.save_state()
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_2"]


def test_the_next_save_finishes_an_interrupted_removal(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint_7.removed").mkdir()
    accelerator = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=1))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state()
    assert names_in(tmp_path) == ["checkpoints"]


def test_a_model_with_state_of_other_types_is_written_in_torchs_format(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra = 0

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Extra(2, 2))
    model.extra = 5
    accelerator.save_state(str(tmp_path / "out"))
    model.extra = 0
    accelerator.load_state(str(tmp_path / "out"))
    assert model.extra == 5
    assert "pytorch_model.bin" in names_in(tmp_path / "out")


def test_a_sampler_that_would_be_pickled_is_dropped_with_a_warning(tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    (tmp_path / "out" / "checkpoint_manifest.json").unlink()
    torch.save(torch.utils.data.RandomSampler(range(3)), tmp_path / "out" / "sampler.bin")
    with pytest.warns(UserWarning, match=r"sampler\.bin contains a pickled sampler and was not loaded"):
        training.accelerator.load_state(str(tmp_path / "out"))


class Odd:
    """An object whose state is whatever value it was given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Phase(enum.Enum):
    WARMUP = "warmup"


class Tagging(torch.optim.SGD):
    """An optimizer whose state contains members of an enum."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in (self.state[parameter] for group in self.param_groups for parameter in group["params"]):
            state["phase"] = Phase.WARMUP
        return result


@pytest.mark.parametrize("blocking", [True, False])
def test_plain_data_in_states_is_loaded(tmp_path: Path, blocking: bool) -> None:
    accelerator = Accelerator(cpu=True)
    value = {"at": dt.datetime(2025, 1, 2), "from": Path("a"), "phase": Phase.WARMUP, "last": deque([1.0], maxlen=2)}
    odd, raw = Odd(value), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(raw, Tagging(raw.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(odd)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    accelerator.save_state(tmp_path / "out", blocking=blocking)
    odd.value, optimizer.state[raw.weight]["phase"] = None, None
    accelerator.load_state(tmp_path / "out")
    assert odd.value == value
    assert optimizer.state[raw.weight]["phase"] is Phase.WARMUP
    accelerator.end_training()


def test_a_state_that_cannot_be_loaded_is_reported_when_it_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(odd := Odd([Odd(1)]))
    with pytest.warns(UserWarning, match=r"custom_checkpoint_0\.pkl contains objects of .*Odd.*weights_only"):
        accelerator.save_state(tmp_path / "out")
    with pytest.raises(CheckpointError, match="contains more than data"):
        accelerator.load_state(tmp_path / "out")
    odd.value = None
    accelerator.load_state(tmp_path / "out", load_kwargs={"weights_only": False})
    assert odd.value[0].value == 1


def test_an_error_of_an_object_is_not_reported_as_damage(tmp_path: Path) -> None:
    """torch's optimizers cannot load states with NumPy arrays, even from an intact file."""
    accelerator, raw = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[raw.weight]["history"] = np.ones(2)
    accelerator.save_state(tmp_path / "out")
    with pytest.raises(TypeError, match="sequence of integers"):
        accelerator.load_state(tmp_path / "out")


def test_a_save_inside_an_accumulation_window_warns(tmp_path: Path) -> None:
    accelerator, raw = Accelerator(cpu=True, gradient_accumulation_steps=2), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for batch in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if batch == 2:
            with pytest.warns(UserWarning, match="inside a window of gradient accumulation"):
                accelerator.save_state(tmp_path / "out")
        else:
            accelerator.save_state(tmp_path / "out") if batch % 2 else None


def test_a_linked_checkpoint_does_not_stop_the_limit(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "note").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "checkpoint_1").symlink_to(tmp_path / "gone")
    (tmp_path / ".checkpoint_7.removed").symlink_to(tmp_path / "elsewhere")
    accelerator = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=2, iteration=2))
    for _ in range(4):
        accelerator.save_state()
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_4", "checkpoint_5"]
    assert names_in(tmp_path) == ["checkpoints", "elsewhere"]
    assert names_in(tmp_path / "elsewhere") == ["note"]


def test_every_save_is_counted(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for count in range(2):
        assert accelerator.save_iteration == count
        accelerator.save_state(tmp_path / "out")


def test_accelerates_functions_write_and_read_its_files(tmp_path: Path) -> None:
    training = Training()
    training.epoch()
    accelerator = training.accelerator
    objects = (accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    states = [accelerator.get_state_dict(model) for model in accelerator._models]
    assert checkpointing.save_accelerator_state(str(tmp_path), states, *objects, 0, 5) == tmp_path
    for index, custom in enumerate(accelerator._custom_objects):
        checkpointing.save_custom_state(custom, str(tmp_path), index)
    expected = training.everything()
    assert names_in(tmp_path) == ALL_FILES[1:]
    resumed = Training(seed=7)
    accelerator = resumed.accelerator
    objects = (accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    assert checkpointing.load_accelerator_state(str(tmp_path), accelerator._models, *objects, 0) == {"step": 5}
    for index, custom in enumerate(accelerator._custom_objects):
        checkpointing.load_custom_state(custom, str(tmp_path), index)
    assert same(resumed.everything(), expected)
    assert checkpointing.OPTIMIZER_NAME == "optimizer"
