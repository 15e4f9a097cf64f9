"""Where a launch's ranks run when it is not on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's placement strategies: on few or many nodes, if possible or (STRICT) or not at all."""
WHEN_FULL = ("wait", "refuse")
RAY_CLIENT = "ray://"


@dataclass(kw_only=True, frozen=True)
class RayCluster:
    """A Ray cluster, and what each rank takes of it.

    Raises:
        ValueError: A field has a value that is not allowed; the message says which are.
    """

    address: str = "auto"
    """host:port of the cluster's head, ray://host:port for a kernel outside of it, or auto: the notebook's own
    ``ray.init()``, the variable RAY_ADDRESS, or the cluster of this machine."""
    cpus: float = 1
    """Processors for each rank; also the threads of its operators."""
    gpus: int | None = None
    """GPUs for each rank; None means one where the cluster has some and the launch is not for the CPU."""
    resources: Mapping[str, float] | None = None
    """Custom resources for each rank, by name."""
    strategy: str = "PACK"
    """PACK (few nodes), SPREAD (many), STRICT_PACK (one node or none) or STRICT_SPREAD (a node for each rank)."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment for the ranks: working_dir, py_modules, pip, env_vars, ..."""
    when_full: str = "wait"
    """What to do while the cluster has not enough free: wait (for ``wait`` seconds at most) or refuse."""
    wait: float = 300.0
    """Seconds to wait for free resources."""
    start_timeout: float = 120.0
    """Seconds for each step of the start: reaching the cluster, starting the actors, starting the ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address or self.address == RAY_CLIENT:
            raise ValueError(f"address={self.address!r} is not allowed; pass 'host:port', 'ray://host:port' or 'auto'")
        for name, allowed in (("strategy", STRATEGIES), ("when_full", WHEN_FULL)):
            if getattr(self, name) not in allowed:
                one = ", ".join(map(repr, allowed))
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; pass one of {one}")
        for name in ("cpus", "wait", "start_timeout"):
            _number(name, getattr(self, name), zero=name == "cpus")
        if self.gpus is not None and (isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 0):
            raise ValueError(f"gpus={self.gpus!r} is not allowed; pass a whole number: ranks do not share a GPU")
        _resources(self.resources)
        _runtime_env(self.runtime_env)

    @property
    def by_client(self) -> bool:
        """Whether the cluster is reached through Ray's client, from a machine outside of it."""
        return self.address.startswith(RAY_CLIENT)

    @property
    def where(self) -> str:
        """The cluster, as a sentence calls it."""
        return "a Ray cluster" if self.address == "auto" else f"the Ray cluster at {self.address}"


def cluster_of(on: object) -> RayCluster | None:
    """Return the cluster that ``on`` means; None for this machine.

    Raises:
        ValueError: It means none.
    """
    if on is None or isinstance(on, RayCluster):
        return on
    if on == "ray":
        return RayCluster()
    if isinstance(on, str) and on.startswith(RAY_CLIENT) and on != RAY_CLIENT:
        return RayCluster(address=on)
    raise ValueError(
        f"on={on!r} is not allowed; pass 'ray', 'ray://host:port', RayCluster(address='host:port', ...), or None for "
        "this machine"
    )


def _number(name: str, value: object, *, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name}={value!r} is not allowed; pass a number {'of at least' if zero else 'above'} 0")


def _resources(resources: object) -> None:
    if resources is None:
        return
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise ValueError(f"resources={resources!r} is not allowed; pass a dict, as resources={{'fast_disk': 1}}")
    for name, value in resources.items():
        if name in ("CPU", "GPU"):
            raise ValueError(f"resources={{{name!r}: {value!r}}}: write {name.lower()}s={value!r} instead")
        _number(f"resources[{name!r}]", value)


def _runtime_env(runtime_env: object) -> None:
    if runtime_env is None:
        return
    try:
        if not isinstance(runtime_env, Mapping):
            raise TypeError("it is not a dict")
        json.dumps(dict(runtime_env))
    except TypeError as error:
        raise ValueError(
            f"runtime_env={runtime_env!r} is not allowed ({error}); pass a dict of plain values, as "
            "runtime_env={'env_vars': {'NAME': 'value'}}"
        ) from None


__all__ = ["RayCluster", "cluster_of"]
