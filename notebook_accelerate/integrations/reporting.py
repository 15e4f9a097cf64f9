"""Report the losses, steps, progress and logged scalars of any training code in a rank to the rank's run.

Each library is connected when it is imported. Outside a launched rank there is no sink, and nothing is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.import_hooks import when_imported
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent
from notebook_accelerate.telemetry.automatic_metrics import (
    LIBRARY,
    claim_steps,
    is_reported,
    reported,
    reset_step_source,
)

_connected: set[str] = set()
"""The sources that are connected in this process. A forked rank may have inherited some."""


def connect_libraries(sources: Iterable[str]) -> None:
    """Connect libraries to this process's run, including libraries that are imported later.

    The libraries stay connected, and also report to later runs in this process. Without a run, nothing is sent.

    Args:
        sources: Values of ``LaunchConfig.report_from``.
    """
    reset_step_source()
    for source in sources:
        if source not in _connected:
            _connected.add(source)
            for module, connect in _CONNECTIONS[source].items():
                when_imported(module, connect)


def preload() -> None:
    """Import the module that connects torch, if torch is imported, so that forked ranks do not have to import it."""
    if "torch.optim.optimizer" in sys.modules:
        from notebook_accelerate.integrations import torch_steps  # noqa: F401


# ---- trainers


def _connect_accelerate(module: Any) -> None:
    """Report the values that Accelerate's own Accelerator logs.

    If this package serves as ``accelerate``, nothing is connected, because its Accelerator reports them itself.
    """
    if module.__name__ != "accelerate.accelerator":
        return
    kind = module.Accelerator
    original = kind.log

    @wraps(original)
    def log(self: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        send_numbers(values, step)
        with reported():
            return original(self, values, step, *args, **kwargs)

    kind.log = log


def _connect_transformers(module: Any) -> None:
    """Add a callback to the default callbacks of transformers' Trainers."""
    callbacks: Any = import_module("transformers.trainer_callback")

    class RunCallback(callbacks.TrainerCallback):  # type: ignore[misc]
        """Reports a Trainer's progress and metrics to this rank's run."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            claim_steps(LIBRARY)
            epochs = f"epoch {state.epoch:.2f}" if state.epoch is not None else ""
            telemetry.emit(ProgressEvent(step=state.global_step, total=state.max_steps or None, label=epochs))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
            send_numbers(numbers, state.global_step)

    module.DEFAULT_CALLBACKS.insert(0, RunCallback)
    # Other callbacks log the same numbers to tensorboard, wandb and mlflow. These must not be reported again.
    mark_reported(callbacks.CallbackHandler, "on_log")


def _connect_lightning(module: Any) -> None:
    """Add a callback to every Trainer of Lightning."""
    package = module.__name__.rpartition(".trainer.trainer")[0]
    base: Any = import_module(f"{package}.callbacks").Callback

    class RunCallback(base):  # type: ignore[misc]
        """Reports a Trainer's progress and metrics to this rank's run."""

        def __init__(self) -> None:
            super().__init__()
            self._sent: dict[str, int] = {}

        def _send(self, trainer: Any) -> None:
            """Send the metrics that have not been sent yet for this step."""
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
            # Read numbers only as often as the loggers do, because each read waits for the accelerator.
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
    """Mark the values that Lightning's own loggers write as reported, because the callback reports them."""
    connector: Any = import_module(f"{package}.trainer.connectors.logger_connector.logger_connector")
    mark_reported(connector._LoggerConnector, "log_metrics")


def _connect_pytorch_accelerated(module: Any) -> None:
    """Report the metrics in a Trainer's history."""
    after(module.InMemoryRunHistory, "update_metric", _send_history)


def _send_history(history: Any, metric_name: str, metric_value: Any) -> None:
    send_numbers({f"{history.metric_name_prefix}{metric_name}": metric_value})


_FASTAI_STEPS = 10
"""The number of steps between two losses of a Learner on an accelerator, because each read waits for it."""


def _connect_fastai(module: Any) -> None:
    """Report the losses, metrics and progress of fastai's Learners."""
    after(module.Recorder, "after_batch", _send_batch)
    after(module.Recorder, "after_epoch", _send_epoch)


def _send_batch(recorder: Any) -> None:
    learner = recorder.learn
    if not learner.training:
        return
    claim_steps(LIBRARY)
    step, loss = learner.train_iter, learner.loss
    telemetry.emit(ProgressEvent(step=step, total=learner.n_epoch * learner.n_iter, label=f"epoch {learner.epoch}"))
    if loss.device.type == "cpu" or not step % _FASTAI_STEPS:
        send_numbers({"loss": loss}, step)


