"""The libraries that report to a run, and the modules whose import connects them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from notebook_accelerate.integrations.import_hooks import when_imported
from notebook_accelerate.telemetry import step_sources

_HERE = "notebook_accelerate.integrations.reporting"

_CONNECTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "accelerate": (("accelerate.accelerator", "real_accelerate", "connect"),),
    "lightning": (
        ("lightning.pytorch.trainer.trainer", "lightning_trainer", "connect"),
        ("pytorch_lightning.trainer.trainer", "lightning_trainer", "connect"),
    ),
    "mlflow": (("mlflow.tracking.client", "scalar_writers", "connect_mlflow"),),
    "pytorch_accelerated": (("pytorch_accelerated.tracking", "pytorch_accelerated_trainer", "connect"),),
    "rich": (("rich.progress", "progress_bars", "connect_rich"),),
    "tensorboard": (
        ("torch.utils.tensorboard.writer", "scalar_writers", "connect_tensorboard"),
        ("tensorboardX.writer", "scalar_writers", "connect_tensorboard"),
    ),
    "torch": (("torch.optim.optimizer", "torch_steps", "connect"),),
    "tqdm": (("tqdm.std", "progress_bars", "connect_tqdm"),),
    "transformers": (("transformers.trainer", "transformers_trainer", "connect"),),
    "wandb": (("wandb.sdk.wandb_run", "scalar_writers", "connect_wandb"),),
}
"""By source: the module that is waited for, the module here, and its function."""

_connected: set[str] = set()
"""Sources connected in this process; a forked rank may inherit some."""


def install(sources: Iterable[str]) -> None:
    """Connect libraries to this process's run, those that are imported now and those that will be.

    They stay connected, and report to a later run in this process, too; without a run nothing is sent.

    Args:
        sources: Values of ``LaunchConfig.report_from``.
    """
    step_sources.reset()
    for source in sources:
        if source not in _connected:
            _connected.add(source)
            for module, place, function in _CONNECTIONS[source]:
                when_imported(module, _connection(place, function))


def preload() -> None:
    """Import what connects the libraries that this process has imported: ranks forked from it need not."""
    for connections in _CONNECTIONS.values():
        for module, place, _ in connections:
            if module in sys.modules:
                import_module(f"{_HERE}.{place}")


def _connection(place: str, function: str) -> Callable[[Any], None]:
    def connect(module: Any) -> None:
        getattr(import_module(f"{_HERE}.{place}"), function)(module)

    return connect
