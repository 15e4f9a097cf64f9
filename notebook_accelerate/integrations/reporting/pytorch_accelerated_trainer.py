"""pytorch-accelerated's Trainer: what its history records; its steps are those of its Accelerator."""

from __future__ import annotations

from typing import Any

from notebook_accelerate.integrations.reporting.sources import after, send_numbers


def connect(module: Any) -> None:
    """Report the metrics of a Trainer's history."""
    after(module.InMemoryRunHistory, "update_metric", _send)


def _send(history: Any, metric_name: str, metric_value: Any) -> None:
    send_numbers({f"{history.metric_name_prefix}{metric_name}": metric_value})
