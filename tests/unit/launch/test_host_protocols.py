"""The events of all protocols share one registry by class name."""

from __future__ import annotations

from types import ModuleType

import pytest

from notebook_accelerate.launch.hosts.ray import ray_backend
from notebook_accelerate.launch.hosts.remote import host_protocol
from notebook_accelerate.telemetry import Event, debug_protocol


@pytest.mark.parametrize("module", [ray_backend, host_protocol, debug_protocol])
def test_no_protocol_overrides_an_event_of_another(module: ModuleType) -> None:
    names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    registered = [name for name in names if name in Event.registry]
    assert registered
    assert {Event.registry[name] for name in registered} == {vars(module)[name] for name in registered}
