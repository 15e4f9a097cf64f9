"""A rank's half of the checks for the usual mistakes: it tells small facts, which the kernel compares over ranks.

No check adds a collective or waits for an accelerator, so that none can change, hang or slow what it watches. Facts are
told at prepare, for the first two batches, at optimizer steps 1, 10, 100, ... and when a number stops being finite.
Outside a launched worker, and alone, nothing is installed at all.

Cost of the checks in a step, on one busy CPU core: 2 to 4 microseconds (`make bench`, area debugging), and 7 more for
the look at a gradient in each backward of a model under DDP.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from notebook_accelerate import telemetry

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

BATCHES = 2
"""Batches that are told of; two, because one batch may well be the same everywhere on purpose."""
UNPREPARED_STEPS = 100
"""After so many optimizer steps nobody looks for an unprepared optimizer any longer."""
_SAMPLES = 64
_MAX_TENSORS = 512


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return up to 64 values spread over tensors, and how many elements there are; one transfer from the device."""
    try:
        chosen = [tensor.detach() for tensor in islice(tensors, _MAX_TENSORS) if tensor.numel()]
        if not chosen:
            return []
        each = max(1, _SAMPLES // len(chosen))
        parts = [tensor.reshape(-1)[:: max(1, tensor.numel() // each)][:each].double() for tensor in chosen]
        return [float(sum(tensor.numel() for tensor in chosen)), *torch.cat(parts)[:_SAMPLES].tolist()]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return []  # meta, lazy, sparse or quantised tensors: a check must never be what fails


class SanityFacts:
    """The checks of one ``Accelerator``.

    Args:
        several: Whether there are other ranks, each of which has the whole model.
        compiled: Whether models are compiled.
    """

    def __init__(self, *, several: bool, compiled: bool = False) -> None:
        self._compiled = compiled
        self.active = several and telemetry.current_sink() is not None
        self._seen: set[int] = set()
        self._optimizers: list[Any] = []
        self._parameters: set[int] = set()
        self._wrappers: list[Any] = []
        self._unprepared: RemovableHandle | None = None
        self._steps = 0
        self._any_steps = 0
        self._backwards = 0
        self._norms = 0
        self._told: set[str] = set()
        self._ring: _Ring | None = None
        self._scaled = False

    # ---- prepare

    def prepared(self, models: Iterable[Any], optimizers: Iterable[Any], results: Iterable[Any]) -> None:
        """Look at what has been prepared so far.

        Args:
            models: The models of all calls of prepare, without what was put around them.
            optimizers: The prepared optimizers of all calls.
            results: What this call of prepare returns.
        """
        if not self.active:
            return
        wrappers = [item for item in results if hasattr(item, "require_backward_grad_sync")]
        self._wrappers += wrappers
        self._scaled = self._scaled or any(getattr(optimizer, "scaler", None) for optimizer in optimizers)
        for wrapper in wrappers:
            self._watch_gradient(wrapper)
        for model in models:
            self._once(model, self._prepared_model)
        for optimizer in optimizers:
            self._once(optimizer.optimizer, self._prepared_optimizer)
        if self._unprepared is None and self._parameters:
            self._unprepared = register_optimizer_step_post_hook(self._on_any_step)

    def _once(self, item: Any, look: Callable[[Any], None]) -> None:
        if id(item) not in self._seen:
            self._seen.add(id(item))
            look(item)

    def _prepared_model(self, model: torch.nn.Module) -> None:
        self._parameters.update(map(id, model.parameters()))
        self._tell("parameters", 0, fingerprint(model.parameters()))
        if not self._compiled and not isinstance(model, torch.jit.ScriptModule):  # a hook would be compiled with it
            counter = _BatchCounter(self)
            counter.handle = model.register_forward_pre_hook(counter, with_kwargs=True)

    def _prepared_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        if len(self._optimizers) == 1:
            optimizer.register_step_post_hook(self._on_step)

    # ---- steps

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        # Ranks that exchange no gradients now (local SGD) may differ.
        if self._steps in _POWERS_OF_TEN and all(model.require_backward_grad_sync for model in self._wrappers):
            self._tell("parameters", self._steps, fingerprint(_parameters(optimizer)))

    def _on_any_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Look at a step of any optimizer of this process."""
        if self._any_steps >= UNPREPARED_STEPS:
            return
        self._any_steps += 1
        known = any(optimizer is mine for mine in self._optimizers)
        if not known and any(id(parameter) in self._parameters for parameter in _parameters(optimizer)):
            name = type(optimizer).__name__
            fix = f"{name} steps parameters of a prepared model but was not prepared itself: "
            fix += "optimizer = accelerator.prepare(optimizer)"
            _emit("mistake", 0, [], fix)
            self._any_steps = UNPREPARED_STEPS

    def _look_no_longer(self) -> None:
        """Take the hook of all optimizers off; not from inside it, as torch is then going through its hooks."""
        if self._unprepared is not None and self._any_steps >= UNPREPARED_STEPS:
            self._unprepared.remove()

    # ---- numbers

    def loss(self, loss: Any) -> None:
        """Look at a loss on its way to backward."""
        if self.active:
            self._backwards += 1
            if self._backwards % UNPREPARED_STEPS == 1:
                self._look_no_longer()
            self._look("loss", self._backwards, loss)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Look at the norm of gradients and return it."""
        if self.active:
            self._norms += 1
            self._look("gradients", self._norms, norm)
        return norm

    def _watch_gradient(self, wrapper: torch.nn.Module) -> None:
        """Look at a gradient before it is averaged: afterwards, what is wrong on one rank is wrong on all.

        One small parameter near the beginning of the model tells of all that went wrong on the way back to it.
        """
        trained = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        early = trained[: max(1, len(trained) // 3)]
        if early and not self._compiled:
            self._once(min(early, key=torch.Tensor.numel), lambda one: one.register_hook(self._local_gradient))

    def _local_gradient(self, gradient: torch.Tensor) -> None:
        # A scaler of losses is looking for the largest scale: gradients that overflow are how it finds it.
        if "local gradients" in self._told or self._scaled or gradient.layout is not torch.strided:
            return
        values = gradient.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _SAMPLES)].sum(dtype=torch.float32)
        self._look("local gradients", self._backwards, values)

    def _look(self, check: str, number: int, value: Any) -> None:
        if check in self._told or not isinstance(value, torch.Tensor) or value.numel() != 1:
            return
        if value.device.type == "cpu":
            if not math.isfinite(got := value.item()):
                self._told.add(check)
                self._tell(check, number, [got])
        elif value.device.type == "cuda":
            self._ring = self._ring or _Ring()
            for found in self._ring.add(check, number, value):
                if found[0] not in self._told:
                    self._told.add(found[0])
                    self._tell(*found)

    def _tell(self, check: str, key: int, values: list[float]) -> None:
        if values:
            _emit(check, key, values)


def _emit(check: str, key: int, values: list[float], *text: str) -> None:
    # Loaded in every launched worker; elsewhere nobody is told, and importing it would cost an Accelerator 5 ms.
    from notebook_accelerate.telemetry.debug_protocol import CheckEvent

    telemetry.emit(CheckEvent(check, key, values, *text))


_POWERS_OF_TEN = frozenset(10**power for power in range(10))


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Ring:
    """Numbers on their way from an accelerator: read a few steps later, when the copy has long ended.

    Reading them at once would have the host wait for the device in every step.
    """

    SIZE = 8

    def __init__(self) -> None:
        self._host = torch.zeros(self.SIZE, dtype=torch.float64, pin_memory=True)
        self._under_way: deque[tuple[str, int, int, Any]] = deque()
        self._count = 0

    def add(self, check: str, number: int, value: torch.Tensor) -> list[tuple[str, int, list[float]]]:
        """Begin to fetch a number; return those that have come and are not finite."""
        found = []
        while self._under_way and (len(self._under_way) == self.SIZE or self._under_way[0][3].query()):
            name, key, slot, event = self._under_way.popleft()
            event.synchronize()
            if not math.isfinite(got := self._host[slot].item()):
                found.append((name, key, [got]))
        slot = self._count % self.SIZE
        self._count += 1
        arrival: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host[slot].copy_(value.detach().reshape(()), non_blocking=True)
        arrival.record()
        self._under_way.append((check, number, slot, arrival))
        return found


class _BatchCounter:
    """A hook on a prepared model that tells of its first batches in training and then removes itself."""

    def __init__(self, checks: SanityFacts) -> None:
        self._checks = checks
        self._count = 0
        self.handle: Any = None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a batch before the model sees it."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._count += 1
        given = (*args, *kwargs.values())
        self._checks._tell("batch", self._count, fingerprint(item for item in given if isinstance(item, torch.Tensor)))
        if self._count == BATCHES:
            self.handle.remove()
