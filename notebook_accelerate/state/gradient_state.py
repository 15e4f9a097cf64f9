"""The state of gradient accumulation, which accelerators, optimizers, schedulers and loaders share."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.state.partial_state import SharedDict, Slots


class GradientState:
    """The state of gradient accumulation: whether gradients are complete, and which loaders are being read.

    Instances share one dictionary. An `Accelerator` whose accumulation settings differ from the previous one's
    starts a new dictionary. Objects that the previous `Accelerator` has prepared keep the old dictionary, and
    `GradientState()` uses the newest one.

    Args:
        gradient_accumulation_plugin: A `GradientAccumulationPlugin`. If None, the current settings are kept.

    Attributes:
        sync_gradients: Whether this step completes a window. If so, gradients are reduced and the optimizer steps.
        active_dataloader: The innermost loader that is being read, or None outside of loops.
        dataloader_references: None, followed by all loaders that are being read, outermost first.
        plugin_kwargs: The accumulation settings that differ from the defaults.
        is_xla_gradients_synced: Whether gradients have been reduced since the last step (XLA only).
    """

    _shared_state: ClassVar[Slots] = SharedDict()

    sync_gradients: bool
    dataloader_references: list[Any]
    plugin_kwargs: dict[str, Any]
    is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        cls = type(self)
        requested = None if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_kwargs()
        if not cls._shared_state:
            cls._shared_state.update(_initial(requested or {}))
        elif requested is not None and requested != cls._shared_state["plugin_kwargs"]:
            cls._shared_state = _initial(requested)
        self.__dict__ = cls._shared_state

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared dictionary."""
        GradientState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether the shared dictionary has been filled."""
        return bool(type(self)._shared_state)

    @property
    def num_steps(self) -> int:
        """The number of batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler also counts batches that do not complete a window."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader completes the window, even if the window has fewer batches than usual."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged for every batch, not only for the batch that completes the window."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being read, or None outside of loops."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.dataloader_references[-1] is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has yielded its last batch."""
        loader = self.dataloader_references[-1]
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples in the active loader's last round that are not padding.

        0 means that no sample is padding. -1 means that the number is unknown, or that no loader is being read.
        """
        loader = self.dataloader_references[-1]
        return -1 if loader is None else loader.remainder

    def count_batch(self, step: int) -> int:
        """Count a batch, and set `sync_gradients` to whether the batch completes its window.

        Args:
            step: The number of batches before this one.

        Returns:
            The number of batches including this one, or 0 if this batch completes the window by ending its loader.
        """
        if self.end_of_dataloader and self.sync_with_dataloader:
            self.sync_gradients = True
            return 0
        self.sync_gradients = (step + 1) % self.num_steps == 0
        return step + 1

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this step completes a window."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        """Register a loader whose iteration has started."""
        # Register a loader only once, even if it is read again before it has reached its end.
        self._remove_dataloader(dataloader)
        self.dataloader_references.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Unregister a loader that is no longer being read."""
        self.dataloader_references[:] = [kept for kept in self.dataloader_references if kept is not dataloader]


def _initial(plugin_kwargs: dict[str, Any]) -> Slots:
    return {
        "sync_gradients": True,
        "dataloader_references": [None],
        "plugin_kwargs": plugin_kwargs,
        "is_xla_gradients_synced": False,
    }
