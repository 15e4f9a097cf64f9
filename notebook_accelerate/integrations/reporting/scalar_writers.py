"""Scalars that training code writes to tensorboard, wandb and mlflow directly are copied to the run."""

from __future__ import annotations

from typing import Any

from notebook_accelerate.integrations.reporting.sources import after, send_numbers
from notebook_accelerate.telemetry.automatic_metrics import is_reported


def connect_tensorboard(module: Any) -> None:
    """Copy the scalars of a ``SummaryWriter``."""
    after(module.SummaryWriter, "add_scalar", _add_scalar)
    after(module.SummaryWriter, "add_scalars", _add_scalars)


def _add_scalar(_writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> None:
    _copy({tag: scalar_value}, global_step)


def _add_scalars(
    _writer: Any, main_tag: str, tag_scalar_dict: dict[str, Any], global_step: Any = None, *_: Any, **__: Any
) -> None:
    _copy({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)


def connect_wandb(module: Any) -> None:
    """Copy the numbers of ``wandb.log``."""
    after(module.Run, "log", _log)


def _log(_run: Any, data: dict[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
    _copy(data, step)


def connect_mlflow(module: Any) -> None:
    """Copy the metrics of ``mlflow.log_metric`` and ``mlflow.log_metrics``."""
    after(module.MlflowClient, "log_metric", _log_metric)
    after(module.MlflowClient, "log_batch", _log_batch)


# The parameters have mlflow's names: its own functions pass them by name.


def _log_metric(
    _client: Any,
    run_id: str,  # noqa: ARG001
    key: str,
    value: Any,
    timestamp: Any = None,  # noqa: ARG001
    step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    _copy({key: value}, step)


def _log_batch(_client: Any, run_id: str, metrics: Any = (), *_: Any, **__: Any) -> None:  # noqa: ARG001
    for metric in metrics:
        _copy({metric.key: metric.value}, metric.step)


def _copy(values: dict[str, Any], step: Any) -> None:
    if not is_reported():
        send_numbers(values, step)
