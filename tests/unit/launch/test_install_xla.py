"""The packages that install_xla and install_tpu choose for this and other Python versions. Nothing is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.utils import install_tpu, install_xla, torch_xla


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there is no torch_xla for this Python")
def test_a_dry_run_lists_the_changes(capsys: pytest.CaptureFixture[str]) -> None:
    command = install_xla(dry_run=True)
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    (torch, xla) = command[-2:]
    assert torch.removeprefix("torch==") == xla.removeprefix("torch_xla[tpu]==")
    said = capsys.readouterr().out
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}, torch 2." in said
    assert "torch_xla[tpu]==" in said
    assert "--upgrade" in install_xla(upgrade=True, dry_run=True)


def _with(monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], **versions: str) -> None:
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(torch_xla, "_installed", lambda name: versions.get(name, "not installed"))


@pytest.mark.parametrize(
    ("python", "torch", "said"),
    [
        ((3, 12), "2.13.0+cu128", "This downgrades torch 2.13.0+cu128 to 2.9"),
        ((3, 12), "2.13.0", "utils.install_tpu()"),
        ((3, 11), "2.13.0", "needs Python 3.12 or later"),
    ],
)
def test_a_downgrade_of_torch_is_reported_with_an_alternative_to_install(
    python: tuple[int, int], torch: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch, python, torch=torch)
    install_xla(dry_run=True)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("versions", [{"torch": "2.9.1"}, {"torch": "2.8.0"}, {}])
def test_without_a_downgrade_there_is_no_note(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch, (3, 12), **versions)
    install_xla(dry_run=True)
    said = capsys.readouterr().out
    assert "downgrade" not in said
    assert "install_tpu" not in said


@pytest.mark.parametrize(
    ("versions", "wanted", "said"),
    [
        ({"torch": "2.13.0+cpu"}, "torch==2.13.0+cpu", ""),
        ({"torch": "2.9.0"}, "torch>=2.11.0,<=2.15.0", "This replaces torch 2.9.0"),
        ({}, "torch>=2.11.0,<=2.15.0", "torch not installed"),
        ({"torch": "2.13.0", "torch_tpu": "0.2.0"}, "torch==2.13.0", "nothing to do"),
        ({"torch": "2.13.0", "torch_xla": "2.9.0"}, "torch==2.13.0", "torch_xla is installed, too"),
    ],
)
def test_torch_tpu_keeps_a_torch_that_it_works_with(
    versions: dict[str, str],
    wanted: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _with(monkeypatch, (3, 12), **versions)
    command = install_tpu(dry_run=True)
    assert command[-2:] == [wanted, "torch_tpu>=0.2"]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("install", "python", "platform", "said"),
    [
        (install_xla, (3, 9), "linux", r"no torch_xla for Python 3\.9 on linux"),
        (install_xla, (3, 14), "linux", r"built for Linux and Python 3\.10 to 3\.13"),
        (install_xla, (3, 11), "darwin", r"no torch_xla for Python 3\.11 on darwin"),
        (install_tpu, (3, 11), "linux", r"no torch_tpu for Python .*install_xla"),
        (install_tpu, (3, 12), "darwin", r"no torch_tpu for Python .*install_xla"),
    ],
)
def test_a_system_without_a_suitable_package_is_reported(
    install: Callable[..., object], python: tuple[int, int], platform: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, python)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LaunchError, match=said):
        install(dry_run=True)
