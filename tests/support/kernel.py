"""A real Jupyter kernel that is driven cell by cell, and whose messages are all recorded.

    with Kernel() as kernel:
        cell = kernel.run("print(1 + 1)")
        assert cell.stdout == "2\\n" and cell.ok
        cell = kernel.submit("import time; time.sleep(60)")     # does not wait
        kernel.wait_for(lambda: cell.busy)
        kernel.interrupt()
        assert kernel.finish(cell, timeout=5).error.ename == "KeyboardInterrupt"

A cell keeps collecting after it has finished: later output of a run started with `block=False` belongs to the cell
that launched it, and arrives in `kernel.pump`, `kernel.wait_for` or any later `run`.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop
from nbclient import NotebookClient
from traitlets.config import Config

from tests.support import kernel_forks
from tests.support.ipython_startup import start_no_server
from tests.support.kernel_fork_server import SPARES

ROOT = Path(__file__).resolve().parents[2]
# Don't use TCP: before a kernel binds the ports that Jupyter has chosen for it, another process may take one.
TRANSPORT = "ipc"
# Create the event loop now. Otherwise, the first kernel would create it and leave its sockets open.
ensure_event_loop()
_POLL = 0.02  # Seconds between two polls of the shell channel.
_STATE = 4000  # Characters shown from each end of a cell, and of the kernel's own output, in errors.
_LAST_WORDS = 2.0  # Seconds to wait for the last messages of a dead kernel.


def headless(book: Any, folder: Path, **options: Any) -> NotebookClient:
    """Return a client that executes a notebook without a front end.

    Args:
        book: The notebook to execute.
        folder: An empty folder for the kernel's connection file.
        options: Further options of the client.
    """
    config = Config({"KernelManager": {"transport": TRANSPORT, "connection_file": str(folder / "kernel.json")}})
    return NotebookClient(book, kernel_name="python3", store_widget_state=False, config=config, **options)


def without_colours(text: str) -> str:
    """Return ``text`` without a terminal's colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class KernelTimeoutError(AssertionError):
    """The kernel did not reach the awaited state in time. The text contains the messages received so far."""


@dataclass
class CellError:
    """The error that a cell raised.

    Args:
        ename: The name of the exception's class.
        evalue: The text of the exception.
        traceback: The lines that the front end would show, with colour codes.
    """

    ename: str
    evalue: str
    traceback: list[str]

    @property
    def text(self) -> str:
        """The traceback as the front end shows it, without colours."""
        return without_colours("\n".join(self.traceback))


@dataclass
class Cell:
    """An executed cell and the messages received for it.

    Args:
        code: The executed code.
        msg_id: The id of the request, which every message about this cell names as its parent.
        outputs: The content of each output message in order, with its `output_type` (stream, display_data,
            update_display_data, execute_result, error, clear_output).
        comms: The content of each comm message (widgets).
        prompts: The text of each request for input.
        status: "ok", "error" or "aborted", once the cell has finished.
        duration: The number of seconds from the request to the kernel's reply.
    """

    code: str
    msg_id: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    comms: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    status: str | None = None
    duration: float | None = None
    busy: bool = False
    idle: bool = False
    begin: float = field(default_factory=time.monotonic)

    @property
    def ok(self) -> bool:
        """Whether the cell finished without an error."""
        return self.status == "ok"

    @property
    def finished(self) -> bool:
        """Whether both the reply and the kernel's idle status have arrived."""
        return self.status is not None and self.idle

    @property
    def stdout(self) -> str:
        """Everything that the cell has written to stdout so far."""
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        """Everything that the cell has written to stderr so far."""
        return self._stream("stderr")

    @property
    def plain(self) -> str:
        """The text that the cell wrote to stdout, then to stderr, without colours."""
        return without_colours(self.stdout + self.stderr)

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The displayed MIME bundles in order, each in its latest state."""
        shown: list[dict[str, Any]] = []
        place: dict[str, int] = {}
        for output in self.outputs:
            name = output.get("transient", {}).get("display_id")
            if output["output_type"] == "update_display_data" and name in place:
                shown[place[name]] = output["data"]
            elif output["output_type"] == "display_data":
                if name is not None:
                    place[name] = len(shown)
                shown.append(output["data"])
        return shown

    @property
    def result(self) -> dict[str, Any] | None:
        """The MIME bundle of the cell's last expression, or None."""
        found = [output["data"] for output in self.outputs if output["output_type"] == "execute_result"]
        return found[-1] if found else None

    @property
    def result_text(self) -> str | None:
        """The plain text of the cell's last expression, or None."""
        return None if self.result is None else self.result["text/plain"]

    @property
    def error(self) -> CellError | None:
        """The error that the cell raised, or None."""
        found = [output for output in self.outputs if output["output_type"] == "error"]
        return CellError(found[-1]["ename"], found[-1]["evalue"], found[-1]["traceback"]) if found else None

    def expect_ok(self) -> Cell:
        """Return the cell, or fail the test with the cell's traceback."""
        if not self.ok:
            text = self.error.text if self.error else f"status {self.status}"
            raise AssertionError(f"cell failed:\n{self.code}\n{text}\nstdout: {self.stdout}\nstderr: {self.stderr}")
        return self

    def _stream(self, name: str) -> str:
        chunks = (output for output in self.outputs if output["output_type"] == "stream" and output["name"] == name)
        return "".join(output["text"] for output in chunks)


