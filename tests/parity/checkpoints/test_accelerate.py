"""Folders of the real Accelerate load here and go on bit by bit, and the other way round."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, checkpointing
from tests.parity.checkpoints import scripts
from tests.support import peer
from tests.support.fresh import fresh_state
from tests.support.ranks import run_ranks

__all__ = ["fresh_state"]

_SCRIPT = inspect.getsource(scripts).replace("from __future__ import annotations\n", "")
_CALL = """
import json, sys, warnings
warnings.simplefilter("ignore")
function, arguments = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps(globals()[function]("accelerate", *arguments)))
"""


def in_accelerate(function: str, *arguments: Any, world_size: int = 1) -> Any:
    """Call one of the scripts' functions with the real package."""
    return json.loads(peer.run(_SCRIPT + _CALL, function, json.dumps(arguments), world_size=world_size))


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
