"""Messages about runs: their events and texts, receivers that are slow or down, and secrets."""

from __future__ import annotations

import json
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, Run, notebook_launcher, open_run
from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch import notifying
from notebook_accelerate.launch.notifying import Notifier, finish_messages
from notebook_accelerate.launch.state.run_events import AttemptEnded, RunEnded, RunStalled, WarningAdded
from notebook_accelerate.telemetry import MetricEvent, current_sink
from notebook_accelerate.telemetry.store import Record
from tests.support.detached import user_folder
from tests.support.ports import free_port
from tests.support.runs import START, launch, make_run
from tests.support.waiting import until

TOKEN = "T0KEN-hunter2"


class Receiver(ThreadingHTTPServer):
    """A server that keeps the messages it receives. It replies to a request once ``replies`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.replies = threading.Event()
        self.replies.set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hooks/{TOKEN}"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.messages.append(json.loads(data))
        self.server.replies.wait(30)
        self.send_response(500 if "broken" in self.path else 302 if "moved" in self.path else 200)
        self.send_header("Location", self.server.url)
        self.end_headers()
        with suppress(OSError):  # The sender does not read the answer.
            for _ in range(20 if "huge" in self.path else 0):
                self.wfile.write(bytes(1 << 20))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("no_proxy", "*")
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.replies.set()
        until(lambda: not _senders())
        server.shutdown()


def _senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "notebook-accelerate-notify"]


def _succeed() -> None:
    pass


def _fail() -> None:
    raise ValueError("no data")


def _lose() -> None:
    sink = current_sink()
    assert sink is not None
    for step in range(6):
        sink.emit(MetricEvent({"loss": float("nan") if step > 2 else 1.0}, step))


def _run(function: Callable[..., Any], *arguments: object, **options: Any) -> None:
    with suppress(WorkerError):
        launch(function, *arguments, num_processes=1, name="made", **options)


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (_succeed, {}, [("ended", r"made: succeeded after [\d.]+ s$")]),
        (_fail, {}, [("failed", r"made: failed after [\d.]+ s\n.*rank 0.*ValueError: no data")]),
        (_fail, {"max_restarts": 1}, [("failed", "rank 0 failed: ValueError: no data"), ("failed", "no data")]),
        (_lose, {}, [("warning", "NaN since step 3: loss"), ("ended", "succeeded.*\nNaN since step 3: loss")]),
    ],
)
def test_the_end_a_failure_and_a_nan_are_reported(
    function: Callable[[], None], options: dict[str, Any], expected: list[tuple[str, str]], receiver: Receiver
) -> None:
    _run(function, notify=receiver.url, **options)
    until(lambda: len(receiver.messages) >= len(expected))
    assert receiver.events == [event for event, _ in expected]
    for message, (_, text) in zip(receiver.messages, expected, strict=True):
        assert message["run"] == "made"
        assert re.search(text, message["text"]), message


def test_a_function_receives_the_message_of_an_inline_run() -> None:
    messages: list[dict[str, str]] = []
    notebook_launcher(_succeed, num_processes=1, start_method="inline", notify=messages.append)
    until(lambda: bool(messages))
    assert messages[0]["event"] == "ended"


def test_a_detached_run_sends_messages_from_its_own_process(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with user_folder(tmp_path, monkeypatch):
        notebook_launcher(_succeed, num_processes=1, detach=True, panel=False, notify=receiver.url)
        until(lambda: receiver.events == ["ended"])


# ---- receivers that are slow or down


def test_a_run_does_not_wait_for_a_slow_receiver(receiver: Receiver) -> None:
    receiver.replies.clear()
    _run(_lose, notify=receiver.url)
    assert receiver.events in ([], ["warning"])  # The second message waits until the receiver replies to the first.
    receiver.replies.set()
    until(lambda: receiver.events == ["warning", "ended"])


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("down", "URLError .*Connection refused"),
        ("silent", "TimeoutError"),
        ("broken", "HTTPError 500"),
        ("moved", "HTTPError 302"),
        ("function", "OSError too busy"),
        ("exit", "SystemExit now"),
    ],
)
def test_a_receiver_that_fails_is_reported_once(
    problem: str, reason: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = {"down": f"http://127.0.0.1:{free_port()}/{TOKEN}", "function": _refuse, "exit": _exit}
    if problem == "silent":
        monkeypatch.setattr(notifying, "SEND_SECONDS", 0.3)
        receiver.replies.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(_lose, notify=receivers.get(problem, f"{receiver.url}/{problem}"))
        until(lambda: not _senders())
    texts = [str(each.message) for each in caught if "notify" in str(each.message)]
    assert len(texts) == 1
    assert re.search(reason, texts[0])
    assert TOKEN not in texts[0]


def _refuse(message: dict[str, str]) -> None:
    raise OSError("too busy")


def _exit(message: dict[str, str]) -> None:
    sys.exit("now")


def test_a_huge_answer_is_not_read(receiver: Receiver) -> None:
    _run(_succeed, notify=f"{receiver.url}/huge")
    until(lambda: receiver.events == ["ended"])
    finish_messages()
    assert not _senders()


def test_one_message_of_each_kind_waits_and_the_last_one_is_sent(receiver: Receiver) -> None:
    receiver.replies.clear()
    run = _notified(receiver)
    events = [RunStalled(0.0, f"cause {number}") for number in range(20)]
    for event in (*events, AttemptEnded("stopped"), RunEnded("stopped", "", "as planned")):
        run._internals.journal.append(event)
    receiver.replies.set()
    until(lambda: receiver.events[-1:] == ["ended"])
    assert receiver.events in (["stalled", "ended"], ["stalled", "stalled", "ended"])
    assert "cause 19" in receiver.messages[-2]["text"]


def test_a_newer_message_of_a_kind_is_sent_after_those_of_other_kinds(receiver: Receiver) -> None:
    receiver.replies.clear()
    run = _notified(receiver)
    run._internals.journal.append(RunStalled(0.0, "first"))
    until(lambda: receiver.events == ["stalled"])
    for event in (RunStalled(0.0, "second"), WarningAdded("slow"), RunStalled(0.0, "third")):
        run._internals.journal.append(event)
    receiver.replies.set()
    until(lambda: receiver.events == ["stalled", "warning", "stalled"])
    assert "third" in receiver.messages[-1]["text"]


def test_messages_are_sent_while_the_process_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12.1 starts no threads then."""
    messages: list[dict[str, str]] = []
    run = make_run(name="made", notify=messages.append)
    Notifier(run)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _start_no_thread)
        for cause in ("first", "second"):
            run._internals.journal.append(RunStalled(0.0, cause))
    assert [message["event"] for message in messages] == ["stalled", "stalled"]


