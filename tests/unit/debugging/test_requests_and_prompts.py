"""The kernel's side of conversations with ranks: requests, replies, prompts, answers, and the pausable clock."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accelerate.debugging.process_stacks import ProcessInspector, ProcessStacks
from notebook_accelerate.debugging.session import RankRequests
from notebook_accelerate.launch.run_debugging import ask_user
from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
from notebook_accelerate.launch.supervisor import command_queue
from notebook_accelerate.launch.supervisor.command_queue import PausableClock
from notebook_accelerate.telemetry import Channel, InputReply, InputRequest
from notebook_accelerate.telemetry.debug_protocol import DoneReply, PauseRequest
from tests.support.waiting import until


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Yield a connected pair of channels."""
    kernel, other = Channel.pair()
    rank = Channel(other)
    yield kernel, rank
    kernel.close()
    rank.close()


def _reply_soon(requests: RankRequests, rank_end: Channel) -> threading.Thread:
    def work() -> None:
        [(_, request)] = rank_end.receive(60.0)
        requests.deliver(3, DoneReply(request.number, "done"))  # type: ignore[attr-defined]

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_reply_reaches_its_request(ends: tuple[Channel, Channel]) -> None:
    requests = RankRequests()
    requests.open(3, ends[0], ProcessStacks)
    thread = _reply_soon(requests, ends[1])
    assert requests.ask([3], PauseRequest, 60.0)[3].text == "done"  # type: ignore[attr-defined]
    thread.join()
    assert requests.open_ranks() == [3]


def test_a_restarted_rank_is_not_waited_for(ends: tuple[Channel, Channel]) -> None:
    requests = RankRequests()
    requests.open(3, ends[0], ProcessStacks)
    replies: list[object] = []
    asking = threading.Thread(target=lambda: replies.append(requests.ask([3], PauseRequest, 60.0)))
    asking.start()
    ends[1].receive(60.0)
    kernel, other = Channel.pair()
    try:
        with requests._changed:  # Both calls happen before the thread checks again.
            requests.close(3)
            requests.open(3, kernel, ProcessStacks)
        asking.join(30.0)
        assert replies == [{}]
    finally:
        requests.close(3)
        kernel.close()
        Channel(other).close()
        asking.join()


def test_a_late_reply_is_dropped_and_a_missing_rank_is_not_awaited(ends: tuple[Channel, Channel]) -> None:
    requests = RankRequests()
    requests.open(3, ends[0], ProcessStacks)
    assert requests.ask([3], PauseRequest, 0.05) == {}
    requests.deliver(3, DoneReply(1, "late"))
    assert requests._replies == {}
    begin = time.monotonic()
    assert requests.ask([9], PauseRequest, 60.0) == {}
    assert time.monotonic() - begin < 30


def test_waiting_ends_with_the_rank(ends: tuple[Channel, Channel]) -> None:
    requests = RankRequests()
    requests.open(3, ends[0], ProcessStacks)
    timer = threading.Timer(0.1, requests.close, [3])
    timer.start()
    begin = time.monotonic()
    assert requests.ask([3], PauseRequest, 60.0) == {}
    assert time.monotonic() - begin < 30
    timer.join()


def test_a_rank_is_inspected_until_it_ends(ends: tuple[Channel, Channel]) -> None:
    requests, seen = RankRequests(), ProcessStacks("Thread 0x1:", ("main (a.c:1)",))
    requests.open(3, ends[0], lambda: seen)
    assert requests.capture_stacks(3) == seen
    requests.close(3)
    assert requests.capture_stacks(3) == ProcessStacks()


def test_a_dump_consists_of_the_text_added_by_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_text("earlier\n")
    inspector, sent = ProcessInspector(os.getpid()), []

    def write(number: int) -> None:
        sent.append(number)
        with path.open("a") as file:
            file.write("Thread 0x1:\n")

    assert inspector.read_stacks(write).dump == ""
    inspector.open_dump("/nowhere/at/all")
    inspector.open_dump(str(path))
    assert inspector.read_stacks(write).dump == "Thread 0x1:\n"
    assert sent == [signal.SIGUSR1]
    inspector.close()
    assert inspector.read_stacks(write).dump == ""


def test_a_suspended_process_gets_no_signal_and_is_named(tmp_path: Path) -> None:
    path, sent = tmp_path / "dump", []
    path.touch()
    with subprocess.Popen(["sleep", "600"]) as process:
        inspector = ProcessInspector(process.pid)
        inspector.open_dump(str(path))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        found = inspector.read_stacks(sent.append)
        process.kill()
    inspector.close()
    assert (found.dump, found.suspended) == ("", f"suspended (SIGSTOP); kill -CONT {process.pid} resumes it")
    assert sent == []


