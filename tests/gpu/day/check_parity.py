"""The same training with the real Accelerate and with this package: bitwise equal losses and weights."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.day.trainings import CASES
from tests.support.gpu import Figure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]


@functools.cache
def _sides() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu.day.trainings"]
    processes = {
        package: subprocess.Popen([*command, package], stdout=subprocess.PIPE, text=True)
        for package in ("accelerate", "notebook_accelerate")
    }
    return {
        package: json.loads(process.communicate(timeout=110)[0].strip().splitlines()[-1])
        for package, process in processes.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_equal_to_accelerate(name: str, figure: Figure) -> None:
    theirs, ours = _sides()["accelerate"][name], _sides()["notebook_accelerate"][name]
    peaks = theirs.pop("peak"), ours.pop("peak")
    figure(f"peak of memory, {name}: Accelerate, this package", f"{peaks[0] >> 20} and {peaks[1] >> 20} MiB")
    assert ours == theirs