def _start_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_warnings_with_one_cause_become_one_message(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifying, "SETTLE_SECONDS", 0.2)
    journal = _notified(receiver)._internals.journal
    journal.add([Record(0, START, MetricEvent({"loss": float("nan")}, 13))])
    journal.append(WarningAdded("the loss became nan at backward #13"))
    until(lambda: bool(receiver.messages))
    finish_messages()
    assert receiver.events == ["warning"]
    assert receiver.messages[0]["text"].endswith(
        "NaN since step 13 on rank 0: loss\nthe loss became nan at backward #13"
    )


def _notified(receiver: Receiver) -> Run:
    run = make_run(name="made", notify=receiver.url)
    Notifier(run)
    return run


# ---- secrets and settings


def test_messages_and_records_contain_no_secret(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", f"{TOKEN}-inherited")
    monkeypatch.setenv("A_TOKEN", TOKEN[:9])  # The other secrets begin with this one.

    def fail() -> None:
        raise ValueError(f"{TOKEN}-inherited {TOKEN}-given at https://user:{TOKEN}@example.org/?token={TOKEN}")

    _run(fail, notify=receiver.url, env={"OTHER": f"{TOKEN}-given"}, save=tmp_path)
    until(lambda: receiver.events == ["failed"])
    assert "ValueError: *** *** at https://***@example.org/?token=***" in receiver.messages[0]["text"]
    config = LaunchConfig(notify=receiver.url)
    assert repr(config) == repr(LaunchConfig(notify=print)) == repr(config).replace(receiver.url, "***")
    (journal,) = tmp_path.glob("*/journal*")
    assert receiver.url.encode() not in journal.read_bytes()
    kept = open_run(journal.parent)
    assert kept.config.notify is None
    assert receiver.url not in f"{kept.report()} {make_run(notify=receiver.url).report().html}"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"notify": 3}, r"notify=3 is not allowed; pass a URL such as"),
        ({"notify": f"example.org/{TOKEN}"}, r"notify=\*\*\* is not allowed"),
        ({"notify": f"https://example.org/{TOKEN} \n"}, r"notify=\*\*\* is not allowed"),
        ({"notify": f"https://?{TOKEN}"}, r"notify=\*\*\* is not allowed"),
        ({"notify": f"https://user:{TOKEN}@example.org/"}, "is not allowed; .* without user and password"),
        ({"notify": f"https://example.org:{TOKEN}/"}, r"notify=\*\*\* is not allowed"),
        ({"notify": f"https://example.org/{TOKEN}ä"}, r"notify=\*\*\* is not allowed"),
        ({"notify": print, "detach": True}, "detach=True is not allowed with notify=<function>"),
    ],
)
def test_invalid_receivers_are_refused_without_showing_them(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        LaunchConfig(**values)
    assert TOKEN not in str(caught.value)


def test_other_addresses_need_apprise(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    address = receiver.url.replace("http://", "json://")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"'json://...' needs .* pip install 'notebook-accelerate\[notify\]'"):
            LaunchConfig(notify=address)
    apprise = pytest.importorskip("apprise")
    with pytest.raises(ValueError, match=r"'jsno://...' is not an address of apprise"):
        LaunchConfig(notify=f"jsno://{TOKEN}")
    with pytest.raises(ValueError, match=r"'slack://...' is not an address of apprise"):
        LaunchConfig(notify=f"slack://{TOKEN}/a/b")
    assert not caplog.records  # Apprise logs parts of addresses.
    _run(_fail, notify=address)
    until(lambda: bool(receiver.messages))
    assert (receiver.messages[0]["title"], "no data" in receiver.messages[0]["message"]) == ("made failed", True)
    apprise.apprise.get_shared_executor().shutdown()  # Otherwise, its threads remain until the process exits.
