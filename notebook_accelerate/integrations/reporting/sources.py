"""The libraries that report to a run, and the modules whose import connects them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.import_hooks import when_imported
from notebook_accelerate.telemetry import MetricEvent, automatic_metrics
from notebook_accelerate.telemetry.automatic_metrics import reported

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
    automatic_metrics.reset_step_source()
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


# Replaces methods of other libraries by ones that also report, and never lets reporting fail a training.

_MARK = "_reports_to_a_run"


def after(owner: Any, name: str, report: Callable[..., None]) -> None:
    """Call ``report`` with the arguments of ``owner.name`` after each call of it; does nothing where there is none.

    Args:
        owner: A class, or a module.
        name: The method or function.
        report: What it raises is ignored.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with suppress(Exception):  # another version may pass other arguments
            report(*args, **kwargs)
        return result

    setattr(reporting, _MARK, True)
    setattr(owner, name, reporting)


def mark_reported(owner: Any, name: str) -> None:
    """Keep what ``owner.name`` writes to other trackers from being copied: its numbers are reported elsewhere.

    Args:
        owner: A class.
        name: The method.
    """
    original = getattr(owner, name)

    @wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with reported():
            return original(*args, **kwargs)

    setattr(owner, name, marked)


def send_numbers(values: Mapping[Any, Any], step: Any = None) -> None:
    """Send the numbers among ``values`` as metrics of this rank."""
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if numbers:
        telemetry.emit(MetricEvent(numbers, None if step is None else int(step)))


def _number(value: Any) -> float | None:
    """Return a number, or the number of a tensor or array with one element; None for other values."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
