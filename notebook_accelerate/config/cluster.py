"""The Ray cluster on which a launch runs its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config.plain_values import (
    MAX_SECONDS,
    check_number,
    check_one_of,
    hide_credentials,
    names_only,
    shown_repr,
    shown_value,
)

PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's placement strategies. PACK prefers few nodes, SPREAD many; the STRICT ones require one node or one per rank."""
WHEN_FULL = ("wait", "refuse")
RAY_CLIENT = "ray://"


@dataclass(kw_only=True, frozen=True, repr=False)
class RayCluster:
    """A Ray cluster, and the resources that each rank uses.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed values.
    """

    address: str = "auto"
    """host:port of the cluster's head, ray://host:port for a kernel outside the cluster, or auto for the notebook's
    own ``ray.init()``, the address in the variable RAY_ADDRESS, or the cluster that this machine belongs to."""
    cpus: float = 1
    """CPUs for each rank, and the number of threads that its operators use."""
    gpus: int | None = None
    """GPUs for each rank. If None, each rank gets one if the cluster has GPUs and the launch may use them."""
    resources: Mapping[str, float] | None = None
    """Custom resources for each rank, by name."""
    strategy: str = "PACK"
    """Placement: PACK (few nodes), SPREAD (many), STRICT_PACK (one node) or STRICT_SPREAD (a node per rank)."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment for the ranks: working_dir, py_modules, pip, env_vars, ..."""
    when_full: str = "wait"
    """What to do if too few resources are free: wait (at most ``wait`` seconds) or refuse."""
    wait: float = 300.0
    """Seconds to wait for free resources."""
    start_timeout: float = 120.0
    """Time limit in seconds for each step: reaching the cluster, starting the actors, and starting the ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address or self.address == RAY_CLIENT:
            shown = shown_value("address", self.address)
            raise ValueError(f"address={shown!r} is not allowed; pass 'host:port', 'ray://host:port' or 'auto'")
        check_one_of("strategy", self.strategy, PLACEMENT_STRATEGIES)
        check_one_of("when_full", self.when_full, WHEN_FULL)
        for name in ("cpus", "wait", "start_timeout"):
            check_number(name, getattr(self, name), most=MAX_SECONDS, zero=name == "cpus")
        if self.gpus is not None and (isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 0):
            raise ValueError(f"gpus={self.gpus!r} is not allowed; pass a whole number: ranks cannot share a GPU")
        _check_resources(self.resources)
        _check_runtime_env(self.runtime_env)

    @property
    def seconds_to_wait(self) -> float:
        """Seconds to wait for free resources, or 0 if ``when_full`` is refuse."""
        return self.wait if self.when_full == "wait" else 0.0

    @property
    def description(self) -> str:
        """The cluster, as text for a message."""
        return "a Ray cluster" if self.address == "auto" else f"the Ray cluster at {hide_credentials(self.address)}"

    def __repr__(self) -> str:
        return shown_repr(self)


def resolve_cluster(on: object) -> RayCluster | None:
    """Return the cluster that ``on`` selects, or None for this machine.

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
        raise ValueError(f"resources={resources!r} is not allowed; pass a dict, such as {{'fast_disk': 1}}")
    for name, value in resources.items():
        if name in ("CPU", "GPU"):
            raise ValueError(f"resources={{{name!r}: {value!r}}}: write {name.lower()}s={value!r} instead")
        check_number(f"resources[{name!r}]", value)


def _check_runtime_env(runtime_env: object) -> None:
    if runtime_env is None:
        return
    try:
        if not isinstance(runtime_env, Mapping):
            raise TypeError("the value is not a dict")
        json.dumps(dict(runtime_env))
    except TypeError as error:
        raise ValueError(
            f"runtime_env={names_only(runtime_env)!r} is not allowed ({error}); pass a dict of plain values, such as "
            "{'env_vars': {'NAME': 'value'}}"
        ) from None
