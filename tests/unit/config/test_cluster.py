from __future__ import annotations

from typing import Any

import pytest

import notebook_accelerate
from notebook_accelerate import LaunchConfig, RayCluster
from notebook_accelerate.config.cluster import resolve_cluster


def test_on_selects_a_cluster() -> None:
    assert notebook_accelerate.RayCluster is RayCluster
    assert LaunchConfig().cluster is None
    assert LaunchConfig(on="ray").cluster == RayCluster()
    client = resolve_cluster("ray://head:10001")
    assert client == RayCluster(address="ray://head:10001")
    assert (RayCluster().description, client.description) == ("a Ray cluster", "the Ray cluster at ray://head:10001")


@pytest.mark.parametrize("on", ["slurm", "ray://", "", 3, "head:6379"])
def test_unknown_values_of_on_raise_with_the_allowed_ones(on: Any) -> None:
    with pytest.raises(ValueError, match=r"on=.* is not allowed; pass 'ray', 'ray://host:port', RayCluster"):
        LaunchConfig(on=on)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("address", "", "pass 'host:port'"),
        ("cpus", -1, "at least 0"),
        ("gpus", 0.5, "ranks cannot share a GPU"),
        ("gpus", True, "whole number"),
        ("resources", {"CPU": 1}, "write cpus=1 instead"),
        ("resources", {"disk": 0}, "above 0"),
        ("resources", ["disk"], "pass a dict"),
        ("strategy", "pack", "'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD'"),
        ("when_full", "panic", "'wait', 'refuse'"),
        ("wait", 0, "above 0"),
        ("start_timeout", "soon", "above 0"),
        ("runtime_env", {"pip": object()}, "plain values"),
        ("runtime_env", "pip", "the value is not a dict"),
    ],
)
def test_errors_name_the_wrong_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        RayCluster(**{field: value})
    assert field.rstrip("s") in str(caught.value)


def test_settings_that_contradict_a_cluster_raise() -> None:
    with pytest.raises(ValueError, match="num_nodes=2 is for several notebooks"):
        LaunchConfig(on="ray", num_nodes=2, use_port=29500)
    with pytest.raises(ValueError, match="start_method='fork' is for this machine"):
        LaunchConfig(on="ray", start_method="fork")
