"""transformers' Trainer: what it logs, its steps and its progress, by a callback that it has by default."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.reporting.sources import mark_reported, send_numbers
from notebook_accelerate.telemetry import ProgressEvent
from notebook_accelerate.telemetry.automatic_metrics import LIBRARY, claim_steps


def connect(module: Any) -> None:
    """Add the callback to the default callbacks of Trainers."""
    callbacks: Any = import_module("transformers.trainer_callback")

    class RunCallback(callbacks.TrainerCallback):  # type: ignore[misc]
        """Reports a Trainer to the run of this rank."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            claim_steps(LIBRARY)
            epochs = f"epoch {state.epoch:.2f}" if state.epoch is not None else ""
            telemetry.emit(ProgressEvent(step=state.global_step, total=state.max_steps or None, label=epochs))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
            send_numbers(numbers, state.global_step)

    module.DEFAULT_CALLBACKS.insert(0, RunCallback)
    mark_reported(callbacks.CallbackHandler, "on_log")  # the callbacks of tensorboard, wandb, mlflow
