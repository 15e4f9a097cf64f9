"""Accumulation, data loading and project folders."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.config.kwargs_handlers import KwargsHandler

if TYPE_CHECKING:
    import torch


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated."""

    num_steps: int | None = None
    """Batches per optimizer step; None: as the Accelerator says."""
    adjust_scheduler: bool = True
    """As in Accelerate 1.15 it changes no learning rate: a schedule moves once a window, not once a batch."""
    sync_with_dataloader: bool = True
    """Whether the last batch of an epoch ends a window, however short."""
    sync_each_batch: bool = False
    """Whether gradients are reduced at every batch: more communication, less memory under FSDP."""

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"num_steps={steps!r} is not allowed; pass a whole number of at least 1")


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders share their data between ranks."""

    split_batches: bool = False
    """Whether the loader's batch size is that of all ranks together (True) or of each (False)."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads every batch and sends each rank its share; None: only for iterable datasets."""
    even_batches: bool = True
    """Whether the last batches are filled with samples from the start, so that every rank has equally many."""
    use_seedable_sampler: bool = False
    """Whether a random sampler is replaced by one that shuffles by epoch and seed, the same on every rank."""
    data_seed: int | None = None
    """Seed of that sampler; None: torch's current seed."""
    non_blocking: bool = False
    """Whether batches are copied to the device while the host goes on (needs pinned memory)."""
    use_stateful_dataloader: bool = False
    """Whether torchdata's StatefulDataLoader is used, which resumes in the middle of an epoch."""

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader and importlib.util.find_spec("torchdata") is None:
            raise ImportError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'")
        if self.data_seed is not None and (isinstance(self.data_seed, bool) or not isinstance(self.data_seed, int)):
            raise ValueError(f"data_seed={self.data_seed!r} is not allowed; pass a whole number")


@dataclass
class ProjectConfiguration:
    """Folders of a project and how its checkpoints are named."""

    project_dir: str | None = None
    """Folder of checkpoints."""
    logging_dir: str | None = None
    """Folder of the trackers' files; None: ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Whether ``save_state`` numbers its folders: checkpoints/checkpoint_0, checkpoint_1, ..."""
    total_limit: int | None = None
    """How many numbered checkpoints are kept; the oldest go first; None: all."""
    iteration: int = 0
    """Number of the next checkpoint."""
    save_on_each_node: bool = False
    """Whether the first rank of every machine saves, or rank 0 alone."""

    def __post_init__(self) -> None:
        limit = self.total_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"total_limit={limit!r} is not allowed; pass a whole number of at least 1, or None")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folder of checkpoints, and that of logs where it has none.

        Args:
            project_dir: The folder.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration", "TensorInformation"]
