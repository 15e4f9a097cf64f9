"""Pipelines on two and three ranks return the same outputs as the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    prepare_pippy,
)
from notebook_accelerate.inference import build_pipeline, pippy_forward
from tests.support.ranks import RankError, run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.second(nn.functional.gelu(self.first(hidden)))
        return hidden + inner


class Model(nn.Module):
    """A model with tied weights, a mask that only the last part uses, an input without rows, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if shift is not None:
            hidden = hidden + shift
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"logits": self.head(hidden) * scale, "more": (hidden, None)}


def made() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def batch(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(rows)
    mask = torch.randint(0, 2, (rows, 7)).float()
    return (torch.randint(0, 50, (rows, 7)),), {"mask": mask, "shift": torch.arange(16.0), "scale": 2.0}


def compare(points: Any, gather_output: bool, whole: list[str] | None) -> Any:
    state = PartialState()
    args, kwargs = batch(2)
    model = prepare_pippy(
        made(), points, whole, example_args=args, example_kwargs=kwargs, num_chunks=3, gather_output=gather_output
    )
    for rows in (1, 2, 5, 6, 7, 13):
        args, kwargs = batch(rows)
        outputs = model(*args, **kwargs) if state.is_main_process or rows % 2 else model()
        if not (gather_output or state.is_last_process):
            assert outputs is None
            continue
        expected = made()(*args, **kwargs)
        assert list(outputs) == ["logits", "more"]
        assert outputs["more"][1] is None
        torch.testing.assert_close(outputs["logits"], expected["logits"])
        torch.testing.assert_close(outputs["more"][0], expected["more"][0])
    return model.hf_split_points


@pytest.mark.parametrize("gather_output", [False, True])
def test_two_ranks_return_the_outputs_of_the_whole_model(gather_output: bool) -> None:
    points, _ = run_ranks(compare, ["blocks.2"], gather_output, None)
    assert points == ["blocks.2"]


def built() -> Any:
    args, kwargs = batch(2)
    stage = build_pipeline(made(), ["blocks.2"], args, kwargs, 2)
    args, kwargs = batch(5)
    outputs = pippy_forward(stage, 2, True, *args, **kwargs)
    torch.testing.assert_close(outputs["logits"], made()(*args, **kwargs)["logits"])


def test_a_pipeline_built_by_hand_returns_the_outputs_of_the_whole_model() -> None:
    run_ranks(built)


def two_pipelines() -> dict[str, Any]:
    """Run two pipelines of two ranks each, which read different batches."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2, dp_replicate_size=2))
    rows: Any = torch.arange(28).reshape(4, 7)
    loader = accelerator.prepare(DataLoader(rows, batch_size=1))
    model = prepare_pippy(made(), example_args=(torch.zeros(1, 7, dtype=torch.long),), gather_output=True)
    seen = []
    for tokens in loader:
        seen.append(tokens.tolist())
        torch.testing.assert_close(model(tokens)["logits"], made()(tokens)["logits"])
    return {
        "seen": seen,
        "place": accelerator.pipeline_parallel_rank,
        "names": accelerator.torch_device_mesh.mesh_dim_names,
    }


def test_replicas_of_a_pipeline_read_different_batches() -> None:
    found = run_ranks(two_pipelines, world_size=4)
    rows = torch.arange(28).reshape(4, 1, 7).tolist()
    assert [rank["place"] for rank in found] == [0, 0, 1, 1]
    assert found[0]["names"] == ("pp", "dp_replicate")
    for rank, each in enumerate(found):
        assert each["seen"] == rows[rank % 2 :: 2]


def trained() -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model = made()
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def sharded() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    Accelerator(parallelism_config=ParallelismConfig(pp_size=2), fsdp_plugin=plugin)


def test_pipelines_cannot_be_trained() -> None:
    with pytest.raises(RankError, match=r"for inference only .* SGD cannot be .*MegatronLMPlugin\(pp_degree=2\)"):
        run_ranks(trained)
    with pytest.raises(RankError, match=r"pp_size=2 is for prepare_pippy, and fsdp_plugin contradicts"):
        run_ranks(sharded)


def test_three_ranks_get_balanced_parts() -> None:
    points, *_ = run_ranks(compare, "auto", True, ["Block"], world_size=3)
    assert len(points) == 2
    assert all(point.startswith("blocks.") and point.count(".") == 1 for point in points)


def test_parts_may_start_inside_a_block() -> None:
    points, _ = run_ranks(compare, "auto", False, [])
    assert points[0].count(".") == 2


def refused(reason: str) -> None:
    args, kwargs = batch(2)
    if reason == "unknown":
        prepare_pippy(made(), ["blocks.9"], example_args=args)
    elif reason == "many":
        prepare_pippy(made(), ["blocks.1", "blocks.2"], example_args=args)
    elif reason == "rows":
        prepare_pippy(made(), example_kwargs={"scale": 1.0})
    elif reason == "few":
        prepare_pippy(nn.Sequential(nn.Linear(2, 2)), example_args=(torch.ones(1, 2),))
    elif reason == "scalar":
        prepare_pippy(nn.Sequential(nn.Linear(2, 2), Mean()), example_args=(torch.ones(1, 2),))
    else:
        prepare_pippy(made(), example_args=args, example_kwargs=kwargs)(*args, **{**kwargs, "scale": 3.0})


class Mean(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("unknown", r"has no module blocks\.9"),
        ("many", "make 3 parts, but there are 2 ranks"),
        ("rows", "no tensor with a batch dimension"),
        ("few", "has 1 parts that it calls .*, but there are 2 ranks"),
        ("scalar", r"returns a tensor of shape \[\] for 1 rows"),
        ("other", r"traced with model\(<tensor>, mask=<tensor>, .*scale=2\.0\), .* scale=3\.0\)"),
    ],
)
def test_invalid_input_is_refused(reason: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, reason)
