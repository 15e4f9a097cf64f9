"""Sequences split across ranks, for models without attention, because torch cannot split attention on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, ParallelismConfig
from tests.parity.strategies.scripts import held
from tests.support.ranks import RankError, run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 20))


def batches() -> list[torch.Tensor]:
    return list(torch.randint(0, 20, (4, 2, 9), generator=torch.Generator().manual_seed(1)))


def plain() -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for words in batches():
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def split(how: str) -> dict[str, Any]:
    from notebook_accelerate.utils import TorchContextParallelConfig

    handler = TorchContextParallelConfig(cp_comm_strategy=how)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2, cp_handler=handler))
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses, seen = [], []
    for words in batches():
        inputs, targets = words[:, :-1].clone(), words[:, 1:].clone()
        with accelerator.maybe_context_parallel([inputs, targets], [1, 1], {targets}):
            seen.append(inputs.tolist())
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
        assert torch.equal(inputs, words[:, :-1])
        assert targets.shape == (2, 4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "seen": seen, "rank": accelerator.context_parallel_rank, "fsdp": accelerator.is_fsdp2}


@pytest.mark.parametrize("how", ["allgather", "alltoall"])
def test_losses_equal_a_training_on_whole_sequences(how: str) -> None:
    results = run_ranks(split, how)
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(plain(), rel=1e-5)
        assert (found["rank"], found["fsdp"]) == (rank, True)
    # Of the four pieces, each rank has one from the front half, and one from the back half.
    first = batches()[0][:, :-1]
    assert results[0]["seen"][0] == torch.cat([first[:, :2], first[:, 6:]], 1).tolist()
    assert results[1]["seen"][0] == first[:, 2:6].tolist()


def accumulated(precision: str) -> dict[str, Any]:
    """Accumulate two batches per step, and count the reductions in each batch."""
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(cp_size=2)
    )
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses, scattered, dtypes = [], [], set()
    for words in batches():
        inputs, targets = words[:, :-1].clone(), words[:, 1:].clone()
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel([inputs, targets], [1, 1], {inputs, targets}),
        ):
            scores = model(inputs)
            dtypes |= {str(scores.dtype), *(str(parameter.dtype) for parameter in model.parameters())}
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
            with CommDebugMode() as counted:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        counts = counted.get_comm_counts().items()
        scattered.append(sum(count for name, count in counts if "reduce_scatter" in str(name)))
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "scattered": scattered, "dtypes": sorted(dtypes)}


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 1e-2)])
def test_batches_are_accumulated(precision: str, tolerance: float) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for index, words in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            scores = model(words[:, :-1])
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), words[:, 1:].flatten())
        (loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    for found in run_ranks(accumulated, precision):
        assert found["losses"] == pytest.approx(expected, rel=tolerance)
        first, second, third, fourth = found["scattered"]
        assert first == third == 0
        assert second == fourth > 0
        assert found["dtypes"] == ["torch.float32"], "weights and outputs must stay in float32"


def sharded_and_split(folder: str | None, goes_on: bool) -> dict[str, Any]:
    """Train two shards on different batches, each split across two ranks. Save halfway, or resume from there."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2))
    model = net()
    for parameter in model.parameters():
        parameter.data += accelerator.process_index  # `prepare` must make all ranks start with equal weights.
    words = torch.stack(batches()).flatten(0, 1)
    loader = DataLoader(TensorDataset(words), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05), loader)
    if goes_on:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 2)
    losses, norms, seen = [], [], []
    for index, (own,) in enumerate(loader):
        if folder is not None and not goes_on and index == 2:
            accelerator.save_state(folder)
        inputs, targets = own[:, :-1].clone(), own[:, 1:].clone()
        seen.append(own.tolist())
        with accelerator.maybe_context_parallel([inputs, targets], [1, 1], {inputs, targets}):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    mesh = accelerator.torch_device_mesh
    return {
        "losses": losses,
        "norms": norms,
        "seen": seen,
        "place": (accelerator.data_parallel_shard_rank, accelerator.context_parallel_rank),
        "names": mesh.mesh_dim_names,
        "elements": sum(held(parameter) for parameter in model.parameters()),
        "weights": accelerator.get_state_dict(model),
    }


def test_shards_and_split_sequences_combine_on_four_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    results = run_ranks(sharded_and_split, folder, False, world_size=4)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses, norms = [], []
    for words in batches():
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = sum(parameter.numel() for parameter in model.parameters())
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        assert found["names"] == ("dp_shard", "cp")
        assert found["place"] == divmod(rank, 2)
        # The ranks of a pair see the same batches.
        assert found["seen"] == [[words[rank // 2].tolist()] for words in batches()]
        assert found["elements"] <= whole / 4 + 32  # Shards span both dimensions; odd rows are padded.
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(results[0]["weights"][name], weight)
    resumed = run_ranks(sharded_and_split, folder, True, world_size=4)[0]
    assert resumed["losses"] == results[0]["losses"][2:]


class Attention(nn.Module):
    def forward(self, hidden: torch.Tensor, attention_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
        assert attention_mask is None
        assert is_causal
        return hidden


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.linear = nn.Linear(2, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = self.self_attn(hidden, attention_mask=torch.ones(2, 2), is_causal=False)
        projected: torch.Tensor = self.linear(attended)
        return projected


def masked() -> tuple[int, ...]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    return tuple(accelerator.prepare(Layer())(torch.ones(3, 2)).shape)


def test_masks_are_dropped() -> None:
    assert run_ranks(masked) == [(3, 2), (3, 2)]


class Config:
    """A configuration like those of transformers' models."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def get_text_config(self) -> Any:
        return self.__dict__.get("text_config", self)


def configured(config: Any) -> str | None:
    model: Any = Layer()
    model.config = config
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    try:
        accelerator.prepare(model)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Config(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (Config(layer_types=["chunked_attention", "linear_attention"]), "chunked_attention, linear_attention"),
        (Config(sliding_window=4), "sliding_attention"),
        (Config(attention_chunk_size=4), "chunked_attention"),
        (Config(text_config=Config(layer_types=["linear_attention"])), "linear_attention"),
        (Config(layer_types=["full_attention"], sliding_window=4), None),
        (Config(sliding_window=None), None),
    ],
    ids=lambda value: str(getattr(value, "__dict__", value)),
)
def test_layers_with_another_mask_are_refused(config: Config, kinds: str | None) -> None:
    for message in run_ranks(configured, config):
        assert message is None if kinds is None else f"Layer has layers of the kind {kinds}, whose mask" in message


def refused(reason: str) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    buffers, dims, kept = [torch.ones(2, 6)], [1], set()
    if reason == "count":
        dims = [1, 1]
    elif reason == "stranger":
        buffers, kept = [torch.ones(2, 8)], {torch.ones(2, 8)}
    with accelerator.maybe_context_parallel(buffers, dims, kept):
        pass


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("length", r"shape \[2, 6\] cannot be split along buffer_seq_dims=1: .* multiple of 4, twice cp_size"),
        ("count", "was given 1 buffers and 2 buffer_seq_dims"),
        ("stranger", "not in buffers"),
    ],
)
def test_invalid_buffers_are_refused(reason: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, reason)


def alone() -> int:
    accelerator = Accelerator()
    buffer = torch.ones(2, 3)
    with accelerator.maybe_context_parallel([buffer], [1]):
        return buffer.numel()


def test_without_the_dimension_nothing_is_split() -> None:
    assert run_ranks(alone) == [6, 6]
