"""Lightning's Trainer: its metrics, steps and progress, by a callback that every Trainer gets."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.reporting.sources import mark_reported, send_numbers
from notebook_accelerate.telemetry import ProgressEvent
from notebook_accelerate.telemetry.automatic_metrics import LIBRARY, claim_steps


def connect(module: Any) -> None:
    """Add the callback to all Trainers."""
    package = module.__name__.rpartition(".trainer.trainer")[0]
    base: Any = import_module(f"{package}.callbacks").Callback

    class RunCallback(base):  # type: ignore[misc]
        """Reports a Trainer to the run of this rank."""

        def __init__(self) -> None:
            super().__init__()
            self._sent: dict[str, int] = {}

        def _send(self, trainer: Any) -> None:
            """Send the metrics that have not been sent for this step."""
            step = trainer.global_step
            new = {name: value for name, value in trainer.callback_metrics.items() if self._sent.get(name) != step}
            self._sent.update(dict.fromkeys(new, step))
            send_numbers(new, step)

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            claim_steps(LIBRARY)
            step = trainer.global_step
            telemetry.emit(
                ProgressEvent(step=step, total=_steps_in_all(trainer), label=f"epoch {trainer.current_epoch}")
            )
            # Reading a number waits for the accelerator: as often as the loggers do.
            if trainer.strategy.root_device.type == "cpu" or not step % (trainer.log_every_n_steps or 1):
                self._send(trainer)

        def on_validation_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if not trainer.sanity_checking:
                self._send(trainer)

        def on_train_epoch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            self._send(trainer)

    start = module.Trainer.__init__

    @wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.callbacks.insert(0, RunCallback())

    module.Trainer.__init__ = started
    _mark_loggers(package)


def _steps_in_all(trainer: Any) -> int | None:
    if trainer.max_steps and trainer.max_steps > 0:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not epochs or epochs < 0 or batches == float("inf"):
        return None
    return int(batches) // (trainer.accumulate_grad_batches or 1) * int(epochs)


def _mark_loggers(package: str) -> None:
    """Keep what Lightning's own loggers write from being copied: the callback reports it."""
    connector: Any = import_module(f"{package}.trainer.connectors.logger_connector.logger_connector")
    mark_reported(connector._LoggerConnector, "log_metrics")
