"""`AcceleratedScheduler`: a schedule that moves only when the optimizers have stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from notebook_accelerate.state import AcceleratorState, GradientState


class AcceleratedScheduler:
    """A learning rate schedule that moves with the optimizers: not inside a window, not after a skipped step.

    The schedule was written for one process: where ranks read different batches, one step here is as many steps of the
    schedule as there are such ranks. Ranks that work on the same batch by tensor, context, sequence or pipeline
    parallelism count as one: the loader is no shorter for them. (Accelerate 1.15 counts all ranks, and is through with
    the schedule before the data.) Batches that are accumulated are no steps: a schedule that ends with the training is
    as long as there are windows, whatever the plugin's adjust_scheduler says.

    Args:
        scheduler: The schedule that does the work.
        optimizers: The prepared optimizer, or optimizers, it belongs to.
        step_with_optimizer: Move only with the optimizers; otherwise at each call, once.
        split_batches: Whether ranks share each batch: then one step here is one step of the schedule.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        # A metric says the same however many ranks computed it: a plateau is not reached sooner with more of them.
        alone = split_batches or isinstance(scheduler, ReduceLROnPlateau)
        self._repeats = 1 if alone else _readers(AcceleratorState())
        self._is_accelerate_prepared = False
        self._is_plain = self._repeats == 1 and not hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule, where the optimizers have stepped.

        Args:
            args: As for the schedule's step.
            kwargs: As for the schedule's step.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
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
            # OneCycleLR raises beyond its last step, which the padding of the last batches would reach.
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the learning rates now in use, one per parameter group.

        Returns:
            A list of floats.
        """
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        """Return the schedule's state.

        Returns:
            A dict.
        """
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the schedule's state.

        Args:
            state_dict: As from `state_dict`.
        """
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """Return the learning rates that the schedule computes for its current step.

        Returns:
            A list of floats.
        """
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rates, where the schedule can.

        Args:
            args: As for the schedule's print_lr.
            kwargs: As for the schedule's print_lr.

        Returns:
            What the schedule returned.
        """
        return self.scheduler.print_lr(*args, **kwargs)


def _readers(state: AcceleratorState) -> int:
    """Return how many ranks read different batches."""
    layout = state.parallelism_config
    return state.num_processes if layout is None else int(layout.data_parallel_size)