def test_a_process_in_uninterruptible_sleep_is_named_as_such(tmp_path: Path) -> None:
    """The parent of a vfork sleeps in this way until its child exits. Other processes usually do so in a driver."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    source, program, sent = tmp_path / "sleeper.c", tmp_path / "sleeper", []
    source.write_text("#include <unistd.h>\nint main(void) { if (!vfork()) { sleep(600); _exit(0); } return 0; }\n")
    subprocess.run([compiler, "-w", "-o", str(program), str(source)], check=True, timeout=300)
    with subprocess.Popen([str(program)], start_new_session=True) as process:
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: ") D " in state.read_text(), 30.0)
        found = ProcessInspector(process.pid).read_stacks(sent.append)
        os.killpg(process.pid, signal.SIGKILL)
    assert "in uninterruptible sleep (state D)" in found.suspended
    assert (found.native, sent) == ((), [])


def test_a_line_for_a_prompt_that_an_interrupt_ended_is_not_sent(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, answered = PromptQueue(), []
    queue.put(_question(ends, 1, "input", answered, 7))
    prompt = queue.claim_next(1.0)
    assert prompt is not None
    queue.withdraw(1, 7)
    monkeypatch.setattr("sys.stdin", io.StringIO("late\n"))
    ask_user(prompt, PromptQueue())
    assert capsys.readouterr().out.endswith("[rank 1] no longer waits for this line\n")
    assert answered == []


def _question(ends: tuple[Channel, Channel], rank: int, kind: str, answered: list[int], number: int = 0) -> Prompt:
    return Prompt(rank, InputRequest("> ", False, "", kind, number), ends[0], answered.append)


def test_questions_are_shown_once_and_answers_arrive(ends: tuple[Channel, Channel]) -> None:
    board, answered = PromptQueue(), []
    board.put(_question(ends, 1, "input", answered))
    question = board.claim_next(1.0)
    assert question is not None
    assert board.claim_next(0.01) is None
    question.answer("yes")
    [(_, reply)] = ends[1].receive(5.0)
    assert reply == InputReply("yes")
    assert answered == [1]
    assert board.debugged() == []


def test_a_shown_question_without_an_answer_is_returned_while_it_is_valid(
    ends: tuple[Channel, Channel],
) -> None:
    board = PromptQueue()
    board.put(_question(ends, 1, "debugger", [], 4))
    question = board.claim_next(rank=1)
    assert question is not None
    board.give_back(question)
    assert board.claim_next(rank=1) is question
    board.withdraw(1, 4)
    board.give_back(question)
    assert board.claim_next(0.01) is None
    board.put(_question(ends, 1, "debugger", [], 5))
    later = board.claim_next(rank=1)
    assert later is not None
    board.give_back(question)
    assert board.claim_next(0.01) is None
    board.drop(1)
    board.give_back(later)
    assert board.claim_next(0.01) is None


def test_a_debugger_holds_its_rank_until_it_finishes(ends: tuple[Channel, Channel]) -> None:
    board = PromptQueue()
    for rank in (2, 0):
        board.put(_question(ends, rank, "debugger", []))
    assert board.debugged() == [0, 2]
    claimed = board.claim(2)
    assert claimed is not None
    assert claimed.rank == 2
    assert board.claim(2) is None
    assert board.debugged() == [0, 2]
    assert board.await_prompt(2, 0.05) is None
    board.put(_question(ends, 2, "debugger", []))
    assert board.await_prompt(2, 1.0) is board.open_prompts()[1]
    board.drop(2)
    assert board.debugged() == [0]
    assert board.claim_next(rank=2) is None


def test_the_first_answer_counts_if_two_notebooks_show_a_question(ends: tuple[Channel, Channel]) -> None:
    board = PromptQueue()
    board.put(_question(ends, 0, "input", [], 7))
    taken = board.claim_next(1.0)
    assert taken is not None
    board.put(_question(ends, 1, "input", [], 7))
    board.withdraw(1, 6)
    assert [question.rank for question in board.open_prompts()] == [1]
    for rank in (0, 1):
        board.withdraw(rank, 7)
    assert taken.over
    assert board.open_prompts() == []


def test_a_question_can_be_requested_by_rank(ends: tuple[Channel, Channel]) -> None:
    board = PromptQueue()
    board.put(_question(ends, 1, "debugger", []))
    assert board.claim_next(0.01, among=[0]) is None
    board.put(_question(ends, 0, "input", []))
    for wanted in ({"among": [1]}, {}):
        question = board.claim_next(1.0, **wanted)
        assert question is not None
        assert question.rank == len(wanted)


def test_a_waiting_reader_is_notified_of_the_end(ends: tuple[Channel, Channel]) -> None:
    board = PromptQueue()
    timer = threading.Timer(0.1, board.close)
    timer.start()
    assert board.claim_next() is None
    timer.join()
    board.reopen()
    board.put(_question(ends, 0, "debugger", []))
    assert board.claim_next(1.0) is not None


class _Clock:
    """Replaces the module `time`, and is advanced by tests."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """Return the clock that pausable clocks read."""
    made = _Clock()
    monkeypatch.setattr(command_queue, "time", made)
    return made


def test_the_clock_is_suspended_while_anyone_waits(clock: _Clock) -> None:
    watch = PausableClock()
    watch.pause(0)
    watch.pause(("paused", 1))
    watch.pause(0)
    assert watch.suspended
    clock.now += 7
    assert watch.now() == 1000
    watch.resume(0)
    assert watch.suspended
    clock.now += 1
    watch.resume(("paused", 1))
    watch.resume(("paused", 1))
    assert not watch.suspended
    assert watch.now() == 1000
    clock.now += 2
    assert watch.now() == 1002


def test_overlapping_waits_suspend_the_clock_from_the_first_to_the_last(clock: _Clock) -> None:
    watch = PausableClock()
    watch.pause(0)
    clock.now += 5
    watch.pause(1)
    watch.resume(0)
    clock.now += 3
    assert watch.now() == 1000
    watch.resume(1)
    clock.now += 1
    assert watch.now() == 1001


def test_excluded_seconds_do_not_count(clock: _Clock) -> None:
    watch = PausableClock()
    clock.now += 10
    watch.exclude(4.0)
    assert watch.now() == 1006
    watch.pause(0)
    clock.now += 10
    watch.exclude(9.0)  # Time during a pause is not counted anyway.
    watch.resume(0)
    assert watch.now() == 1006


def test_a_wait_that_starts_while_the_run_is_held_ends(ends: tuple[Channel, Channel]) -> None:
    queue = PromptQueue()
    queue.close()
    queue.reopen()
    assert queue.claim_next(until=lambda: True) is None
    queue.put(_question(ends, 0, "debugger", []))
    assert queue.claim_next(1.0) is not None
