"""Finding the rank that failed first and those that failed only as a consequence, and the texts of the messages."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accelerate.hardware import detection
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.launch.state.run_events import FailuresRecorded, RunEnded
from notebook_accelerate.telemetry import ExceptionInfo, FailureEvent, FrameInfo, RankFailure
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import chain_of, format_chain
from notebook_accelerate.worker.entry import failure_event
from tests.support.runs import make_run


def _failed(rank: int, time: float, kind: str = "KeyError", message: str = "'x'", line: int = 3) -> RankFailure:
    frames = (FrameInfo("train.py", line, "train", "x"),)
    return RankFailure(rank, "exception", time, f"{kind}: {message}", (ExceptionInfo(kind, message, frames),))


LOST = [
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:23"),
    ("RuntimeError", "[/pytorch/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer"),
    ("RuntimeError", "Application timeout caused pair closure"),
    ("torch.distributed.DistBackendError", "NCCL error in: ... remote process exited or there was a network error"),
    ("torch.distributed.DistNetworkError", "The client socket has failed to connect to 127.0.0.1:29500"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
]


KILLED = failures.from_exit(1, Exit(signal=9), oom_kills=0)


@pytest.mark.parametrize(("kind", "message"), LOST)
@pytest.mark.parametrize("cause", [_failed(1, 2.0), KILLED], ids=["error", "death"])
def test_a_lost_peer_is_a_consequence_even_if_it_was_reported_earlier(
    cause: RankFailure, kind: str, message: str
) -> None:
    found = failures.ordered([_failed(0, 1.0, kind, message, line=9), cause])
    assert [(f.rank, f.consequence) for f in found] == [(1, False), (0, True)]


def test_if_all_ranks_only_lost_a_peer_the_earliest_is_first() -> None:
    kind, message = LOST[0]
    found = failures.ordered([_failed(1, 2.0, kind, message), _failed(0, 1.0, kind, message)])
    assert found[0].rank == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "Connection closed by peer"),
        ("RuntimeError", "CUDA out of memory"),
        ("KeyError", "Broken pipe"),
        ("requests.exceptions.ConnectionError", "Connection refused"),
    ],
)
def test_other_errors_are_ordered_by_time(kind: str, message: str) -> None:
    found = failures.ordered([_failed(1, 2.0), _failed(0, 1.0, kind, message, line=9)])
    assert [(f.rank, f.consequence) for f in found] == [(0, False), (1, True)]


def test_the_same_failure_everywhere_is_one_group_and_not_a_consequence() -> None:
    found = failures.ordered([_failed(rank, 1.0 + rank) for rank in (2, 0, 1)])
    assert [(f.rank, f.consequence) for f in found] == [(0, False), (1, False), (2, False)]
    assert [[f.rank for f in group] for group in failures.grouped(found)] == [[0, 1, 2]]
    lines = failures.failure_lines(found)
    assert lines[0] == "ranks 0–2 failed:"
    assert sum("KeyError" in line for line in lines) == 1


def test_messages_within_a_group_may_differ_but_not_places() -> None:
    same = failures.ordered([_failed(0, 1.0, message="'rank 0'"), _failed(1, 1.1, message="'rank 1'")])
    assert len(failures.grouped(same)) == 1
    apart = failures.ordered([_failed(0, 1.0, line=3), _failed(1, 1.1, line=4)])
    assert len(failures.grouped(apart)) == 2


def _ended(message: str) -> str:
    state = SimpleNamespace(failures=(_failed(0, 1.0, "ValueError", message),), attempts=(1,))
    return failures.failed(7, state).message  # type: ignore[arg-type]


def test_the_error_contains_all_lines_of_a_short_message() -> None:
    text = _ended('Error(s) in loading state_dict:\n\tMissing key(s): "weight".\n')
    first = "run 7 failed. rank 0: ValueError: Error(s) in loading state_dict: at train.py, line 3"
    assert text == first + '\n  \tMissing key(s): "weight".'


def test_the_error_contains_the_start_of_a_long_message() -> None:
    assert len(_ended("x\n" * 10**6)) < 1000
    assert len(_ended("a\n" + "x" * 10**6)) < 1500
    assert _ended("a\n" + "x" * 10**6).endswith("x …")


def test_without_failures_the_lists_are_empty() -> None:
    assert failures.ordered([]) == []
    assert failures.grouped([]) == []
    assert failures.failure_lines([]) == []


def test_the_text_names_the_first_failure_and_its_consequences() -> None:
    found = failures.ordered([_failed(0, 1.0, *LOST[0], line=9), _failed(1, 2.0)])
    text = "\n".join(failures.failure_lines(found))
    assert text.startswith("rank 1 failed first:\n  train.py, line 3, in train\n    x\nKeyError: 'x'")
    assert "rank 0 failed because of that:\n  RuntimeError" in text
    assert failures.headline(found) == "rank 1: KeyError: 'x' at train.py, line 3"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([0, 2], "ranks 0, 2"),
        ([3, 1, 2], "ranks 1–3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 3], "ranks 0, 1, 3"),
        ([8, 0, 1, 2, 3], "ranks 0–3, 8"),
    ],
)
def test_names_of_ranks_are_shortened(ranks: list[int], text: str) -> None:
    assert rank_names(ranks) == text


def test_a_death_in_a_slice_names_the_memory_of_the_slice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user.slice/notebook.scope\n")
    (tmp_path / "user.slice" / "notebook.scope").mkdir(parents=True)
    files = {"memory.max": 3 << 28, "memory.current": 1 << 28, "memory.events": "oom 9\noom_kill 7"}
    for name, value in files.items():
        (tmp_path / "user.slice" / name).write_text(f"{value}\n")
    before = failures.oom_kill_count() or 0
    monkeypatch.setattr(detection, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(detection, "_GROUPS", tmp_path)
    found = failures.from_exit(2, Exit(signal=9, max_rss=700 << 20), oom_kills=0)
    assert "likely an out-of-memory killer" in found.message
    assert "the machine has 805 MB, " in found.message
    assert 7 <= (failures.oom_kill_count() or 0) <= 7 + before


@pytest.mark.parametrize(
    ("end", "oom", "words"),
    [
        (Exit(signal=9, max_rss=3 << 30), 1, ["SIGKILL", "the out-of-memory killer ended it", "3.22 GB", "free now"]),
        (Exit(signal=9, max_rss=1 << 60), 0, ["SIGKILL", "likely an out-of-memory killer", "the machine has"]),
        (
            Exit(signal=9, max_rss=1 << 20),
            0,
            ["SIGKILL", "the rank itself or another process sent it", "no out-of-memory kill"],
        ),
        (Exit(signal=9), None, ["SIGKILL", "perhaps the out-of-memory killer", "the machine has"]),
        (Exit(signal=11), 0, ["SIGSEGV (signal 11)", "native code"]),
        (Exit(signal=7), 0, ["SIGBUS", "/dev/shm"]),
        (Exit(signal=6), 0, ["SIGABRT"]),
        (Exit(signal=15), 0, ["SIGTERM"]),
        (Exit(signal=10), 0, ["SIGUSR1 (signal 10)"]),
        (Exit(signal=64), 0, ["signal 64"]),
        (Exit(signal=50), 0, ["signal 50"]),
        (Exit(code=3), 0, ["exit status 3", "os._exit"]),
        (Exit(code=0), 0, ["exit status 0"]),
        (Exit(), 0, ["ended"]),
    ],
)
def test_a_death_is_reported_with_its_signal_and_its_likely_cause(end: Exit, oom: int | None, words: list[str]) -> None:
    found = failures.from_exit(2, end, oom_kills=oom)
    assert all(word in found.message for word in words), found.message
    assert "None" not in found.message
    assert found.kind == ("exit" if end.signal is None else "signal")


def _event(error: BaseException, kind: str = "exception") -> FailureEvent:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - SystemExit too
        return failure_event(caught, kind)


def _failure(rank: int, event: FailureEvent) -> RankFailure:
    return failures.from_event(rank, event, failures.ExceptionLoader())


class SlowError(Exception):
    def __reduce__(self) -> Any:
        return time.sleep, (2,)


class OddError(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code, self.reason = code, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return OddError, (self.code,)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class HoldingError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def test_an_exception_comes_back_as_itself() -> None:
    found = _failure(1, _event(KeyError("lost")))
    assert isinstance(found.exception, KeyError)
    assert found.message == "KeyError: 'lost'"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OddError(3, reason="bad"), ["OddError: 3 bad", "cannot be unpickled"]),
        (HoldingError(), ["HoldingError: holds a lock", "cannot be pickled"]),
        (UnspeakableError(), ["UnspeakableError: <its message cannot be shown: ValueError>"]),
    ],
)
def test_exceptions_that_cannot_be_pickled_are_still_reported(error: Exception, words: list[str]) -> None:
    found = _failure(1, _event(error))
    assert all(word in found.message for word in words), found.message
    assert found.chain[-1].frames


def test_all_exceptions_of_a_run_share_one_time_limit_for_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "UNPICKLE_SECONDS", 0.1)
    exceptions = failures.ExceptionLoader()
    first = failures.from_event(0, _event(SlowError()), exceptions)
    second = failures.from_event(1, _event(KeyError("x")), exceptions)
    assert "the exception takes more than 0.1 s" in first.message
    assert "KeyError: 'x'  (not unpickled: the exceptions of other ranks took 0.1 s)" in second.message
    assert second.exception is None
    assert isinstance(_failure(1, _event(KeyError("x"))).exception, KeyError)


def test_system_exit_is_reported_with_its_status() -> None:
    assert "sys.exit(3)" in _failure(0, _event(SystemExit(3), "exit")).message
    assert "sys.exit('gone')" in _failure(0, _event(SystemExit("gone"), "exit")).message


def test_chained_exceptions_notes_and_groups_are_reported() -> None:
    try:
        try:
            raise KeyError("root")
        except KeyError as root:
            raise ValueError("on top") from root
    except ValueError as error:
        if hasattr(error, "add_note"):
            error.add_note("a note")
        chain = chain_of(error)
    text = "\n".join(format_chain(chain))
    assert text.index("KeyError: 'root'") < text.index("direct cause") < text.index("ValueError: on top")
    assert [info.link for info in chain] == ["cause", ""]


def test_an_exception_that_is_its_own_cause_does_not_loop() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert len(chain_of(first)) == 2


def test_the_traceback_of_many_functions_is_shortened() -> None:
    functions: dict[str, Any] = {"f200": lambda: int("bottom")}
    exec("\n".join(f"def f{n}(): f{n + 1}()" for n in range(200)), functions)
    with pytest.raises(ValueError, match="bottom") as caught:
        functions["f0"]()
    frames = chain_of(caught.value)[-1].frames
    assert len(frames) < 100
    assert any("more frames" in frame.function for frame in frames)


def _ended_with(*found: RankFailure) -> RunEnded:
    state = make_run()._internals.journal.state.apply(FailuresRecorded(failures.ordered(list(found))), 1.0)
    return failures.failed(7, state)


def test_the_type_of_the_error_distinguishes_an_exception_from_a_death() -> None:
    died = _ended_with(failures.from_exit(0, Exit(signal=9), oom_kills=0))
    assert died.error == "WorkerDiedError"
    raised = _ended_with(_failed(1, 1.0), _failed(0, 0.5, *LOST[0], line=9))
    assert raised.error == "WorkerError"
    assert raised.message == "run 7: rank 1 failed first: KeyError: 'x' at train.py, line 3"
