"""Models whose layers are split across ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, ParallelismConfig
from notebook_accelerate.utils import TorchTensorParallelPlugin
from tests.parity.strategies.scripts import Case, accelerated, held
from tests.support.ranks import RankError, run_ranks


class Tied(nn.Module):
    """An embedding and a head that share one parameter, which is split along the vocabulary."""

    def __init__(self, head: str = "colwise_rep") -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.tp_plan = {"embed": "embedding_rowwise", "head": head, "up": "colwise", "down": "rowwise"}

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        scores: torch.Tensor = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return scores


def train(model: Any, optimizer: Any, accelerator: Accelerator | None = None) -> list[float]:
    words = torch.arange(16).reshape(4, 4)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flip(1).flatten())
        (accelerator.backward if accelerator else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def split(plugin: bool) -> dict[str, Any]:
    how: dict[str, Any] = (
        {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}
        if plugin
        else {"parallelism_config": ParallelismConfig(tp_size=2)}
    )
    accelerator = Accelerator(**how)
    raw = made(accelerator.process_index)
    optimizer = torch.optim.Adam(raw.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(raw, optimizer)
    return {
        "losses": train(model, optimizer, accelerator),
        "elements": {name: held(parameter) for name, parameter in model.named_parameters()},
        "tied": model.head.weight is model.embed.weight,
        "kind": accelerator.distributed_type.value,
        "rank": accelerator.tensor_parallel_rank,
        "weights": accelerator.get_state_dict(model),
    }


@pytest.mark.parametrize("plugin", [False, True])
def test_tied_weights_are_split_once(plugin: bool) -> None:
    model = made()
    expected = train(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    results = run_ranks(split, plugin)
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
        assert found["tied"]
        assert (found["rank"], found["kind"]) == (rank, "MULTI_CPU")
        assert found["elements"] == {
            "embed.weight": 64,
            "up.weight": 128,
            "up.bias": 16,
            "down.weight": 128,
            "down.bias": 8,
        }
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(results[0]["weights"][name], weight)


def split_while_loading(size: int) -> list[bool]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model: Any = made()
    model.tp_size = size  # transformers marks models that it has split in this way.
    before = [id(parameter) for parameter in model.parameters()]
    model = accelerator.prepare(model)
    return [id(parameter) == old for parameter, old in zip(model.parameters(), before, strict=True)]


def test_layers_that_were_split_during_loading_are_left_alone() -> None:
    assert all(all(found) for found in run_ranks(split_while_loading, 2))
    with pytest.raises(RankError, match="was loaded with tp_size=4, but this Accelerator has tp_size=2"):
        run_ranks(split_while_loading, 4)


def test_checkpoints_load_into_fsdp_and_back(tmp_path: Path) -> None:
    first = {"degrees": {"tp_size": 2}}
    second = {"fsdp": {"fsdp_version": 2}}
    (whole, _), half = run_ranks(accelerated, Case(**first, steps=10)), 5
    for saver, loader in ((first, second), (second, first), (first, first)):
        folder = tmp_path / f"{sorted(saver)}{sorted(loader)}"
        run_ranks(accelerated, Case(**saver, steps=half), str(folder))  # type: ignore[arg-type]
        case = Case(**loader, first=half, steps=half)  # type: ignore[arg-type]
        resumed = run_ranks(accelerated, case, None, str(folder))[0]
        assert resumed["losses"] == pytest.approx(whole["losses"][half:], rel=1e-5)


def refused(reason: str) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = made()
    if reason == "none":
        del model.tp_plan
    elif reason == "module":
        model.tp_plan["sideways"] = "colwise"
    elif reason == "style":
        model.tp_plan["up"] = "diagonal"
    elif reason == "tied":
        del model.tp_plan["head"]
    else:
        model.up = nn.Linear(9, 33)
    accelerator.prepare(model)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("none", r"needs a plan .* Tied, .*model\.tp_plan = "),
        ("module", "names 'sideways', but Tied has no such module"),
        ("style", r"splits 'up' by 'diagonal', which is not known; styles: colwise, rowwise"),
        ("tied", r"are one parameter, but the plan splits them in different ways"),
        ("odd", r"up of shape \[33, 9\] cannot be split across tp_size=2"),
    ],
)
def test_invalid_plans_are_refused(reason: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, reason)
