"""Loading checkpoints on two ranks: one rank reads for both, or each loads its shard of the full tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from notebook_accelerate.errors import CheckpointMismatchError
from tests.support.ranks import RankError, run_ranks


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two files, and return the tensors in it."""
    torch.manual_seed(0)
    state = {name: torch.rand_like(value) if value.is_floating_point() else value + 7
             for name, value in net().state_dict().items()}  # fmt: skip
    items = list(state.items())
    parts = {"a.safetensors": dict(items[:4]), "b.safetensors": dict(items[4:])}
    for file, part in parts.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def made(kind: str) -> nn.Module:
    """Create the model, whole or sharded, on the CPU or on the meta device."""
    torch.manual_seed(torch.distributed.get_rank())
    if kind.startswith("empty"):
        with init_empty_weights(include_buffers=True):
            model = net()
    else:
        model = net()
    if kind.endswith("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def load(kind: str, folder: str, broadcast: bool) -> dict[str, Any]:
    from notebook_accelerate import PartialState

    state = PartialState(cpu=True)
    model = made(kind)
    # If rank 0 broadcasts, rank 1 gets a folder without files.
    path = f"{folder}/nothing" if broadcast and state.process_index else folder
    load_checkpoint_in_model(model, path, strict=True, broadcast_from_rank0=broadcast)
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
            for name, value in model.state_dict().items()}  # fmt: skip


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("kind", ["whole", "empty", "sharded", "empty and sharded"])
def test_every_rank_gets_the_weights(tmp_path: Path, kind: str, broadcast: bool) -> None:
    expected = {name: value.tolist() for name, value in write(tmp_path).items()}
    assert run_ranks(load, kind, str(tmp_path), broadcast) == [expected, expected]


def load_something_wrong(folder: str, what: str) -> None:
    from notebook_accelerate import PartialState

    PartialState(cpu=True)
    wrong = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)) if what == "shapes" else net()
    if what == "names":
        wrong.extra = nn.Linear(2, 2)
    load_checkpoint_in_model(wrong, folder, strict=True, broadcast_from_rank0=True)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shapes", r"0\.weight: \(8, 4\) in the checkpoint, \(9, 4\) in the model"),
        ("names", r"Missing key\(s\): extra.bias, extra.weight. Nothing was loaded"),
        ("file", "b.safetensors is broken"),
        ("folder", "should be the path to a file"),
    ],
)
def test_every_rank_raises_the_error_of_rank_0(tmp_path: Path, what: str, message: str) -> None:
    write(tmp_path)
    if what == "file":
        (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-3])
    folder = tmp_path / "none" if what == "folder" else tmp_path
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(load_something_wrong, str(folder), what)
    assert sorted(caught.value.reports) == [0, 1], "no rank waits for the other one"


def load_parts(folder: str, whole: str) -> list[Any]:
    """Load this rank's own parts, and then whole tensors as if they were this rank's parts."""
    from notebook_accelerate import PartialState

    state = PartialState(cpu=True)
    saved, model = made("sharded"), made("sharded")
    path = f"{folder}/{state.process_index}.bin"
    torch.save(saved.state_dict(), path)
    load_checkpoint_in_model(model, path, strict=True, full_state_dict=False)
    expected = {name: _whole(value) for name, value in saved.state_dict().items()}
    same = [torch.equal(_whole(value), expected[name]) for name, value in model.state_dict().items()]
    alone = net()
    load_checkpoint_in_model(alone, whole, full_state_dict=False, broadcast_from_rank0=False)
    with pytest.raises(ValueError, match=r"0\.weight is a full tensor; pass full_state_dict=True"):
        load_checkpoint_in_model(model, whole, full_state_dict=False)
    unchanged = [torch.equal(_whole(value), expected[name]) for name, value in model.state_dict().items()]
    return [*same, *unchanged, alone.state_dict()["0.weight"].tolist()]


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_each_rank_loads_its_part_of_distributed_tensors(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    weight = write(tmp_path / "whole")["0.weight"].tolist()
    assert run_ranks(load_parts, str(tmp_path), str(tmp_path / "whole")) == [[*[True] * 18, weight]] * 2


def dispatch(folder: str, device_map: Any) -> list[Any]:
    from notebook_accelerate import PartialState

    PartialState(cpu=True)
    with init_empty_weights():
        model = net()
    model = load_checkpoint_and_dispatch(model, folder, device_map, broadcast_from_rank0=True, dtype=torch.float64)
    return [str(model[0].weight.dtype), model[0].weight.tolist()]


def test_dispatch_to_one_device_of_each_rank(tmp_path: Path) -> None:
    weight = write(tmp_path)["0.weight"].double().tolist()
    assert run_ranks(dispatch, str(tmp_path), {"": "cpu"}) == [["torch.float64", weight]] * 2
    with pytest.raises(RankError, match="must be on one device of each rank"):
        run_ranks(dispatch, str(tmp_path), {"0": "cpu", "1": "meta", "2": "cpu"})


def test_without_a_process_group_the_single_process_reads(tmp_path: Path) -> None:
    state = write(tmp_path)
    model = net()
    load_checkpoint_in_model(model, tmp_path, strict=True, broadcast_from_rank0=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(4, 9)), tmp_path, broadcast_from_rank0=True)
