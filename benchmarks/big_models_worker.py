"""A process that measures big models on command: ``python -m benchmarks.big_models_worker PACKAGE FOLDER``.

The process reads one command per line from standard input, and answers each with a line of JSON, in seconds and bytes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, BLOCKS, TOKENS = 1024, 30, 32
"""The width, the number of blocks (30 of 33.6 MB each, which make 1 GB), and the tokens in a forward pass."""
SHARDS = 20


class Block(nn.Module):
    """Two linear layers with a residual connection, whose hidden layer is four times as wide."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """A stack of blocks."""

    def __init__(self, count: int = BLOCKS) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for block in self.h:
            x = block(x)
        return x


class Worker:
    """The measurements, one method per command.

    Args:
        package: The package to measure: notebook_accelerate or accelerate.
        folder: A folder for files that both packages read.
    """

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = import_module(package), folder
        self._hooks = import_module(f"{package}.hooks")
        self._utils = import_module(f"{package}.utils")
        self._model: Any = None

    def small(self, how: str) -> float:
        """Return how many seconds hooks add to a forward pass of 100 small layers."""
        model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)]).eval(), torch.randn(2, 8)
        plain = _median(lambda: model(x), 30)
        if how == "align":
            self._hooks.attach_align_device_hook(model, execution_device=torch.device("cpu"))
        else:
            self._package.cpu_offload(model)
        return _median(lambda: model(x), 30) - plain

    def compute(self) -> float:
        """Write the 1 GB model to disk, and return the seconds of a forward pass of the model in memory."""
        model, x = self._filled(), torch.randn(TOKENS, WIDTH)
        seconds = _median(lambda: model(x), 5)
        self._package.disk_offload(model, self._folder / "offloaded")
        return seconds

    def read(self) -> float:
        """Return how many seconds it takes to read all files of the offloaded model into one buffer."""
        buffer = bytearray(4 * WIDTH * WIDTH * 4)
        begin = time.perf_counter()
        for path in sorted((self._folder / "offloaded").glob("*.dat")):
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)
        return time.perf_counter() - begin

    def disk(self) -> float:
        """Return how many seconds a forward pass takes with the 1 GB model offloaded to disk."""
        x = torch.randn(TOKENS, WIDTH)
        if self._model is None:
            with self._package.init_empty_weights():
                self._model = Blocks().eval()
            self._package.disk_offload(self._model, self._folder / "offloaded", execution_device=torch.device("cpu"))
            _median(lambda: self._model(x), 2)
        return _median(lambda: self._model(x), 1)

    def gpu_compute(self) -> float:
        """Return how many seconds a forward pass takes with the 1 GB model completely on the GPU."""
        model, x = self._filled().to("cuda"), torch.randn(TOKENS, WIDTH, device="cuda")
        return _median(lambda: _on_gpu(model, x), 10)

    def gpu_transfer(self) -> float:
        """Return how many seconds it takes to copy the 1 GB model's weights from pinned memory to the GPU."""
        weights = [parameter.detach().pin_memory() for parameter in self._filled().parameters()]
        places = [torch.empty_like(weight, device="cuda") for weight in weights]

        def copy() -> None:
            for place, weight in zip(places, weights, strict=True):
                place.copy_(weight, non_blocking=True)
            torch.cuda.synchronize()

        return _median(copy, 10)

    def gpu(self) -> float:
        """Return how many seconds a forward pass takes on the GPU, with the 1 GB model offloaded to CPU memory."""
        x = torch.randn(TOKENS, WIDTH, device="cuda")
        if self._model is None:
            self._model = self._package.cpu_offload(self._filled(), torch.device("cuda", 0))
            _median(lambda: _on_gpu(self._model, x), 2)
        return _median(lambda: _on_gpu(self._model, x), 1)

    def map(self, layout: str) -> dict[str, float]:
        """Return how many seconds a device map for 128,000 modules and one traversal of the modules take."""
        with torch.device("meta"):
            model = _flat(128_000) if layout == "flat" else nn.ModuleList([_flat(31) for _ in range(4000)])
        total = 40 * 128_000
        limits = dict.fromkeys(range(8), total // 9) | {"cpu": 2 * total}
        walk = _seconds(lambda: sum(1 for _ in model.named_modules()))
        return {"walk": walk, "map": _seconds(lambda: self._utils.infer_auto_device_map(model, limits))}

    def load(self) -> dict[str, float]:
        """Return the seconds and the added peak memory of loading 2 GB in 20 shards. Each process can do this once."""
        import_module("safetensors.torch")
        with self._package.init_empty_weights():
            model = Blocks(2 * BLOCKS)
        before = _peak()
        path = self._folder / "shards"
        seconds = _seconds(lambda: self._package.load_checkpoint_and_dispatch(model, path, device_map={"": "cpu"}))
        return {"seconds": seconds, "peak": _peak() - before}

    def shards(self) -> int:
        """Write a 2 GB model in 20 shards."""
        from safetensors.torch import save_file

        folder = self._folder / "shards"
        folder.mkdir()
        state = _fill(Blocks(2 * BLOCKS)).state_dict()
        names, per = list(state), -(-len(state) // SHARDS)
        weight_map = {}
        for number in range(SHARDS):
            file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
            part = {name: state[name] for name in names[number * per : (number + 1) * per]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return len(weight_map)

    @staticmethod
    def _filled() -> nn.Module:
        return _fill(Blocks()).eval()


def _fill(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.fill_(1e-3)
    return model


def _on_gpu(model: nn.Module, x: torch.Tensor) -> None:
    model(x)
    torch.cuda.synchronize()


def _flat(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(10, 1, bias=False) for _ in range(count)])


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _median(action: Callable[[], object], times: int) -> float:
    with torch.no_grad():
        return statistics.median(_seconds(action) for _ in range(times))


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def main(package: str, folder: str) -> None:
    """Answer commands until the end of input."""
    torch.set_num_threads(1)
    worker = Worker(package, Path(folder))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # Libraries may print, so keep their output separate from the answers.
        for line in sys.stdin:
            name, *arguments = line.split()
            print(json.dumps(getattr(worker, name)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
