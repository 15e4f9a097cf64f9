"""Folders of the real Accelerate load here and go on bit by bit, and the other way round."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, checkpointing
from tests.parity.checkpoints import scripts, sharded
from tests.support import peer
from tests.support.fresh import fresh_state
from tests.support.ranks import run_ranks

__all__ = ["fresh_state"]


def _source(module: ModuleType) -> str:
    return inspect.getsource(module).replace("from __future__ import annotations\n", "")


_CALL = """
import json, sys, warnings
warnings.simplefilter("ignore")
function, arguments = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps(globals()[function]("accelerate", *arguments)))
"""


def in_accelerate(function: str, *arguments: Any, world_size: int = 1, module: ModuleType = scripts) -> Any:
    """Call one of the scripts' functions with the real package."""
    return json.loads(peer.run(_source(module) + _CALL, function, json.dumps(arguments), world_size=world_size))


def here(function: str, *arguments: Any) -> Any:
    """Call one of the scripts' functions with this package."""
    return getattr(scripts, function)("notebook_accelerate", *arguments)


BETWEEN_EPOCHS = [(True, "no", "in order"), (False, "bf16", "in order"), (True, "no", "shuffled")]
WITHIN = (True, "no", "stateful")


@pytest.mark.parametrize(("safe", "precision", "loading"), [*BETWEEN_EPOCHS, WITHIN])
def test_a_checkpoint_of_accelerate_goes_on_here(tmp_path: Path, safe: bool, precision: str, loading: str) -> None:
    expected = in_accelerate("train", str(tmp_path / "out"), safe, precision, loading)
    assert here("go_on", str(tmp_path / "out"), precision, loading) == expected


@pytest.mark.parametrize(("safe", "precision", "loading"), BETWEEN_EPOCHS)
def test_a_checkpoint_made_here_goes_on_in_accelerate(tmp_path: Path, safe: bool, precision: str, loading: str) -> None:
    expected = here("train", str(tmp_path / "out"), safe, precision, loading)
    assert in_accelerate("go_on", str(tmp_path / "out"), precision, loading) == expected


def test_accelerate_goes_on_within_an_epoch_as_from_its_own_checkpoint(tmp_path: Path) -> None:
    """It goes on with the remaining batches, and draws random numbers again that the interrupted pass has drawn."""
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


def test_two_ranks(tmp_path: Path) -> None:
    expected = in_accelerate("train", str(tmp_path / "theirs"), True, world_size=2)
    assert run_ranks(here, "go_on", str(tmp_path / "theirs"))[0] == expected
    expected = run_ranks(here, "train", str(tmp_path / "ours"), True)[0]
    assert in_accelerate("go_on", str(tmp_path / "ours"), world_size=2) == expected


def sharded_here(function: str, folder: str) -> list[float]:
    """Call one of the functions of the sharded training with this package."""
    found: list[float] = getattr(sharded, function)("notebook_accelerate", folder)
    return found


def test_sharded_states_go_on_in_either_package(tmp_path: Path) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected = in_accelerate("train", theirs, world_size=2, module=sharded)
    assert run_ranks(sharded_here, "go_on", theirs)[0] == expected
    assert run_ranks(sharded_here, "train", ours)[0] == expected
    assert in_accelerate("go_on", ours, world_size=2, module=sharded) == expected
    names = [{path.relative_to(place).as_posix() for path in Path(place).rglob("*")} for place in (theirs, ours)]
    assert names[1] - names[0] == {"checkpoint_manifest.json"}
    assert names[0] <= names[1]
    assert {"pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"} <= names[0]


_OFFLOADED = """
import sys, torch
from PACKAGE.utils import OffloadedWeightsLoader, offload_state_dict
torch.manual_seed(0)
state = {"half": torch.randn(3, 4).bfloat16(), "scalar": torch.tensor(7), "whole.weight": torch.randn(5),
         "flags": torch.tensor([True, False]), "small": torch.randn(2, 2).half()}
if sys.argv[1] == "write":
    offload_state_dict(sys.argv[2], state)
else:
    loader = OffloadedWeightsLoader(save_folder=sys.argv[2])
    assert sorted(loader) == sorted(state)
    for name, tensor in state.items():
        assert loader[name].dtype == tensor.dtype and torch.equal(loader[name], tensor), name
"""


def test_folders_of_offloaded_weights(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    here = _OFFLOADED.replace("PACKAGE", "notebook_accelerate")
    there = _OFFLOADED.replace("PACKAGE", "accelerate")
    peer.run(there, "write", str(theirs))
    for action, folder in (("write", ours), ("read", theirs)):
        subprocess.run([sys.executable, "-c", here, action, str(folder)], check=True, timeout=120)
    peer.run(there, "read", str(ours))
    assert json.loads((ours / "index.json").read_text()) == json.loads((theirs / "index.json").read_text())
    data = [{path.name: path.read_bytes() for path in folder.glob("*.dat")} for folder in (ours, theirs)]
    assert data[0] == data[1]
    assert len(data[0]) == 5


_SHARDS = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import load_checkpoint_in_model
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.0)
if sys.argv[1] == "write":
    for index, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, float(index))
    Accelerator(cpu=True).save_model(model, sys.argv[2], max_shard_size="5KB", safe_serialization=sys.argv[3] == "True")
else:
    load_checkpoint_in_model(model, sys.argv[2])
    print([parameter.flatten()[0].item() for parameter in model.parameters()])
"""


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_models(tmp_path: Path, safe: bool) -> None:
    peer.run(_SHARDS, "write", str(tmp_path / "theirs"), str(safe))
    read = checkpointing.read_weights(tmp_path / "theirs")
    assert {name: tensor.flatten()[0].item() for name, tensor in read.items()} == {
        "0.weight": 0.0, "0.bias": 1.0, "1.weight": 2.0, "1.bias": 3.0, "2.weight": 4.0, "2.bias": 5.0,
    }  # fmt: skip
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    for index, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, float(index))
    Accelerator(cpu=True).save_model(model, tmp_path / "ours", max_shard_size="5KB", safe_serialization=safe)
    assert peer.run(_SHARDS, "read", str(tmp_path / "ours")) == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"
