"""Training on a TPU with torch_tpu. These tests have never run, because no machine of this project has a TPU."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate import notebook_launcher, shutdown
from notebook_accelerate.hardware import detect

here = detect()
pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(here.accelerator != "tpu", reason="not run: needs a TPU and torch_tpu"),
]


def _train() -> dict[str, Any]:
    import torch

    from notebook_accelerate import Accelerator
    from notebook_accelerate.utils import set_seed

    set_seed(3)
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    inputs = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(5):
        for rows, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(rows), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")))
    weight = accelerator.gather(accelerator.unwrap_model(model).weight.detach().float())
    return {"device": accelerator.device.type, "losses": losses, "weight": weight.cpu().tolist()}


@pytest.mark.parametrize("ranks", [1, None], ids=["one", "all"])
def test_ranks_train_and_agree(ranks: int | None) -> None:
    try:
        run: Any = notebook_launcher(_train, num_processes=ranks, start_method="auto", block=True, timeout=1200)
        found = run.results
    finally:
        shutdown()
    assert len(found) == (ranks or here.count)
    for each in found:
        assert each["device"] == "tpu"
        assert each["losses"][-1] < each["losses"][0]
        assert each["weight"] == found[0]["weight"]
    rows = found[0]["weight"]
    assert all(row == rows[0] for row in rows), "all ranks must hold the same weights"


def _restore() -> bool:
    import torch

    from notebook_accelerate.checkpointing import state_files

    state = state_files.rng_state("tpu")
    drawn = torch.rand(4, device="tpu").cpu()
    state_files.restore_rng_state(state, "tpu")
    return torch.equal(drawn, torch.rand(4, device="tpu").cpu())


def test_the_state_of_the_generator_is_restored() -> None:
    try:
        run: Any = notebook_launcher(_restore, num_processes=1, timeout=1200)
        assert run.results == (True,)
    finally:
        shutdown()
