"""A notebook's logging setup and warning filters, which are applied in another process."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.telemetry.notebook_settings import apply_notebook_settings, capture_notebook_settings


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore the root logger and the warning filters after each test."""
    handlers, level, disabled = list(logging.root.handlers), logging.root.level, logging.root.manager.disable
    with warnings.catch_warnings():
        yield
    logging.root.handlers[:], logging.root.manager.disable = handlers, disabled
    logging.root.setLevel(level)


def _elsewhere(code: str, setup: str = "") -> str:
    """Apply this process's settings in another process and run ``code`` there. Return its output."""
    script = "from notebook_accelerate.telemetry.notebook_settings import apply_notebook_settings\n"
    script += f"import logging, sys, warnings\n{setup}\n"
    script += f"data = bytes.fromhex({capture_notebook_settings().hex()!r})\n"
    script += f"apply_notebook_settings(data)\napply_notebook_settings(data)\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_a_handler_writes_once_even_if_the_settings_are_applied_twice() -> None:
    logging.root.handlers[:] = [logging.StreamHandler(sys.stdout)]
    logger = logging.getLogger("own.part")
    logger.handlers[:] = [logging.StreamHandler(sys.stderr)]
    logger.propagate = False
    try:
        assert _elsewhere("logging.error('a'); logging.getLogger('own.part').error('b')") == "a\nb\n"
    finally:
        logger.handlers.clear()
        logger.propagate = True


def test_filters_keep_their_order_and_their_patterns() -> None:
    warnings.resetwarnings()
    warnings.filterwarnings("error", "x[0-9]", RuntimeWarning)
    warnings.filterwarnings("ignore", "x1", RuntimeWarning, "shown.*", 7)
    show = "[(f[0], f[1].pattern, f[2], f[3] and f[3].pattern, f[4]) for f in warnings.filters]"
    expected = eval(show)
    assert _elsewhere(f"print({show})").strip() == repr(expected)


def test_a_library_that_is_not_imported_keeps_its_level_and_adds_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_library", types.ModuleType("some_library"))
    logger = logging.getLogger("some_library.part")
    logger.handlers[:] = [logging.StreamHandler()]
    logger.setLevel(logging.ERROR)
    show = "found = logging.getLogger('some_library.part'); print(len(found.handlers), found.level)"
    imported = "sys.modules['some_library'] = sys"
    try:
        assert _elsewhere(show) == "0 40\n"
        assert _elsewhere(show, imported) == "1 40\n"
        own = f"{imported}; logging.getLogger('some_library.part').addHandler(logging.NullHandler())"
        assert _elsewhere(show, own) == "1 40\n"
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


def test_a_file_handler_whose_folder_is_missing_writes_to_the_stream(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "a" / ".." / "log.txt", delay=True)
    handler.baseFilename = str(tmp_path / "missing" / "log.txt")
    logging.root.handlers[:] = [handler]
    assert _elsewhere("logging.error('not lost')") == "not lost\n"


def test_text_in_memory_is_not_sent_and_open_files_are_printed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        logging.root.handlers[:] = [logging.StreamHandler(io.StringIO()), logging.StreamHandler(file)]
        assert _elsewhere("logging.error('shown')") == "shown\n"


def test_unusual_handlers_do_not_prevent_a_launch() -> None:
    class Slotted:
        __slots__ = ("level",)
        level: int

    detached = io.TextIOWrapper(io.BytesIO())
    detached.detach()
    handlers: list[Any] = [Slotted(), logging.StreamHandler(detached)]
    logging.root.handlers[:] = handlers
    try:
        assert _elsewhere("logging.error('shown')") == "shown\nshown\n"
    finally:
        logging.root.handlers.clear()


def test_records_in_memory_are_not_sent() -> None:
    handler = logging.StreamHandler(sys.stderr)
    vars(handler)["records"] = [str(number) for number in range(1 << 18)]
    logging.root.handlers[:] = [handler]
    assert len(capture_notebook_settings()) < 1 << 20
    assert _elsewhere("logging.error('shown')") == "shown\n"


