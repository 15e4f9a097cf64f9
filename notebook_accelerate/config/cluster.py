"""The Ray cluster on which a launch runs its ranks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.kwargs_handlers import KwargsHandler
from notebook_accelerate.config.plain_values import (
    MAX_SECONDS,
    check_number,
    check_one_of,
    check_whole_number,
    hide_credentials,
    names_only,
    shown_repr,
    shown_value,
)

if TYPE_CHECKING:
    import torch


PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's placement strategies: few nodes or many nodes; preferred, or required (STRICT)."""
WHEN_FULL = ("wait", "refuse")
RAY_CLIENT = "ray://"


@dataclass(kw_only=True, frozen=True, repr=False)
class RayCluster:
    """A Ray cluster, and the resources that each rank uses.

    Raises:
        ValueError: A field has a value that is not allowed; the message says which are.
    """

    address: str = "auto"
    """host:port of the cluster's head, ray://host:port for a kernel outside the cluster, or auto: the notebook's own
    ``ray.init()``, the variable RAY_ADDRESS, or the cluster of this machine."""
    cpus: float = 1
    """CPUs for each rank; also the number of threads of its operators."""
    gpus: int | None = None
    """GPUs for each rank; None: one, where the cluster has GPUs and the launch is not for the CPU."""
    resources: Mapping[str, float] | None = None
    """Custom resources for each rank, by name."""
    strategy: str = "PACK"
    """PACK (few nodes), SPREAD (many), STRICT_PACK (one node only) or STRICT_SPREAD (a node for each rank)."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment for the ranks: working_dir, py_modules, pip, env_vars, ..."""
    when_full: str = "wait"
    """When the cluster has too few free resources: wait (for ``wait`` seconds at most) or refuse."""
    wait: float = 300.0
    """Seconds to wait for free resources."""
    start_timeout: float = 120.0
    """Seconds for each step of the start: reaching the cluster, starting the actors, starting the ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address or self.address == RAY_CLIENT:
            shown = shown_value("address", self.address)
            raise ValueError(f"address={shown!r} is not allowed; pass 'host:port', 'ray://host:port' or 'auto'")
        check_one_of("strategy", self.strategy, PLACEMENT_STRATEGIES)
        check_one_of("when_full", self.when_full, WHEN_FULL)
        for name in ("cpus", "wait", "start_timeout"):
            check_number(name, getattr(self, name), most=MAX_SECONDS, zero=name == "cpus")
        if self.gpus is not None and (isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 0):
            raise ValueError(f"gpus={self.gpus!r} is not allowed; pass a whole number: ranks do not share a GPU")
        _check_resources(self.resources)
        _check_runtime_env(self.runtime_env)

    @property
    def seconds_to_wait(self) -> float:
        """Seconds to wait for free resources; 0 where the launch is refused then."""
        return self.wait if self.when_full == "wait" else 0.0

    @property
    def description(self) -> str:
        """The cluster, as text for a message."""
        return "a Ray cluster" if self.address == "auto" else f"the Ray cluster at {hide_credentials(self.address)}"

    def __repr__(self) -> str:
        return shown_repr(self)


def resolve_cluster(on: object) -> RayCluster | None:
    """Return the cluster that ``on`` selects; None: this machine.

    Raises:
        ValueError: ``on`` is not allowed.
    """
    if on is None or isinstance(on, RayCluster):
        return on
    if on == "ray":
        return RayCluster()
    if isinstance(on, str) and on.startswith(RAY_CLIENT) and on != RAY_CLIENT:
        return RayCluster(address=on)
    shown = shown_value("on", on)
    raise ValueError(
        f"on={shown!r} is not allowed; pass 'ray', 'ray://host:port', RayCluster(address='host:port', ...), or None "
        "for this machine"
    )


def _check_resources(resources: object) -> None:
    if resources is None:
        return
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise ValueError(f"resources={resources!r} is not allowed; pass a dict, as resources={{'fast_disk': 1}}")
    for name, value in resources.items():
        if name in ("CPU", "GPU"):
            raise ValueError(f"resources={{{name!r}: {value!r}}}: write {name.lower()}s={value!r} instead")
        check_number(f"resources[{name!r}]", value)


def _check_runtime_env(runtime_env: object) -> None:
    if runtime_env is None:
        return
    try:
        if not isinstance(runtime_env, Mapping):
            raise TypeError("it is not a dict")
        json.dumps(dict(runtime_env))
    except TypeError as error:
        raise ValueError(
            f"runtime_env={names_only(runtime_env)!r} is not allowed ({error}); pass a dict of plain values, as "
            "runtime_env={'env_vars': {'NAME': 'value'}}"
        ) from None


# Configuration of gradient accumulation, data loading and project folders.


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
