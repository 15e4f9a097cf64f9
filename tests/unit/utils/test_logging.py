"""Loggers that know their rank, and the progress bar, in a single process."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from notebook_accelerate import telemetry
from notebook_accelerate.integrations import reporting
from notebook_accelerate.logging import MultiProcessAdapter, get_logger
from notebook_accelerate.state import PartialState, reset_shared_state
from notebook_accelerate.telemetry.events import Event, ProgressEvent
from notebook_accelerate.utils import tqdm


@pytest.fixture
def state() -> Iterator[PartialState]:
    reset_shared_state()
    yield PartialState(cpu=True)
    reset_shared_state()


@pytest.fixture
def root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_a_logger_without_a_state_raises() -> None:
    reset_shared_state()
    with pytest.raises(RuntimeError, match=r"logger 'early'.*Accelerator\(\) or a PartialState\(\)"):
        get_logger("early").error("too early")


@pytest.mark.usefixtures("state")
def test_records_name_the_line_that_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("lines")
    with caplog.at_level(logging.INFO, logger="lines"):
        logger.info("plain %s", 1)
        logger.log(logging.INFO, "direct")
        logger.info("ordered", main_process_only=False, in_order=True)
        logger.warning_once("once")
        logger.warning_once("once")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"[RANK 0] {text}" for text in ("plain 1", "direct", "ordered", "once")]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}
    assert {record.funcName for record in caplog.records} == {"test_records_name_the_line_that_logged"}


@pytest.mark.usefixtures("state")
def test_two_loggers_each_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "two"):
        logger = get_logger(name)
        for _ in range(3):
            logger.warning_once("careful", main_process_only=True)
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("state", "root_level")
def test_the_level_is_given_or_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("given", log_level="debug").isEnabledFor(logging.DEBUG)
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    logger = get_logger("read")
    assert isinstance(logger, MultiProcessAdapter)
    assert not logger.isEnabledFor(logging.WARNING)
    assert logging.getLogger().level == logging.ERROR


@pytest.mark.leaks_ok("tqdm's monitor thread ends with the process")
@pytest.mark.usefixtures("state")
def test_the_main_process_shows_a_bar() -> None:
    pytest.importorskip("tqdm")
    out = io.StringIO()
    assert list(tqdm(range(3), file=out, desc="train")) == [0, 1, 2]
    assert "train" in out.getvalue()
    assert "3/3" in out.getvalue()
    with pytest.raises(ValueError, match="pass main_process_only=True as a keyword"):
        tqdm(True, range(3))


@pytest.mark.leaks_ok("tqdm's monitor thread ends with the process")
@pytest.mark.usefixtures("state")
def test_a_bar_in_a_launched_run_emits_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    reporting.connect_libraries(["tqdm"])  # Every rank makes this call.
    events: list[Event] = []
    monkeypatch.setattr(telemetry, "current_sink", object)
    monkeypatch.setattr(telemetry, "emit", events.append)
    list(tqdm(range(4), file=io.StringIO(), desc="epoch 1", mininterval=0))
    assert events[-1] == ProgressEvent(step=4, total=4, label="epoch 1")
    assert next(event.step for event in events if isinstance(event, ProgressEvent)) == 0


@pytest.mark.leaks_ok("tqdm's monitor thread ends with the process")
def test_the_bar_of_another_rank_is_disabled(monkeypatch: pytest.MonkeyPatch, state: PartialState) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setitem(state.__dict__, "local_process_index", 1)
    quiet, loud = io.StringIO(), io.StringIO()
    list(tqdm(range(3), file=quiet))
    list(tqdm(range(3), file=loud, main_process_only=False))
    assert quiet.getvalue() == ""
    assert "3/3" in loud.getvalue()
