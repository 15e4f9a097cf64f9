"""Training with pytorch-accelerated, fastai and Lightning, and code written for torchrun."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.clients.programs.tiny import regression, shared_folder, weight_sums


def pytorch_accelerated_trainer() -> dict[str, Any]:
    """Train with the callbacks for the best model and the moving average of weights."""
    from pytorch_accelerated.callbacks import ModelEmaCallback, SaveBestModelCallback
    from pytorch_accelerated.trainer import DEFAULT_CALLBACKS, Trainer

    model, data = regression()
    folder = shared_folder()
    made = Trainer(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05),
        callbacks=(*DEFAULT_CALLBACKS, ModelEmaCallback(save_path=f"{folder}/ema.pt"),
                   SaveBestModelCallback(save_path=f"{folder}/best.pt")),
    )  # fmt: skip
    made.train(
        data, num_epochs=3, eval_dataset=data, per_device_batch_size=8, gradient_accumulation_steps=2,
        train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
    )  # fmt: skip
    history = made.run_history
    losses = [float(value) for value in history.get_metric_values("train_loss_epoch")]
    evaluated = [float(value) for value in history.get_metric_values("eval_loss_epoch")]
    return {"losses": losses, "evaluated": evaluated, "weights": weight_sums(made.get_model()), "steps": 6}


def fastai_learner() -> dict[str, Any]:
    """Train with ``distrib_ctx``. On the CPU, its loaders need another broadcast: fastai's own uses CUDA."""
    import random

    from accelerate.utils import broadcast_object_list
    from fastai.basics import DataLoaders, Learner
    from fastai.distributed import DistributedDL
    from fastai.losses import MSELossFlat
    from fastai.optimizer import SGD

    DistributedDL._broadcast = lambda _, indices, rank: broadcast_object_list([indices], rank)[0]
    random.seed(0)
    model, data = regression()
    loaders = DataLoaders.from_dsets(data, data, bs=8, device=torch.device("cpu"), num_workers=0)
    learner = Learner(loaders, model, loss_func=MSELossFlat(), opt_func=SGD, lr=0.05)
    with learner.distrib_ctx(sync_bn=False):
        learner.fit(2)
    losses = [float(value) for value in learner.recorder.losses]
    evaluated = [[float(value) for value in row] for row in learner.recorder.values]
    return {"losses": losses, "evaluated": evaluated, "weights": weight_sums(learner.model), "steps": 8}


def _lightning(strategy: Any, shard: Any = None, **options: Any) -> dict[str, Any]:
    """Train a module with Lightning."""
    import lightning

    network, data = regression()
    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def configure_model(self) -> None:
            if shard is not None:
                shard(self)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.network(inputs), targets)
            self.log("train_loss", loss, prog_bar=True)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid_loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    made = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, log_every_n_steps=1, logger=False,
        default_root_dir=tempfile.mkdtemp(dir=Path.cwd()), enable_checkpointing=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    made.fit(Module(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    found = {"losses": losses, "evaluated": made.callback_metrics["valid_loss"].item(), "world": made.world_size}
    return {**found, "weights": weight_sums(network), "steps": made.global_step}


def lightning_ddp() -> dict[str, Any]:
    """Train with ``strategy="ddp"``."""
    return _lightning("ddp")


def lightning_auto() -> dict[str, Any]:
    """Train with the strategy that Lightning chooses."""
    return _lightning("auto", accumulate_grad_batches=2)


def lightning_fsdp() -> dict[str, Any]:
    """Train with torch's ``fully_shard``, because Lightning's older FSDPStrategy accepts GPUs only."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(module: Any) -> None:
        fully_shard(module.network, mesh=module.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return _lightning(strategy, shard)


def _joined() -> tuple[int, int]:
    """Join the process group as code for torchrun does. Return the rank and the world size."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    assert int(os.environ["LOCAL_RANK"]) == torch.distributed.get_node_local_rank()
    return torch.distributed.get_rank(), int(os.environ["WORLD_SIZE"])


def _trained_by_hand(model: nn.Module, data: Any) -> dict[str, Any]:
    rank, world = _joined()
    sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / world)
    return {"losses": losses, "steps": len(losses)}


def torchrun_ddp() -> dict[str, Any]:
    """Train under DistributedDataParallel, set up by hand."""
    _joined()
    model, data = regression()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return {**_trained_by_hand(wrapped, data), "weights": weight_sums(model)}


def torchrun_fsdp1() -> dict[str, Any]:
    """Train under FullyShardedDataParallel, set up by hand."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    _joined()
    model, data = regression()
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    found = _trained_by_hand(wrapped, data)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return {**found, "weights": weight_sums(wrapped)}


def torchrun_fsdp2() -> dict[str, Any]:
    """Train with ``fully_shard``, set up by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _, world = _joined()
    model, data = regression()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {**_trained_by_hand(model, data), "weights": weight_sums(model)}
