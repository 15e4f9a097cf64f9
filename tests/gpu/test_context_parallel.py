"""Context parallel attention, which torch supports only on CUDA devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from notebook_accelerate import Accelerator, ParallelismConfig
from notebook_accelerate.utils import TorchContextParallelConfig
from tests.support import gpu
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, gpu.two_devices]
WORDS, LENGTH, WIDTH, HEADS = 32, 64, 64, 2


class Attending(nn.Module):
    """A layer of causal attention over words, with position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each position."""
        mixed = self.into(self.words(words) + self.places(places))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in mixed.chunk(3, -1))
        # On the CPU, torch has no attention over split sequences, so a dry run leaves attention out.
        attended = value
        if not gpu.DRY:
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return scores


def made(seed: int = 0) -> tuple[Attending, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Attending()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def batches() -> list[torch.Tensor]:
    return list(torch.randint(0, WORDS, (5, 2, LENGTH + 1), generator=torch.Generator().manual_seed(1)))


def plain() -> list[float]:
    model, optimizer = made()
    losses = []
    for words in batches():
        scores = model(words[:, :-1], torch.arange(LENGTH))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def split(how: str, degrees: dict[str, Any]) -> list[float]:
    handler = TorchContextParallelConfig(cp_comm_strategy=how)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_handler=handler, **degrees))
    device = accelerator.device
    model, optimizer = accelerator.prepare(*made(accelerator.process_index))
    losses = []
    for words in batches():
        inputs, targets = words[:, :-1].clone().to(device), words[:, 1:].clone().to(device)
        places = torch.arange(LENGTH, device=device)
        buffers = [inputs, targets, places]
        shared = accelerator.maybe_context_parallel(buffers, [1, 1, 0], set(buffers))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), shared:
            scores = model(inputs, places)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


@pytest.mark.parametrize("how", ["allgather", "alltoall"])
def test_losses_equal_a_training_on_whole_sequences(how: str) -> None:
    for losses in run_ranks(split, how, {"cp_size": 2}, env=gpu.rank_environment()):
        assert losses == pytest.approx(plain(), rel=1e-3)


@gpu.four_devices
def test_shards_of_split_sequences_have_the_same_losses() -> None:
    # Both shards read the same batches here, so the mean of their losses equals either loss.
    degrees = {"dp_shard_size": 2, "cp_size": 2}
    for losses in run_ranks(split, "allgather", degrees, world_size=4, env=gpu.rank_environment()):
        assert losses == pytest.approx(plain(), rel=1e-3)