def _send_epoch(recorder: Any) -> None:
    # The first name is the epoch's, whose value is not part of the record.
    send_numbers(dict(zip(recorder.metric_names[1:], recorder.learn.final_record, strict=False)), recorder.train_iter)


def _connect_torch(module: Any) -> None:
    """Count and time the steps of optimizers."""
    from notebook_accelerate.integrations.torch_steps import connect

    connect(module)


# ---- scalars that training code writes to other trackers


def _connect_tensorboard(module: Any) -> None:
    """Copy the scalars written with a ``SummaryWriter``."""
    after(module.SummaryWriter, "add_scalar", _add_scalar)
    after(module.SummaryWriter, "add_scalars", _add_scalars)


def _add_scalar(_writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> None:
    _copy({tag: scalar_value}, global_step)


def _add_scalars(
    _writer: Any, main_tag: str, tag_scalar_dict: dict[str, Any], global_step: Any = None, *_: Any, **__: Any
) -> None:
    _copy({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)


def _connect_wandb(module: Any) -> None:
    """Copy the numbers passed to ``wandb.log``."""
    after(module.Run, "log", _log_wandb)


def _log_wandb(_run: Any, data: dict[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
    _copy(data, step)


def _connect_mlflow(module: Any) -> None:
    """Copy the metrics passed to ``mlflow.log_metric`` and ``mlflow.log_metrics``."""
    after(module.MlflowClient, "log_metric", _log_metric)
    after(module.MlflowClient, "log_batch", _log_batch)


# Use mlflow's parameter names, because its own functions pass arguments by name.
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


# ---- progress bars of tqdm and rich, which the panel also shows


def _connect_tqdm(module: Any) -> None:
    """Report the progress of tqdm bars whenever they are drawn."""
    after(module.tqdm, "display", send_bar)


def send_bar(bar: Any, *_: Any, **__: Any) -> None:
    """Report the progress of a tqdm bar."""
    send_progress(bar.n, bar.total, bar.desc)


def _connect_rich(module: Any) -> None:
    """Report the tasks of rich's progress bars whenever they change."""
    after(module.Progress, "update", _send_task)
    after(module.Progress, "advance", _send_task)


def _send_task(progress: Any, task_id: Any, *_: Any, **__: Any) -> None:
    task = progress._tasks[task_id]
    send_progress(task.completed, task.total, task.description)


def send_progress(done: float, total: float | None, label: Any) -> None:
    """Report that a loop has completed ``done`` of ``total`` steps. A loop without a total is not reported."""
    if total:
        telemetry.emit(ProgressEvent(step=int(done), total=int(total), label=str(label or "")))


_CONNECTIONS: dict[str, dict[str, Callable[[Any], None]]] = {
    "accelerate": {"accelerate.accelerator": _connect_accelerate},
    "fastai": {"fastai.learner": _connect_fastai},
    "lightning": {
        "lightning.pytorch.trainer.trainer": _connect_lightning,
        "pytorch_lightning.trainer.trainer": _connect_lightning,
    },
    "mlflow": {"mlflow.tracking.client": _connect_mlflow},
    "pytorch_accelerated": {"pytorch_accelerated.tracking": _connect_pytorch_accelerated},
    "rich": {"rich.progress": _connect_rich},
    "tensorboard": {
        "torch.utils.tensorboard.writer": _connect_tensorboard,
        "tensorboardX.writer": _connect_tensorboard,
    },
    "torch": {"torch.optim.optimizer": _connect_torch},
    "tqdm": {"tqdm.std": _connect_tqdm},
    "transformers": {"transformers.trainer": _connect_transformers},
    "wandb": {"wandb.sdk.wandb_run": _connect_wandb},
}
"""The modules to wait for, and the functions that connect them, for each source."""


# ---- wrap methods of other libraries so that they also report; a failure to report never ends a training run

_MARK = "_reports_to_a_run"


def after(owner: Any, name: str, report: Callable[..., None]) -> None:
    """Call ``report`` with the same arguments after each call to ``owner.name``. Do nothing if there is no such name.

    Args:
        owner: A class or a module.
        name: The name of the method or function.
        report: The function to call. Its exceptions are ignored.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with suppress(Exception):  # Another version of the library may call the function with other arguments.
            report(*args, **kwargs)
        return result

    setattr(reporting, _MARK, True)
    setattr(owner, name, reporting)


def mark_reported(owner: Any, name: str) -> None:
    """Mark the values that ``owner.name`` writes to other trackers as reported, so that they are not reported twice.

    Args:
        owner: The class with the method.
        name: The name of the method.
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
    """Return a value as a number if it is one or is a tensor or array with one element. Otherwise return None."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
