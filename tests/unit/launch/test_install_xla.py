"""What install_xla would do on this Python and others; nothing is installed."""

from __future__ import annotations

import sys

import pytest

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.utils import install_xla


def test_a_dry_run_says_what_would_change(capsys: pytest.CaptureFixture[str]) -> None:
    command = install_xla(dry_run=True)
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    (torch, xla) = command[-2:]
    assert torch.removeprefix("torch==") == xla.removeprefix("torch_xla[tpu]==")
    said = capsys.readouterr().out
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}, torch 2." in said
    assert "torch_xla[tpu]==" in said
    assert "--upgrade" in install_xla(upgrade=True, dry_run=True)


@pytest.mark.parametrize(("version", "platform"), [((3, 9), "linux"), ((3, 11), "darwin")])
def test_where_there_is_none(version: tuple[int, int], platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LaunchError, match=rf"no torch_xla for Python {version[0]}\.{version[1]} on {platform}"):
        install_xla(dry_run=True)
