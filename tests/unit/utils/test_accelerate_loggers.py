"""The warnings that Accelerate 1.15 logs are logged under the names of its loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import infer_auto_device_map, load_checkpoint_in_model
from notebook_accelerate.big_modeling.dispatching import _warn_about_peer_to_peer
from notebook_accelerate.hardware import nvml
from notebook_accelerate.utils import FullyShardedDataParallelPlugin, save

THEIRS, OWN = logging.getLogger("accelerate"), logging.getLogger("notebook_accelerate")


@pytest.fixture(autouse=True)
def same_levels() -> Iterator[None]:
    yield
    for logger in (THEIRS, OWN):
        logger.setLevel(logging.NOTSET)


def _names(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.name, record.levelname) for record in caplog.records]


class Head(nn.Module):
    """A model whose configuration requests tied weights, which are not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head


def test_names_that_do_not_match_a_checkpoint_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path / "model.safetensors", safe_serialization=True)
    load_checkpoint_in_model(nn.Linear(2, 2, bias=False), str(tmp_path))
    assert _names(caplog) == [("accelerate.utils.modeling", "WARNING")]
    assert "extra" in caplog.text


def test_tensors_with_several_names_are_logged_when_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = torch.ones(2)
    save({"a": shared, "b": shared}, tmp_path / "x.safetensors", safe_serialization=True)
    assert _names(caplog) == [("accelerate.utils.other", "WARNING")]
    assert "Removed shared tensor {'b'} while saving" in caplog.text


def test_weights_that_should_be_tied_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Head()
    infer_auto_device_map(model, max_memory={"cpu": "1GB"})
    save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    load_checkpoint_in_model(model, str(tmp_path))
    assert _names(caplog) == 2 * [("accelerate.utils.modeling", "WARNING")]
    assert caplog.text.count("The model weights are not tied") == 2


def test_a_device_that_is_too_small_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # Each layer takes 80 bytes.
    with caplog.at_level(logging.INFO):
        assert infer_auto_device_map(model, max_memory={0: 100, 1: 400, "cpu": 400}) == {"": 1}
    assert _names(caplog)[-1] == ("accelerate.utils.modeling", "INFO")
    assert "too small for the next one: 0 (it needs 160 B)" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_version": 2, "backward_prefetch": "BACKWARD_PRE"},
        {"fsdp_version": 2, "use_orig_params": True},
        {"fsdp_version": 2, "sync_module_states": True},
        {"sharding_strategy": "FULL_SHARD"},
    ],
)
def test_obsolete_settings_are_logged(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    FullyShardedDataParallelPlugin(**settings)
    assert _names(caplog) == [("accelerate.utils.dataclasses", "WARNING")]
    assert list(settings)[-1] in caplog.text


def test_drivers_with_defects_in_peer_to_peer_access_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "check_cuda_p2p_ib_support", lambda: False)
    _warn_about_peer_to_peer([0, "cpu"])
    assert not caplog.records
    _warn_about_peer_to_peer([0, 1, "cpu"])
    assert _names(caplog) == [("accelerate.big_modeling", "WARNING")]


@pytest.mark.parametrize("logger", [THEIRS, OWN])
def test_both_packages_loggers_silence_and_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logger: logging.Logger
) -> None:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.name)

    kept: list[str] = []
    handler = Kept()
    shared = torch.ones(2)
    logger.addHandler(handler)
    try:
        save({"a": shared, "b": shared}, tmp_path / "x.safetensors", safe_serialization=True)
        logger.setLevel(logging.ERROR)
        save({"a": shared, "b": shared}, tmp_path / "x.safetensors", safe_serialization=True)
    finally:
        logger.removeHandler(handler)
    assert kept == ["accelerate.utils.other"] == [record.name for record in caplog.records]
