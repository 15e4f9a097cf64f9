"""Error messages for errors of Ray and its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from notebook_accelerate.config.hidden_values import hide_credentials
from notebook_accelerate.launch.hosts.host_facts import version_differences


def mismatches(ours: dict[str, str], facts: list[dict[str, Any]]) -> str:
    """Return a message about nodes whose versions do not match the kernel's; "" when all match."""
    lines: list[str] = []
    for fact in facts:
        lines += version_differences(f"node {fact['host']} ({fact['address']})", fact["versions"], ours, "the notebook")
    if not lines:
        return ""
    return (
        f"the versions on the nodes differ from the notebook's, so the function was not sent: {'; '.join(lines)}. "
        "Install the same versions there, or pass RayCluster(runtime_env={'pip': [...]})"
    )


def unreachable(address: str, error: Exception) -> str:
    """Return why a cluster could not be reached, with advice."""
    text = str(error).strip()
    if "Version mismatch" in text or "version mismatch" in text:
        return f"the notebook's Ray or Python does not match the cluster's: {' '.join(text.split())}"
    if address == "auto":
        return (
            "no Ray cluster was found. Start one with `ray start --head` (or ray.init() in the notebook), set the "
            "variable RAY_ADDRESS, or pass on='ray://host:10001'"
        )
    lines = text.splitlines() or [""]
    summary = " ".join(dict.fromkeys([lines[0].strip(), lines[-1].strip()]))  # the error, and the end of its traceback
    hint = "; on a machine that is not one of its nodes, pass on='ray://host:10001'"
    if address.startswith("ray://"):
        hint = ""
    return (
        f"the Ray cluster at {hide_credentials(address)} could not be reached: {type(error).__name__}: {summary}{hint}"
    )


_ADDRESS = re.compile(r"address: ([\w.:]+)")


def cause(error: BaseException) -> str:
    """Return one sentence about why an actor has ended or could not start."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "node has died" in text or "marked dead" in text or "node was terminated" in text or "node died" in text:
        found = _ADDRESS.search(text)
        return f"the Ray node{' at ' + found.group(1) if found else ''} has died"
    if "RuntimeEnvSetupError" in type(error).__name__:
        return f"the runtime environment could not be set up: {' '.join(lines)[:500]}"
    if "ray.kill" in text:
        return "its actor was killed by ray.kill"
    if "worker process has died" in text or "is unavailable" in text:
        return "its actor's process has died: killed, or ended by Ray (out of memory, preempted)"
    relevant = [line for line in lines if not line.startswith(("class_name", "actor_id", "pid:", "namespace", "ip:"))]
    return " ".join(relevant)[:500] or type(error).__name__


def amounts(resources: Mapping[str, float], names: list[str]) -> str:
    """Return a text with the amount of each resource."""
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)