def test_a_filter_is_added_once_and_a_librarys_own_filter_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("some_library")
    monkeypatch.setitem(sys.modules, "some_library", library)
    own = type("Own", (logging.Filter,), {"__module__": "some_library"})
    monkeypatch.setattr(library, "Own", own, raising=False)
    logger = logging.getLogger("some_library.part")
    logger.filters[:] = [own(), logging.Filter("some_library.part.shown")]
    try:
        show = "print([vars(each) for each in logging.getLogger('some_library.part').filters])"
        assert _elsewhere(show) == "[{'name': 'some_library.part.shown', 'nlen': 23}]\n"
    finally:
        logger.filters.clear()


def test_a_filter_whose_module_is_missing_in_the_rank_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("some_library")
    library.__dict__["Own"] = type("Own", (logging.Filter,), {"__module__": "some_library", "__qualname__": "Own"})
    monkeypatch.setitem(sys.modules, "some_library", library)
    handler = logging.StreamHandler()
    handler.addFilter(library.Own())
    logging.root.handlers[:] = [handler]
    text = _elsewhere("logging.error('shown')")
    assert "A part of the notebook's logging setup is missing here: ModuleNotFoundError" in text
    assert text.endswith("shown\n")


@pytest.mark.filterwarnings("always")
def test_a_warning_names_the_object_that_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    class Locked(logging.Formatter):
        held = lock

    handler = logging.StreamHandler()
    handler.setFormatter(Locked("%(msg)s"))
    handler.addFilter(lambda _: lock.locked())
    logging.root.handlers[:] = [handler]
    monkeypatch.setattr(logging, "_logRecordFactory", lambda *_, **__: lock)
    with pytest.warns(UserWarning, match="log without") as found:
        capture_notebook_settings()
    texts = [str(each.message) for each in found]
    assert len(texts) == 3
    assert any("formatter" in text and "Locked of the StreamHandler of the root logger" in text for text in texts)
    assert any("filter" in text and "lambda> of the StreamHandler of the root logger" in text for text in texts)
    assert any("without the log record factory: it cannot be pickled" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_notebook_settings()


def test_disabled_logging_and_captured_warnings_are_inherited() -> None:
    logging.root.handlers[:] = [logging.StreamHandler()]
    logging.disable(logging.ERROR)
    logging.captureWarnings(True)
    try:
        warnings.simplefilter("always")
        code = (
            "logging.error('hidden'); warnings.warn('w'); logging.critical('c'); print(warnings.showwarning.__module__)"
        )
        assert _elsewhere(code) == "logging\nc\n"
    finally:
        logging.captureWarnings(False)
        logging.disable(logging.NOTSET)


def test_a_filter_does_not_import_its_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_library.py").write_text("class Late(UserWarning): pass\nclass Later(Late): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    warnings.filterwarnings("ignore", category=import_module("late_library").Late)
    code = f"""
print("late_library" in sys.modules)
sys.path.insert(0, {str(tmp_path)!r})
import late_library
warnings.showwarning = lambda message, category, *_: print(category.__name__)
for category in (late_library.Late, late_library.Later, UserWarning):
    warnings.warn("a message", category)
"""
    assert _elsewhere(code).split() == ["False", "UserWarning"]
    monkeypatch.delitem(sys.modules, "late_library")


class _Seen(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.getMessage() not in self.seen
        self.seen.add(record.getMessage())
        return new


class _Locked(logging.Filter):
    """An object that cannot be pickled, and whose attributes raise unusual errors."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("as planned")
        raise AttributeError(name)


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    found = [logging.getLogger(f"settings.{name}") for name in "pq"]
    yield found
    for each in found:
        each.filters.clear()


def test_equal_filters_of_two_loggers_remain_two(loggers: list[logging.Logger]) -> None:
    for each in loggers:
        each.addFilter(_Seen())
    shared = _Seen()
    for each in loggers:
        each.addFilter(shared)
    data = capture_notebook_settings()
    for each in loggers:
        each.filters.clear()
    for _ in range(2):
        apply_notebook_settings(data)
    first, second = (each.filters for each in loggers)
    assert len(first) == len(second) == 2
    assert first[0] is not second[0]
    assert first[1] is not shared
    assert first[1] is second[1]


def test_a_filter_that_cannot_be_sent_does_not_end_a_launch(loggers: list[logging.Logger]) -> None:
    loggers[0].addFilter(_Locked())
    warnings.simplefilter("error")
    assert capture_notebook_settings()
