"""The rank's part of the checks for common mistakes. Ranks send small facts, which the kernel compares.

No check adds a collective or waits for an accelerator, so no check can change, hang or slow training. Facts are sent at
prepare, for the first two batches, at optimizer steps 1, 10, 100, ... and when a number is not finite. In a run with
one rank, only losses are checked, and outside a launched rank, nothing is.

Cost of the checks in a step, on one busy CPU core: 2 to 4 microseconds (`make bench`, area debugging), and 7 more for
the check of a gradient in each backward of a model under DDP.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from notebook_accelerate import telemetry
from notebook_accelerate.telemetry.automatic_metrics import event_on

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

BATCHES = 2
"""Number of batches to compare. One is not enough, because all ranks may use the same batch once on purpose."""
UNPREPARED_STEPS = 100
"""Number of optimizer steps after which the search for an unprepared optimizer ends."""
_SAMPLES = 64
_MAX_TENSORS = 512


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return the number of elements in tensors, and up to 64 of their values, with a single device transfer."""
    try:
        chosen = [tensor.detach() for tensor in islice(tensors, _MAX_TENSORS) if tensor.numel()]
        if not chosen:
            return []
        each = max(1, _SAMPLES // len(chosen))
        parts = [tensor.reshape(-1)[:: max(1, tensor.numel() // each)][:each].double() for tensor in chosen]
        return [float(sum(tensor.numel() for tensor in chosen)), *torch.cat(parts)[:_SAMPLES].tolist()]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return []  # Meta, lazy, sparse or quantised tensors raise errors, but a check must never fail.


class SanityFacts:
    """Collects the facts of one ``Accelerator`` and sends them to the kernel.

    Args:
        several: Whether there are several ranks, each with the complete model.
        compiled: Whether models are compiled.
        gradient_state: The object whose `in_dataloader` is true while a prepared loader, which divides the data, is
            being read.
    """

    def __init__(self, *, several: bool, compiled: bool = False, gradient_state: Any = None) -> None:
        self._compiled, self._gradient_state = compiled, gradient_state
        self._is_launched = telemetry.current_sink() is not None
        self.active = several and self._is_launched
        self._seen: set[int] = set()
        self._optimizers: list[Any] = []
        self._parameters: set[int] = set()
        self._wrappers: list[Any] = []
        self._unprepared: RemovableHandle | None = None
        self._first_optimizer: weakref.ref[Any] | None = None
        self._steps = 0
        self._any_steps = 0
        self._backwards = 0
        self._norms = 0
        self._reported: set[str] = set()
        self._readings: _DeviceReadings | None = None
        self._scaled = False

    # ---- prepare

    def prepared(self, models: Iterable[Any], optimizers: Iterable[Any], results: Iterable[Any]) -> None:
        """Install the checks on everything that has been prepared so far.

        Args:
            models: The models passed to all calls of prepare, unwrapped.
            optimizers: The optimizers prepared by all calls.
            results: The return values of the latest call.
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

    def _once(self, item: Any, install: Callable[[Any], None]) -> None:
        if id(item) not in self._seen:
            self._seen.add(id(item))
            install(item)

    def _prepared_model(self, model: torch.nn.Module) -> None:
        self._parameters.update(map(id, model.parameters()))
        _send("parameters", 0, fingerprint(model.parameters()))
        # Don't add the hook to a compiled model, because it would be compiled too.
        if not self._compiled and not isinstance(model, torch.jit.ScriptModule):
            counter = _BatchCounter(self._gradient_state)
            counter.handle = model.register_forward_pre_hook(counter, with_kwargs=True)

    def _prepared_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        if len(self._optimizers) == 1:
            optimizer.register_step_post_hook(self._on_step)

    # ---- steps

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        # With local SGD, ranks may differ while they do not exchange gradients.
        if self._steps in _POWERS_OF_TEN and all(model.require_backward_grad_sync for model in self._wrappers):
            _send("parameters", self._steps, fingerprint(_parameters(optimizer)))

    def _on_any_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Report an optimizer that takes a step but was not passed to ``prepare``."""
        if self._any_steps >= UNPREPARED_STEPS:
            return
        self._any_steps += 1
        known = any(optimizer is mine for mine in self._optimizers)
        if not self._parameters and not known:
            self._on_step_of_unprepared_model(optimizer)
        if not known and any(id(parameter) in self._parameters for parameter in _parameters(optimizer)):
            name = type(optimizer).__name__
            fix = f"{name} steps parameters of a prepared model but was not prepared itself: "
            fix += "optimizer = accelerator.prepare(optimizer)"
            _send("mistake", 0, [], fix)
            self._any_steps = UNPREPARED_STEPS

    def _on_step_of_unprepared_model(self, optimizer: Any) -> None:
        """Send a model's parameters if no model was prepared. They are equal across ranks if gradients are averaged."""
        if self._first_optimizer is None:
            self._first_optimizer = weakref.ref(optimizer)
        if self._first_optimizer() is optimizer:
            self._steps += 1
            if self._steps in _POWERS_OF_TEN:
                _send("parameters", self._steps, fingerprint(_parameters(optimizer)))

    def _remove_step_hook(self) -> None:
        """Remove the hook of all optimizers. Don't call this inside the hook, while torch iterates over its hooks."""
        if self._unprepared is not None and self._any_steps >= UNPREPARED_STEPS:
            self._unprepared.remove()

    # ---- numbers

    def loss(self, loss: Any) -> None:
        """Report a loss that is not finite, before its backward pass."""
        if self._is_launched:
            self._backwards += 1
            if self.active and self._unprepared is None:
                self._unprepared = register_optimizer_step_post_hook(self._on_any_step)
            if self._backwards % UNPREPARED_STEPS == 1:
                self._remove_step_hook()
            self._check_finite("loss", self._backwards, loss)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Report a gradient norm that is not finite, and return the norm unchanged."""
        if self.active:
            self._norms += 1
            self._check_finite("gradients", self._norms, norm)
        return norm

    def _watch_gradient(self, wrapper: torch.nn.Module) -> None:
        """Check a gradient before averaging spreads a wrong value from one rank to all of them.

        One small parameter near the beginning of the model is enough. Its gradient shows every error of the backward
        pass before it.
        """
        trained = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        early = trained[: max(1, len(trained) // 3)]
        if early and not self._compiled:
            self._once(min(early, key=torch.Tensor.numel), lambda one: one.register_hook(self._local_gradient))

    def _local_gradient(self, gradient: torch.Tensor) -> None:
        # A gradient scaler lets gradients overflow on purpose, to find the largest scale, so infinities are no mistake.
        if "local gradients" in self._reported or self._scaled or gradient.layout is not torch.strided:
            return
        values = gradient.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _SAMPLES)].sum(dtype=torch.float32)
        self._check_finite("local gradients", self._backwards, values)

    def _check_finite(self, check: str, number: int, value: Any) -> None:
        if check in self._reported or not isinstance(value, torch.Tensor) or value.numel() != 1:
            return
        if value.device.type == "cpu":
            if not math.isfinite(got := value.item()):
                self._reported.add(check)
                _send(check, number, [got])
        elif value.device.type == "cuda":
            self._readings = self._readings or _DeviceReadings()
            for found in self._readings.add(check, number, value):
                if found[0] not in self._reported:
                    self._reported.add(found[0])
                    _send(*found)


def _send(check: str, key: int, values: list[float], *text: str) -> None:
    if not (values or text):
        return
    # Import this only in launched ranks. Elsewhere nothing is sent, and the import would cost an Accelerator 5 ms.
    from notebook_accelerate.telemetry.debug_protocol import CheckEvent

    telemetry.emit(CheckEvent(check, key, values, *text))


_POWERS_OF_TEN = frozenset(10**power for power in range(10))


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _DeviceReadings:
    """Copies numbers from an accelerator and reads them a few steps later, when the copies are complete.

    Reading them immediately would make the host wait for the device in every step.
    """

    SIZE = 8

    def __init__(self) -> None:
        self._host = torch.zeros(self.SIZE, dtype=torch.float64, pin_memory=True)
        self._pending: deque[tuple[str, int, int, Any]] = deque()
        self._count = 0

    def add(self, check: str, number: int, value: torch.Tensor) -> list[tuple[str, int, list[float]]]:
        """Start copying a number. Return the earlier numbers whose copies are complete and that are not finite."""
        if torch.cuda.is_current_stream_capturing():
            return []  # The calls below would break the user's CUDA graph.
        found = []
        while self._pending and (len(self._pending) == self.SIZE or self._pending[0][3].query()):
            name, key, slot, event = self._pending.popleft()
            event.synchronize()
            if not math.isfinite(got := self._host[slot].item()):
                found.append((name, key, [got]))
        slot = self._count % self.SIZE
        self._count += 1
        self._host[slot].copy_(value.detach().reshape(()), non_blocking=True)
        self._pending.append((check, number, slot, event_on(value.device)))
        return found


class _BatchCounter:
    """A hook on a prepared model that sends fingerprints of the first training batches and then removes itself.

    Args:
        gradient_state: See `SanityFacts`. While a prepared loader is being read, inputs are not compared, because
            a function may give models the same noise on all ranks.
    """

    def __init__(self, gradient_state: Any) -> None:
        self._count, self._gradient_state = 0, gradient_state
        self.handle: Any = None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send the fingerprint of a training batch, which is empty while a prepared loader is being read."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._count += 1
        divided = self._gradient_state is not None and self._gradient_state.in_dataloader
        given = () if divided else (*args, *kwargs.values())
        _send("batch", self._count, fingerprint(item for item in given if isinstance(item, torch.Tensor)))
        if self._count == BATCHES:
            self.handle.remove()