class Kernel:
    """A separate ipykernel with its own configuration, history and runtime folders, independent of the user's.

    Args:
        env: Variables that override the test process's own. None as a value removes one.
        cwd: The kernel's working directory, by default an empty temporary folder.
        answer: A function that is called with the prompt of each input request, and returns the answer to send.
        front_end: Whether the cells are executed as by a front end, which supports input. Otherwise, as with nbclient,
            a request for input raises in the cell.
        timeout: Seconds to wait for a kernel to start, and the default for a cell.
        prefix: A command that replaces itself with the kernel, such as ("ip", "netns", "exec", ...).
        python: The kernel's interpreter.
        server: Whether the kernel starts its zygote early, as it does for users.
        detached: The number of detached runs of this kernel whose processes are forked instead of started.
        forked: Whether the kernel may be forked from a process that has imported torch and this package
            (`kernel_forks`). Otherwise it is a new interpreter without any imports.
    """

    def __init__(
        self,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        answer: Callable[[str], str] | None = None,
        front_end: bool = True,
        timeout: float = 120.0,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        server: bool = True,
        detached: int = 0,
        forked: bool = True,
    ) -> None:
        self.answer, self._front_end = answer, front_end
        self._command = [*prefix, python]
        self.timeout = timeout
        self.cells: dict[str, Cell] = {}
        self._homes: dict[str, Cell] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="kernel-test-"))
        self.cwd = cwd or self.folder / "work"
        self.cwd.mkdir(exist_ok=True)
        self._context = zmq.Context()
        # A form sends hundreds of messages at once. With a limit, the socket would drop those that have not been read.
        self._context.setsockopt(zmq.RCVHWM, 0)
        if not server:
            start_no_server(self.folder / "ipythondir")
        self._log = (self.folder / "kernel.log").open("w+")
        forked = forked and not prefix and python == sys.executable and kernel_forks.can_fork(env or {})
        if forked:
            env = {**(env or {}), SPARES: str(server + detached)}
        self._manager = self._make_manager(forked=forked)
        self._client: BlockingKernelClient | None = None
        try:
            self._start(dict(env or {}))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of the kernel."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    @property
    def process(self) -> psutil.Process:
        """The kernel's process, for counting its threads, descriptors and children."""
        return psutil.Process(self.pid)

    @property
    def log(self) -> str:
        """The output of the kernel's process on its real stdout and stderr, outside of Jupyter."""
        self._log.flush()
        return (self.folder / "kernel.log").read_text(errors="replace")

    @property
    def client(self) -> BlockingKernelClient:
        """The client that this harness uses, for messages that the harness has no method for."""
        assert self._client is not None, "the kernel is closed"
        return self._client

    def types(self, *lines: str) -> list[str]:
        """Have the user type lines, one at each prompt from now on. Return the list that receives the prompts."""
        prompts: list[str] = []
        left = list(lines)

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            return left.pop(0)

        self.answer = answer
        return prompts

    def submit(self, code: str) -> Cell:
        """Send a cell to the kernel, without waiting for it."""
        msg_id = self.client.execute(code, allow_stdin=self._front_end, stop_on_error=False)
        cell = Cell(code, msg_id)
        self.cells[msg_id] = cell
        return cell

    def finish(self, cell: Cell, timeout: float | None = None) -> Cell:
        """Collect messages until the cell has finished.

        Args:
            cell: A cell from `submit`.
            timeout: The time limit in seconds. If None, the limit of this kernel applies.

        Returns:
            The same cell.

        Raises:
            KernelTimeoutError: The cell did not finish in time, or the kernel died.
        """
        self.wait_for(lambda: cell.finished, timeout, what=f"the end of the cell\n{cell.code}")
        return cell

    def run(self, code: str, timeout: float | None = None) -> Cell:
        """Execute a cell, and return it once it has finished, whether it succeeded or failed."""
        return self.finish(self.submit(code), timeout)

    def check(self, code: str, timeout: float | None = None) -> Cell:
        """Execute a cell that must succeed. Otherwise, fail the test with its traceback."""
        return self.run(code, timeout).expect_ok()

    def value(self, expression: str, timeout: float | None = None) -> Any:
        """Return the value of an expression in the kernel, through JSON."""
        mark = "value-of-expression:"
        cell = self.check(f"import json as _json; print({mark!r} + _json.dumps({expression}))", timeout)
        shown = cell.stdout.rpartition(mark)[2]
        try:
            return json.loads(shown)
        except ValueError:
            raise AssertionError(f"the output has more than the value of {expression}: {shown[:_STATE]!r}") from None

    def until(self, expression: str, seconds: float) -> None:
        """Wait until an expression is true in the kernel, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while not self.value(expression, seconds):
            assert time.monotonic() < deadline, f"still false after {seconds:g} s: {expression}"
            time.sleep(0.1)

    def wait_for(
        self, condition: Callable[[], bool], timeout: float | None = None, what: str = "the condition"
    ) -> None:
        """Collect messages until the condition holds.

        Args:
            condition: A function that is called after each message, and at least every 20 ms.
            timeout: The time limit in seconds. If None, the limit of this kernel applies.
            what: A description of the condition, for the error.

        Raises:
            KernelTimeoutError: The condition was not met in time, or the kernel died first.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not condition():
            self._collect(_POLL)
            if condition():
                return
            if not self.alive():
                self.pump(_LAST_WORDS)
                if condition():
                    return
                raise KernelTimeoutError(f"the kernel died before {what}\n{self._state()}")
            if time.monotonic() > deadline:
                raise KernelTimeoutError(f"waited {seconds} s for {what}\n{self._state()}")

    def pump(self, seconds: float) -> None:
        """Collect messages for this many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._collect(min(left, _POLL))

    def interrupt(self) -> None:
        """Interrupt the kernel like the notebook's stop button, which sends SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """Kill the kernel's process with SIGKILL and reap it. Its child processes are not signalled."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait_dead(60.0)

    def expect_answer(self, seconds: float = 60.0) -> None:
        """If the kernel does not respond, end it and fail the test with the stacks of its threads."""
        try:
            self.run("1", seconds)
        except KernelTimeoutError as error:
            written = len(self.log)
            if self.alive():
                os.kill(self.pid, signal.SIGABRT)  # Python's fault handler then writes the stacks of all threads.
                self._wait_dead(60.0)
            text = f"the kernel no longer answers:\n{self.log[written:][-8000:]}"
            last = [cell for cell in self.cells.values() if not cell.finished][:1]
            shown = "".join(f"\nend of the output of\n{cell.code}\n{cell.plain[-1000:]}" for cell in last)
            raise KernelTimeoutError(text + shown) from error

    def alive(self) -> bool:
        """Whether the kernel's process is running."""
        return bool(self._manager.is_alive())

    def close(self) -> None:
        """End the kernel, kill its remaining descendants, and remove its folder."""
        left = self._descendants()
        if self._client is not None:
            self._client.stop_channels()
            self._client = None
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        for process in left:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self._manager.cleanup_connection_file()
        self._context.destroy(linger=0)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_manager(self, *, forked: bool) -> KernelManager:
        """Create a manager with its own kernel spec, so that a user's spec named python3 is not used."""
        spec = self.folder / "kernels" / "python3"
        kernel_forks.write_spec(spec, self._command, forked=forked)
        specs = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
        return KernelManager(
            kernel_name="python3",
            kernel_spec_manager=specs,
            connection_file=str(self.folder / "connection.json"),
            transport=TRANSPORT,
            context=self._context,
            shutdown_wait_time=2.0,
        )

    def _start(self, changes: dict[str, str | None]) -> None:
        env = {**os.environ, **kernel_forks.started_with()}
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            env[name] = str(self.folder / name.lower())
        env.update({name: value for name, value in changes.items() if value is not None})
        env = {name: value for name, value in env.items() if changes.get(name, "") is not None}
        self._manager.start_kernel(env=env, cwd=str(self.cwd), stdout=self._log, stderr=self._log)
        self._client = self._manager.client()
        # A heartbeat that starts late creates another socket, which looks like a leak.
        self._client.start_channels(hb=False)
        self._client.wait_for_ready(timeout=self.timeout)

    def _collect(self, seconds: float) -> None:
        """Receive the messages on the three channels, waiting this long for the first output."""
        self._take(self.client.get_iopub_msg, seconds, self._on_iopub)
        while self._take(self.client.get_iopub_msg, 0.0, self._on_iopub):
            pass
        while self._take(self.client.get_shell_msg, 0.0, self._on_shell):
            pass
        while self._take(self.client.get_stdin_msg, 0.0, self._on_stdin):
            pass

    def _take(
        self, get: Callable[..., dict[str, Any]], seconds: float, handle: Callable[[Cell, dict[str, Any]], None]
    ) -> bool:
        try:
            message = get(timeout=seconds)
        except queue.Empty:
            return False
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            handle(cell, message)
        return True

    def _on_iopub(self, cell: Cell, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            cell.busy = cell.busy or content["execution_state"] == "busy"
            cell.idle = cell.idle or content["execution_state"] == "idle"
        elif kind.startswith("comm_"):
            cell.comms.append({"msg_type": kind, **content})
        elif kind != "execute_input":
            name = content.get("transient", {}).get("display_id")
            if name is not None and kind == "display_data":
                self._homes[name] = cell
            # As in front ends, an update changes the display's output, whichever cell sends the update.
            home = self._homes.get(name, cell) if kind == "update_display_data" else cell
            home.outputs.append({"output_type": kind, **content})

    def _on_shell(self, cell: Cell, message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_reply":
            cell.status = message["content"]["status"]
            cell.duration = time.monotonic() - cell.begin

    def _on_stdin(self, cell: Cell, message: dict[str, Any]) -> None:
        cell.prompts.append(message["content"]["prompt"])
        assert self.answer is not None, f"the cell asks {cell.prompts[-1]!r}, but the test has no answer"
        self.client.input(self.answer(cell.prompts[-1]))

    def _wait_dead(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                raise KernelTimeoutError(f"kernel {self.pid} is still alive {seconds} s after SIGKILL")
            time.sleep(0.01)

    def _descendants(self) -> list[psutil.Process]:
        if not self._manager.has_kernel or not self.alive():
            return []
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _state(self) -> str:
        cell = str(list(self.cells.values())[-1]) if self.cells else "none"
        if left_out := max(0, len(cell) - 2 * _STATE):  # A panel can send 200,000 characters.
            cell = f"{cell[:_STATE]} [{left_out:,} characters] {cell[-_STATE:]}"
        return f"last cell so far: {cell}\nkernel's own output: {self.log[-_STATE:]}"
