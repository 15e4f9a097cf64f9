"""Configuration of gradient accumulation, data loading and project folders."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.config.field_checks import check_whole_number
from notebook_accelerate.config.kwargs_handlers import KwargsHandler

if TYPE_CHECKING:
    import torch


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Raises:
        ValueError: ``num_steps`` is not a whole number above 0.
    """

    num_steps: int | None = None
    """Batches per optimizer step; None: the Accelerator's ``gradient_accumulation_steps``."""
    adjust_scheduler: bool = True
    """Has no effect, as in Accelerate 1.15: a schedule steps once per window, not once per batch."""
    sync_with_dataloader: bool = True
    """Whether the last batch of an epoch ends a window that is not full."""
    sync_each_batch: bool = False
    """Whether gradients are reduced at every batch: more communication, less memory under FSDP."""

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_whole_number("num_steps", self.num_steps)


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders divide their data among ranks.

    Raises:
        ImportError: ``use_stateful_dataloader=True``, and torchdata is not installed.
        ValueError: ``data_seed`` is not a whole number.
    """

    split_batches: bool = False
    """Whether the loader's batch size is the total of all ranks (True) or that of each rank (False)."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads every batch and sends each rank its share; None: only for iterable datasets."""
    even_batches: bool = True
    """Whether the last batches are filled with samples from the start, so that all ranks have equally many."""
    use_seedable_sampler: bool = False
    """Whether a random sampler is replaced by one that shuffles by epoch and seed, equally on every rank."""
    data_seed: int | None = None
    """Seed of that sampler; None: torch's current seed."""
    non_blocking: bool = False
    """Whether batches are copied to the device asynchronously (needs pinned memory)."""
    use_stateful_dataloader: bool = False
    """Whether torchdata's StatefulDataLoader is used, which resumes in the middle of an epoch."""

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader and importlib.util.find_spec("torchdata") is None:
            raise ImportError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'")
        if self.data_seed is not None and (isinstance(self.data_seed, bool) or not isinstance(self.data_seed, int)):
            raise ValueError(f"data_seed={self.data_seed!r} is not allowed; pass a whole number")


@dataclass
class ProjectConfiguration:
    """Folders of a project, and the names of its checkpoints.

    Raises:
        ValueError: ``total_limit`` is not a whole number above 0.
    """

    project_dir: str | None = None
    """Folder of checkpoints."""
    logging_dir: str | None = None
    """Folder of the trackers' files; None: ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Whether ``save_state`` numbers its folders: checkpoints/checkpoint_0, checkpoint_1, ..."""
    total_limit: int | None = None
    """How many numbered checkpoints are kept; the oldest are deleted first; None: all."""
    iteration: int = 0
    """Number of the next checkpoint."""
    save_on_each_node: bool = False
    """Whether the first rank of every machine saves (True), or rank 0 alone (False)."""

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            check_whole_number("total_limit", self.total_limit)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folder of checkpoints, and the folder of logs where it is not set.

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
    """The tensor's shape."""
    dtype: torch.dtype
    """The tensor's dtype."""
