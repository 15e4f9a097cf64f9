"""Tests that are marked nightly run only on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_nightly_tests_are_deselected_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def collected(value: str) -> str:
        monkeypatch.setenv("TEST_NIGHTLY", value)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/faults/test_remote.py"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "1/3 tests collected (2 deselected)" in collected("")
    assert "3 tests collected" in collected("yes")
