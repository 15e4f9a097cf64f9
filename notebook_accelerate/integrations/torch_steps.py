"""Count and time the steps of training loops in plain torch.

The hooks do nothing while this package's own Accelerator counts and times the steps itself.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import wraps
from typing import Any

import torch

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.import_hooks import when_imported
from notebook_accelerate.telemetry import ProgressEvent, current_sink, step_time
from notebook_accelerate.telemetry.automatic_metrics import (
    ACCELERATOR,
    OPTIMIZER,
    StepCounter,
    claim_steps,
    sampler,
    step_source,
)

LONE_STEPS = 3
"""After this many steps without a process group, several ranks are considered to train independently."""

_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class _Steps:
    """Measures the time of all optimizers' steps, and reports the steps that `StepCounter` counts."""

    def __init__(self) -> None:
        self._counter = StepCounter()

    def before_step(self, *_: Any) -> None:
        """Attribute time to the optimizer from now on. Every optimizer calls this before each step."""
        if _times():
            step_time.switch(step_time.OPTIMIZER)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Stop attributing time to the optimizer, and report the step. Every optimizer calls this after each step."""
        if not _times():
            return
        step_time.switch(step_time.OTHER)
        if steps := self._counter.count(optimizer):
            if claim_steps(OPTIMIZER):
                sampler.end_step(steps, optimizer)
                telemetry.emit(ProgressEvent(step=steps))
            step_time.end_step()
            if steps == LONE_STEPS:
                _warn_of_lone_ranks()


def _warn_of_lone_ranks() -> None:
    """Warn if several ranks train without a process group, because each then trains a separate model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        from notebook_accelerate.telemetry.debug_protocol import CheckEvent

        fix = "call torch.distributed.init_process_group() first, or train with an Accelerator"
        if any(name in sys.modules for name in _LIGHTNING):
            fix = f"write Trainer(devices={os.environ.get('LOCAL_WORLD_SIZE', world)}, strategy='ddp')"
        text = f"{world} ranks train without a process group, so each trains a separate model on its batches; {fix}"
        telemetry.emit(CheckEvent("mistake", LONE_STEPS, [], text))


def connect(module: Any) -> None:
    """Count and time the steps of all optimizers of this process."""
    steps = _Steps()
    module.register_optimizer_step_pre_hook(steps.before_step)
    module.register_optimizer_step_post_hook(steps.after_step)
    _time_backward()
    when_imported("torch.utils.data.dataloader", _time_loaders)


def _times() -> bool:
    """Return whether this thread trains in a launched rank whose steps no Accelerator measures."""
    return (
        not torch.compiler.is_compiling()
        and step_source() < ACCELERATOR
        and current_sink() is not None
        and threading.current_thread() is threading.main_thread()
    )


def _time_backward() -> None:
    """Count the time of backward passes, during which a rank may wait for others."""
    original = torch.autograd.backward

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not _times():
            return original(*args, **kwargs)
        step_time.switch(step_time.BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            step_time.switch(step_time.OTHER)

    torch.autograd.backward = backward


def _time_loaders(_: Any) -> None:
    """Count the time that the training loop waits for batches."""
    from notebook_accelerate import torch_internals

    kind: Any = torch_internals.DataLoaderIterator
    original = kind.__next__

    @wraps(original)
    def following(self: Any) -> Any:
        if not _times():
            return original(self)
        step_time.switch(step_time.DATA)
        try:
            return original(self)
        finally:
            step_time.switch(step_time.COMPUTE)

    kind.__next__ = following
