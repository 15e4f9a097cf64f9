"""`AcceleratedScheduler`, a learning rate scheduler that steps only when the optimizers have stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.torch_internals import count_scheduler_step, scheduler_steps


class AcceleratedScheduler:
    """A scheduler that steps with the optimizers, but not inside an accumulation window or after a skipped step.

    Schedules are written for one process. If ranks read different batches, each step here is therefore as many steps of
    the wrapped scheduler as there are such ranks. Ranks that work on the same batch (tensor, context, sequence or
    pipeline parallelism) count as one, because they do not shorten the loader. (Accelerate 1.15 counts all ranks, and
    reaches the end of the schedule before the end of the data.) Accumulated batches are not steps: a schedule for a
    whole training run has as many steps as there are windows, regardless of the plugin's `adjust_scheduler`.

    Args:
        scheduler: The torch scheduler to wrap.
        optimizers: The prepared optimizer or optimizers that the scheduler belongs to.
        step_with_optimizer: Whether to step only with the optimizers. If False, each call is one step.
        split_batches: Whether ranks share each batch, so that one step here is one step of the wrapped scheduler.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler: Any = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        # Metrics do not depend on the number of ranks, so more ranks do not reach a plateau in fewer steps.
        once = split_batches or isinstance(scheduler, ReduceLROnPlateau)
        self._repeats = 1 if once else _data_parallel_size(AcceleratorState())
        self._is_accelerate_prepared = False
        self._is_plain = self._repeats == 1 and not hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler if the optimizers have stepped.

        Args:
            args: Positional arguments for the wrapped scheduler's step.
            kwargs: Keyword arguments for the wrapped scheduler's step.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                count_scheduler_step(self.scheduler)
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if self._is_plain:
            self.scheduler.step(*args, **kwargs)
        else:
            self._step_for_all_ranks(args, kwargs)

    def _step_for_all_ranks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._repeats):
            # OneCycleLR raises an error after its last step. Without this check, padded last batches would exceed that
            # step.
            if total is None or scheduler_steps(self.scheduler) <= total:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # All other attributes come from the wrapped scheduler: total_steps, base_lrs, last_epoch, optimizer, ...
        if name == "scheduler" or name.startswith("__"):  # A copy has no attributes yet.
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("scheduler")
        own = name in self.__dict__ or hasattr(type(self), name) or not hasattr(inner, name)
        object.__setattr__(self if own else inner, name, value)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates in use, one per parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state.

        Args:
            state_dict: The result of `state_dict`.
        """
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> list[float]:
        """Return the learning rates that the wrapped scheduler computes for its current step."""
        rates: list[float] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rates, if the wrapped scheduler supports this.

        Args:
            args: Positional arguments for the wrapped scheduler's print_lr.
            kwargs: Keyword arguments for the wrapped scheduler's print_lr.

        Returns:
            The result of the wrapped scheduler's print_lr.
        """
        return self.scheduler.print_lr(*args, **kwargs)


def _data_parallel_size(state: AcceleratorState) -> int:
    """Return the number of ranks that read different batches."""
    layout = state.parallelism_config
    return state.num_processes if layout is None else int(layout.data_parallel_size)
