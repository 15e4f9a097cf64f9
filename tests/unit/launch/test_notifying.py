"""Messages about runs: their events and texts, receivers that are slow or down, and secrets."""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, Run, notebook_launcher, open_run
from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch.notifying import MAX_WAITING, Notifier
from notebook_accelerate.launch.state.run_events import AttemptEnded, RunEnded, WarningAdded
from notebook_accelerate.telemetry import MetricEvent, current_sink
from tests.support.detached import user_folder
from tests.support.ports import free_port
from tests.support.runs import launch, make_run
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
        self.send_response(500 if "broken" in self.path else 204)
        self.end_headers()

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


@pytest.mark.parametrize("problem", ["down", "broken", "function"])
def test_a_receiver_that_fails_is_reported_once(problem: str, receiver: Receiver) -> None:
    refusing = f"http://127.0.0.1:{free_port()}/{TOKEN}"
    receivers = {"down": refusing, "broken": f"{receiver.url}/broken", "function": _refuse}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(_lose, notify=receivers[problem])
        until(lambda: not _senders())
    texts = [str(each.message) for each in caught if "notify" in str(each.message)]
    reasons = {"down": "Connection refused", "broken": "HTTPError Internal", "function": "OSError too busy"}
    assert len(texts) == 1
    assert reasons[problem] in texts[0]
    assert TOKEN not in texts[0]


def _refuse(message: dict[str, str]) -> None:
    raise OSError("too busy")


def test_few_messages_wait_and_the_last_one_is_sent(receiver: Receiver) -> None:
    receiver.replies.clear()
    run = _notified(receiver)
    events = [WarningAdded(f"mistake {number}") for number in range(3 * MAX_WAITING)]
    with pytest.warns(UserWarning, match="too slow, so messages were dropped"):
        deque(map(run._internals.journal.append, events))
    for event in (AttemptEnded("stopped"), RunEnded("stopped", "", "as planned")):
        run._internals.journal.append(event)
    receiver.replies.set()
    until(lambda: receiver.events[-1:] == ["ended"])
    assert len(receiver.messages) == MAX_WAITING + 1
    assert run.notes == ["notify: the receiver is too slow, so messages were dropped"]


def _notified(receiver: Receiver) -> Run:
    run = make_run(name="made", notify=receiver.url)
    Notifier(run)
    return run


# ---- secrets and settings


def test_messages_and_records_contain_no_secret(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", f"{TOKEN}-inherited")

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
        ({"notify": print, "detach": True}, "detach=True is not allowed with notify=<function>"),
    ],
)
def test_invalid_receivers_are_refused_without_showing_them(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        LaunchConfig(**values)
    assert TOKEN not in str(caught.value)


def test_other_addresses_need_apprise(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    address = receiver.url.replace("http://", "json://")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"'json://...' needs .* pip install 'notebook-accelerate\[notify\]'"):
            LaunchConfig(notify=address)
    apprise = pytest.importorskip("apprise")
    _run(_fail, notify=address)
    until(lambda: bool(receiver.messages))
    assert (receiver.messages[0]["title"], "no data" in receiver.messages[0]["message"]) == ("made failed", True)
    apprise.apprise.get_shared_executor().shutdown()  # Otherwise, its threads remain until the process exits.
