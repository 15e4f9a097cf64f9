"""With FSDP 2, training and checkpoints of models with 4-bit weights and adapters equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.support.ranks import run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")

SIZE = 64


class Adapted(nn.Module):
    """A frozen 4-bit layer with a low-rank adapter that is trained."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        kind = {"quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": storage}
        self.base = bitsandbytes.nn.Linear4bit(SIZE, SIZE, bias=False, **kind)
        self.down, self.up = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, SIZE, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tanh(self.base(values) + self.up(self.down(values)))


def net(storage: torch.dtype, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(storage), Adapted(storage)).to("cpu")  # The move quantizes the weights.


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in steps:
        data = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        model.train()
        loss = model(data).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()  # Evaluate too, because bitsandbytes may have other CPU kernels for evaluation.
        with torch.no_grad():
            model(data)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def trained_whole() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = net(torch.uint8)
    for layer in model:
        layer.base.support_avx512bf16_for_cpu = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return train(accelerator, *accelerator.prepare(model, optimizer), range(6))


def trained_sharded(folder: str, storage: torch.dtype, efficient: bool) -> tuple[Any, ...]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Adapted"],
        cpu_ram_efficient_loading=efficient,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)

    def prepared() -> tuple[Any, Any]:
        model = net(storage, seed=3 if accelerator.is_main_process else 4)  # All ranks must train rank 0's weights.
        return accelerator.prepare(  # type: ignore[no-any-return]
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        )

    model, optimizer = prepared()
    bytes_here = sum(p.to_local().numel() for p in model.parameters() if p.dtype == torch.uint8)
    losses = train(accelerator, model, optimizer, range(4))
    accelerator.save_state(folder)
    rest = train(accelerator, model, optimizer, range(4, 6))
    accelerator.free_memory()
    model, optimizer = prepared()
    accelerator.load_state(folder)
    return losses + rest, rest, train(accelerator, model, optimizer, range(4, 6)), bytes_here


@pytest.mark.parametrize(
    ("storage", "efficient"),
    [(torch.uint8, False), pytest.param(torch.bfloat16, False, marks=pytest.mark.nightly), (torch.uint8, True)],
)
def test_four_bit_weights_are_sharded_and_adapters_are_trained(
    storage: torch.dtype, efficient: bool, tmp_path: Any
) -> None:
    whole = run_ranks(trained_whole, world_size=1)[0]
    for losses, rest, resumed, bytes_here in run_ranks(trained_sharded, str(tmp_path / "saved"), storage, efficient):
        assert losses == pytest.approx(whole, rel=1e-4)
        assert resumed == pytest.approx(rest, rel=1e-6)
        assert bytes_here == 2 * SIZE * SIZE // 2 // 2  # There are two layers, two values per byte, and two ranks.
