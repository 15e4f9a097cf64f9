"""Megatron-LM launched from a notebook. Run these tests with `make test-megatron`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, notebook_launcher
from tests.megatron.trainings import Case, run
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)


def test_a_launch_passes_the_plugin() -> None:
    case, before = Case(tp=2), dict(os.environ)
    expected = run_ranks(run, case, world_size=2)
    config = LaunchConfig(accelerator={"megatron_lm_plugin": case.plugin()}, use_port=0)
    started: Any = notebook_launcher(run, (replace(case, launched=True),), num_processes=2, config=config)
    assert list(started.results) == expected
    assert dict(os.environ) == before
