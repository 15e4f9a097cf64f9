"""The training runs of `check_parity`: ``python -m tests.gpu.day.trainings PACKAGE`` prints all of them as JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch

from tests.support import gpu

CASES: dict[str, dict[str, Any]] = {
    "full precision": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "clip": 0.1},
    "fp16, accumulation and clipping": {"mixed_precision": "fp16", "gradient_accumulation_steps": 2, "clip": 0.1},
    "bf16, pinned and non-blocking loader": {"mixed_precision": "bf16", "pin": True},
    "fp16 that overflows": {"mixed_precision": "fp16", "overflow": True},
}
WIDTH = gpu.size(256, 16)


def train(
    package: str, *, clip: float | None = None, pin: bool = False, overflow: bool = False, **options: Any
) -> dict[str, Any]:
    """Train with a package. Return losses, skipped steps, scales, weights, a random number and peak memory."""
    if gpu.DRY and options.get("mixed_precision") == "fp16":
        del options["mixed_precision"]  # fp16 mixed precision requires a GPU.
    library, utils = import_module(package), import_module(f"{package}.utils")
    loading = utils.DataLoaderConfiguration(non_blocking=pin, use_seedable_sampler=True)
    accelerator = library.Accelerator(cpu=gpu.DRY, dataloader_config=loading, **options)
    utils.set_seed(7)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * WIDTH, WIDTH)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.TensorDataset(gpu.batch(1, gpu.size(512, 64), WIDTH))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, pin_memory=pin and not gpu.DRY)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if not gpu.DRY:
        torch.cuda.reset_peak_memory_stats()
    losses, skipped, scales = [], [], []
    for _ in range(2):
        for number, (batch,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                if overflow and number == 3:
                    loss = loss * 1e30
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            if accelerator.scaler is not None:
                skipped.append(accelerator.optimizer_step_was_skipped)
                scales.append(accelerator.scaler.get_scale())
    return {
        "losses": losses,
        "skipped": skipped,
        "scales": scales,
        "weights": [parameter.double().sum().item().hex() for parameter in model.parameters()],
        "rate": scheduler.get_last_lr(),
        "random": torch.rand(1, device=accelerator.device).item(),
        "peak": 0 if gpu.DRY else torch.cuda.max_memory_allocated(),
    }


def main(package: str) -> None:
    """Print the results of all cases as JSON."""
    state = import_module(f"{package}.state")
    found = {}
    for name, options in CASES.items():
        found[name] = train(package, **options)
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
