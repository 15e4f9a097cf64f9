"""`AcceleratedOptimizer`, which steps only when a gradient accumulation window is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from notebook_accelerate import telemetry
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.telemetry import automatic_metrics, step_time
from notebook_accelerate.telemetry.automatic_metrics import sampler
from notebook_accelerate.telemetry.events import ProgressEvent

_counter = automatic_metrics.StepCounter()


def move_to_device(state: Any, device: torch.device) -> Any:
    """Move every tensor of an optimizer's state to a device.

    Args:
        state: Nested lists, tuples and dicts of tensors.
        device: The device to move to.

    Returns:
        The state on the device.
    """
    if isinstance(state, (list, tuple)):
        return type(state)(move_to_device(item, device) for item in state)
    if isinstance(state, dict):
        return type(state)({key: move_to_device(value, device) for key, value in state.items()})
    return state.to(device) if isinstance(state, torch.Tensor) else state


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's step, so that it records each call in the optimizer's wrapper.

    Args:
        accelerated_optimizer: The wrapper. Each call sets its `_accelerate_step_called`.
        method: The `step` method of the optimizer.

    Returns:
        The function to call instead of `method`.
    """

    def patched_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return patched_step


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps and clears gradients only when a gradient accumulation window is complete.

    Args:
        optimizer: The torch optimizer to wrap.
        device_placement: Whether to move the optimizer's state to this rank's device.
        scaler: The loss scaler, or None if the precision does not need one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # Don't call the base class's constructor, because the parameter groups belong to the wrapped optimizer.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()
        self._is_overflow = False
        self._accelerate_step_called = False
        self._is_accelerate_prepared = False
        if device_placement and optimizer.state:
            optimizer.load_state_dict(move_to_device(optimizer.state_dict(), self.accelerator_state.device))
        if scaler is not None:
            optimizer.register_step_post_hook(self._note_step)
        if telemetry.current_sink() is not None:
            automatic_metrics.claim_steps(automatic_metrics.ACCELERATOR)

    def _note_step(self, *_: Any) -> None:
        self._accelerate_step_called = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step if this batch completes a window. Otherwise, do nothing.

        Args:
            closure: A function that recomputes the loss, for optimizers that need one. It is not allowed with a scaler.

        Returns:
            The result of the optimizer's step, or None if it did not step.
        """
        if not self.gradient_state.sync_gradients:
            return None
        watched = telemetry.current_sink() is not None
        if watched:
            step_time.switch(step_time.OPTIMIZER)
        result = self._take_step(closure)
        if watched:
            step_time.switch(step_time.OTHER)
            if steps := _counter.count(self):
                sampler.end_step(steps, self.optimizer)
                telemetry.emit(ProgressEvent(step=steps))
                step_time.end_step()
        return result

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        return self.optimizer.step(closure) if self.scaler is None else self._scaled_step(self.scaler, closure)

    def _scaled_step(self, scaler: torch.amp.GradScaler, closure: Callable[[], float] | None) -> Any:
        self._accelerate_step_called = False
        more = () if closure is None else (closure,)
        result = scaler.step(self.optimizer, *more)
        scaler.update()
        # The scaler skips the step if gradients contain infinities.
        self._is_overflow = not self._accelerate_step_called
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients if this batch completes a window. Otherwise, do nothing.

        Args:
            set_to_none: Whether to set gradients to None instead of zero. None means the optimizer's default.
        """
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients contained infinities."""
        return self._is_overflow

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the wrapped optimizer's parameter groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: See `torch.optim.Optimizer.add_param_group`.
        """
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer.

        Args:
            state_dict: The result of `state_dict`.
        """
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer.

        Returns:
            The result of `torch.optim.Optimizer.state_dict`.
        """
        return self.optimizer.state_dict()

    def train(self) -> None:
        """Switch to training mode, if the optimizer has modes, as schedule-free ones do."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Switch to evaluation mode, if the optimizer has modes, as schedule-free ones do."""
        self._switch_mode("eval")

    def _switch_mode(self, mode: str) -> None:
        # An engine such as DeepSpeed wraps the user's optimizer once more.
        for optimizer in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()
                return

    def __getattr__(self, name: str) -> Any:
        # All other attributes come from the wrapped optimizer. Hooks are registered there, and only run in real
        # steps.
        if name == "optimizer" or name.startswith("__"):  # A copy does not have attributes yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
