"""Training continues bitwise equal here from the real Accelerate's checkpoints, and there from this package's."""

from __future__ import annotations

import json
import os
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from notebook_accelerate.checkpointing import read_weights
from tests.parity.checkpoints import scripts, sharded
from tests.support.fresh import fresh_state
from tests.support.ranks import run_ranks

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

__all__ = ["fresh_state"]


def in_accelerate(function: str, *arguments: Any, world_size: int = 1, module: ModuleType = scripts) -> Any:
    """Call a module's function with the real Accelerate in new processes. Return rank 0's result."""
    return run_ranks(_called, module.__name__, function, arguments, world_size=world_size)[0]


def _called(module: str, function: str, arguments: tuple[Any, ...]) -> Any:
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    warnings.simplefilter("ignore")
    return getattr(import_module(module), function)("accelerate", *arguments)


def here(function: str, *arguments: Any) -> Any:
    """Call one of the scripts' functions with this package."""
    return getattr(scripts, function)("notebook_accelerate", *arguments)


BETWEEN_EPOCHS = [(True, "no", "in order"), (False, "bf16", "in order"), (True, "no", "shuffled")]
WITHIN = (True, "no", "stateful")


@pytest.mark.parametrize(("safe", "precision", "loading"), [*BETWEEN_EPOCHS, WITHIN])
def test_a_checkpoint_of_accelerate_resumes_here(tmp_path: Path, safe: bool, precision: str, loading: str) -> None:
    expected = in_accelerate("train", str(tmp_path / "out"), safe, precision, loading)
    assert here("go_on", str(tmp_path / "out"), precision, loading) == expected


@pytest.mark.parametrize(("safe", "precision", "loading"), BETWEEN_EPOCHS)
def test_a_checkpoint_made_here_resumes_in_accelerate(tmp_path: Path, safe: bool, precision: str, loading: str) -> None:
    expected = here("train", str(tmp_path / "out"), safe, precision, loading)
    assert in_accelerate("go_on", str(tmp_path / "out"), precision, loading) == expected


def test_accelerate_resumes_within_an_epoch_from_our_checkpoint_like_from_its_own(tmp_path: Path) -> None:
    """Accelerate continues with the remaining batches, and repeats the random numbers of the interrupted pass."""
    in_accelerate("train", str(tmp_path / "theirs"), *WITHIN)
    here("train", str(tmp_path / "ours"), *WITHIN)
    expected = in_accelerate("go_on", str(tmp_path / "theirs"), *WITHIN[1:])
    assert in_accelerate("go_on", str(tmp_path / "ours"), *WITHIN[1:]) == expected


@pytest.mark.parametrize("loading", ["in order", "stateful"])
def test_both_write_the_same_files(tmp_path: Path, loading: str) -> None:
    in_accelerate("train", str(tmp_path / "theirs"), True, "no", loading)
    here("train", str(tmp_path / "ours"), True, "no", loading)
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()}
    ours = {path.name for path in (tmp_path / "ours").iterdir()}
    assert theirs <= ours
    assert ours - theirs == {"checkpoint_manifest.json", "sampler.bin"}
    model = "model.safetensors"
    assert (tmp_path / "ours" / model).read_bytes() == (tmp_path / "theirs" / model).read_bytes()


def test_checkpoints_of_two_ranks_resume_in_either_package(tmp_path: Path) -> None:
    expected = in_accelerate("train", str(tmp_path / "theirs"), True, world_size=2)
    assert run_ranks(here, "go_on", str(tmp_path / "theirs"))[0] == expected
    expected = run_ranks(here, "train", str(tmp_path / "ours"), True)[0]
    assert in_accelerate("go_on", str(tmp_path / "ours"), world_size=2) == expected


def test_sharded_states_resume_in_either_package(tmp_path: Path) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected = in_accelerate("train", theirs, world_size=2, module=sharded)
    assert run_ranks(sharded.go_on, "notebook_accelerate", theirs)[0] == expected
    assert run_ranks(sharded.train, "notebook_accelerate", ours)[0] == expected
    assert in_accelerate("go_on", ours, world_size=2, module=sharded) == expected
    names = [{path.relative_to(place).as_posix() for path in Path(place).rglob("*")} for place in (theirs, ours)]
    assert names[1] - names[0] == {"checkpoint_manifest.json"}
    assert names[0] <= names[1]
    assert {"pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"} <= names[0]


def test_folders_of_offloaded_weights_load_in_either_package(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    in_accelerate("offload", str(theirs))
    here("offload", str(ours))
    assert here("offloaded", str(theirs)) == in_accelerate("offloaded", str(ours)) == scripts.DTYPES
    assert json.loads((ours / "index.json").read_text()) == json.loads((theirs / "index.json").read_text())
    data = [{path.name: path.read_bytes() for path in folder.glob("*.dat")} for folder in (ours, theirs)]
    assert data[0] == data[1]
    assert data[0].keys() == {f"{name}.dat" for name in scripts.DTYPES}


@pytest.mark.parametrize("safe", [True, False])
def test_files_of_sharded_models_load_in_either_package(tmp_path: Path, safe: bool) -> None:
    expected = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    in_accelerate("save_model", str(tmp_path / "theirs"), safe)
    read = read_weights(tmp_path / "theirs")
    names = [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")]
    assert [read[name].flatten()[0].item() for name in names] == expected
    assert len(read) == 6
    here("save_model", str(tmp_path / "ours"), safe)
    assert here("loaded_model", str(tmp_path / "theirs")) == expected
    assert in_accelerate("loaded_model", str(tmp_path / "ours")) == expected
