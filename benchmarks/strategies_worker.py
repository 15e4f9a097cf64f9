"""A rank that trains on command: ``python -m benchmarks.strategies_worker SIDE STRATEGY BLOCKS``.

SIDE is ``plain`` (torch or DeepSpeed alone), ``notebook_accelerate`` or ``accelerate``. Every rank reads the same
commands from standard input, one per line, and answers each with a line of JSON, in seconds and bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.parity.checkpoints.sharded import insist_on_sharding

WORDS, LENGTH, WIDTH, BLOCKS, BATCH, HEADS = 512, 64, 256, 4, 2, 4
"""The shape of the model. It has 3.4 million parameters, and a step on 128 words takes about 30 ms on an idle core."""
CLIP = 1.0
KINDS = {"ddp": "DistributedDataParallel", "fsdp": "FSDP", "zero": "DeepSpeedEngine"}
"""The class of the prepared model, by strategy. If a package ignored its plugin, another strategy would be measured."""


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this block."""
        normed = self.before(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        result: torch.Tensor = hidden + self.perceptron(self.between(hidden))
        return result


class Transformer(nn.Module):
    """An embedding, transformer blocks and an output layer.

    Args:
        blocks: The number of transformer blocks.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each position."""
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def parts(blocks: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    """Return a model, its optimizer and schedule, and a loader that reads the samples of all ranks."""
    torch.manual_seed(0)
    model = Transformer(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    words = torch.randint(0, WORDS, (400 * BATCH, LENGTH + 1))
    data = TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())
    return model, optimizer, schedule, DataLoader(data, batch_size=BATCH, shuffle=True)


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def cycle(loader: Any) -> Iterator[Any]:
    """Yield batches forever."""
    while True:
        yield from loader


def zero_config(stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a ZeRO stage."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }


# ---- without a library


class Plain:
    """Training code in plain torch, or with DeepSpeed's own engine."""

    def __init__(self, strategy: str, blocks: int) -> None:
        self.engine: Any = None
        if strategy.startswith("zero"):
            self._set_up_deepspeed(int(strategy[-1]), blocks)
        else:
            self._set_up_torch(strategy, blocks)

    def _set_up_torch(self, strategy: str, blocks: int) -> None:
        dist.init_process_group("gloo")
        self.before = resident()
        model, optimizer, _, loader = parts(blocks)
        self.model: Any = nn.parallel.DistributedDataParallel(model) if strategy == "ddp" else sharded(model)
        if strategy != "ddp":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.optimizer = optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.batches = cycle(DataLoader(loader.dataset, batch_size=BATCH, sampler=DistributedSampler(loader.dataset)))

    def _set_up_deepspeed(self, stage: int, blocks: int) -> None:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        deepspeed.init_distributed("gloo")
        self.before = resident()
        model, optimizer, schedule, loader = parts(blocks)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=zero_config(stage)
        )
        self.model = self.engine
        self.batches = cycle(DataLoader(loader.dataset, batch_size=BATCH, sampler=DistributedSampler(loader.dataset)))

    def step(self) -> None:
        """Train on one batch."""
        words, targets = next(self.batches)
        loss = loss_of(self.model(words), targets)
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
            return
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def sharded(model: nn.Module) -> nn.Module:
    """Shard each block of a model, and then the rest, with torch's FSDP 2. Return the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model


# ---- through an Accelerator


class Prepared:
    """Training code that uses a package as its documentation recommends."""

    def __init__(self, package: str, strategy: str, blocks: int) -> None:
        plugins = _plugins(import_module(f"{package}.utils"), strategy)
        if package == "accelerate" and strategy == "fsdp2":
            insist_on_sharding(plugins["fsdp_plugin"])
        self.accelerator = import_module(package).Accelerator(**plugins)
        self.before = resident()
        prepared = self.accelerator.prepare(*parts(blocks))
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.batches = cycle(self.loader)

    def step(self) -> None:
        """Train on one batch."""
        words, targets = next(self.batches)
        loss = loss_of(self.model(words), targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def _plugins(utils: Any, strategy: str) -> dict[str, Any]:
    if strategy.startswith("zero"):
        return {"deepspeed_plugin": utils.DeepSpeedPlugin(hf_ds_config=zero_config(int(strategy[-1])))}
    if strategy == "ddp":
        return {"cpu": True}
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    return {"cpu": True, "fsdp_plugin": plugin}


# ---- commands


class Worker:
    """The measurements, one method per command.

    Args:
        side: `plain` or the name of a package.
        strategy: `ddp`, `fsdp2`, `zero2` or `zero3`.
        blocks: The number of blocks of the model.
    """

    def __init__(self, side: str, strategy: str, blocks: int) -> None:
        self.training: Any = Plain(strategy, blocks) if side == "plain" else Prepared(side, strategy, blocks)
        kind = type(self.training.model).__name__
        assert kind.startswith(KINDS[strategy.rstrip("23")]), f"{side} prepared a {kind} for {strategy}"

    def steps(self, count: str) -> dict[str, float]:
        """Run `count` steps. Return the wall seconds and the CPU seconds of one step."""
        dist.barrier()
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(int(count)):
            self.training.step()
        taken = time.perf_counter() - clock, time.process_time() - processor
        return {"clock": taken[0] / int(count), "processor": taken[1] / int(count)}

    def memory(self, count: str) -> int:
        """Run `count` steps. Return this rank's peak memory, without its memory before the model was created."""
        Path("/proc/self/clear_refs").write_text("5")  # This resets the peak.
        for _ in range(int(count)):
            self.training.step()
        return resident("VmHWM") - int(self.training.before)

    def save(self, folder: str, blocking: str) -> dict[str, float]:
        """Save the state. Return how many seconds the call takes, alone and with the slowdown of the next two steps."""
        options = {} if blocking == "yes" else {"blocking": False}
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        usual = min(self._timed(self.training.step) for _ in range(3))
        dist.barrier()
        call = self._timed(lambda: self.training.accelerator.save_state(folder, **options))
        longer = sum(self._timed(self.training.step) - usual for _ in range(2))
        if options:
            import_module("notebook_accelerate.checkpointing").wait_for_saves()
        return {"call": call, "stall": call + (longer if options else 0.0)}

    def load(self, folder: str) -> float:
        """Load the state. Return the duration of the call in seconds."""
        dist.barrier()
        return self._timed(lambda: self.training.accelerator.load_state(folder))

    @staticmethod
    def _timed(action: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin


def resident(field: str = "VmRSS") -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main(side: str, strategy: str, blocks: str) -> None:
    """Answer commands until the input ends. Answers begin with "= ", because libraries may print other lines."""
    torch.set_num_threads(1)
    worker = Worker(side, strategy, int(blocks))
    print("= ready", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        print(f"= {json.dumps(getattr(worker, name)(*arguments))}", flush=True)
    os._exit(0)  # The other ranks also exit, so no process waits for the group.


if __name__ == "__main__":
    main(*sys.argv[1:])
