"""JupyterLab and Notebook in a real browser: a separate server, Debian's Chromium, and cells executed by their index.

    with Server() as server, Browser() as browser:
        page = server.open(browser, notebook(["1 + 1"]), app="lab")
        page.run(0)
        page.wait_for("() => document.body.innerText.includes('2')")

The user's environment is not used: configuration, data, runtime and settings are in temporary folders. Requests to
other machines are refused and recorded in ``page.outside``, and console errors in ``page.errors``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.support import kernel_forks
from tests.support.ipython_startup import start_no_server
from tests.support.ranks import reserved_port

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("CHROMIUM", shutil.which("chromium") or "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-quic",
]  # fmt: skip
LIMIT = 120.0
"""The time limit in seconds for steps that take one or two on an idle machine."""
SCREENSHOTS = ROOT / ".build" / "screenshots"
App = Literal["lab", "notebook"]
DAILY_IN_LAB = pytest.mark.parametrize(
    "app", ["lab", pytest.param("notebook", marks=pytest.mark.nightly)], indirect=True
)
"""The parameters of a test that runs daily in JupyterLab, and nightly in Notebook as well."""
_SESSION = "window.jupyterapp?.shell?.currentWidget?.sessionContext"
# Ignore messages that the applications log with any notebook. The last two appear when a page is reloaded, and when a
# kernel exits with an unanswered message.
_NOISE = (
    "favicon", "WebSocket", "Failed to load resource", "ERR_BLOCKED_BY_CLIENT", "net::ERR", "[Violation]",
    "Could not restore the debugger state", "Canceled future for ",
)  # fmt: skip
# Notebook 7.6 throws these errors when it starts, even without a notebook.
_NOTEBOOK_ITSELF = ("(reading 'schema')", "Command 'filebrowser:open-path' not registered")


def missing() -> str | None:
    """Return why this machine cannot run browser tests, or None if it can."""
    import importlib.util

    for name in ("playwright", "jupyterlab", "notebook"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: make test-browser installs it"
    return None if Path(CHROMIUM).exists() else f"no chromium at {CHROMIUM}: apt-get install chromium"


def notebook(cells: list[str]) -> dict[str, Any]:
    """Return a notebook with these code cells."""
    made: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


class Server:
    """A Jupyter server with JupyterLab and Notebook on a free port.

    Its kernels do not start the zygote before the first launch that needs it.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="browser-"))
        self.notebooks = self.folder / "notebooks"
        self.notebooks.mkdir()
        self._open = ExitStack()
        self.port = self._open.enter_context(reserved_port())
        self._log = (self.folder / "server.log").open("w+")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR")
        folders = {name: str(self.folder / name.lower()) for name in names}
        folders["JUPYTER_RUNTIME_DIR"] = str(self.folder / "run")  # The path of a socket is limited to 107 characters.
        overrides = self.folder / "jupyter_config_dir" / "labconfig"
        overrides.mkdir(parents=True)
        # Switch off the news and the update check, which contact servers and hide parts of the page.
        (overrides / "page_config.json").write_text(
            json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
        )
        if kernel_forks.can_fork({}):
            # In a virtual environment, JUPYTER_PATH takes precedence.
            folders["JUPYTER_PATH"] = str(self.folder / "jupyter_path")
            kernel_forks.write_spec(self.folder / "jupyter_path" / "kernels" / "python3")
            module = kernel_forks.__name__  # Importing this module registers the provisioner that forks kernels.
            (self.folder / "jupyter_config_dir" / "jupyter_server_config.py").write_text(f"import {module}\n")
        start_no_server(self.folder / "ipythondir")
        env = {**os.environ, **folders, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--port={self.port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password=",
            "--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True", f"--ServerApp.root_dir={self.notebooks}",
            # Don't use TCP: before the kernel binds the ports that the server has chosen, another process may take one.
            "--KernelManager.transport=ipc", f"--MappingKernelManager.kernel_info_timeout={LIMIT}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env=env, cwd=self.notebooks, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._wait_until_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._open.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The output of the server and its kernels."""
        self._log.flush()
        return (self.folder / "server.log").read_text(errors="replace")

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 2 * LIMIT
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/api/status", timeout=LIMIT):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(f"the server did not start:\n{self.log[-4000:]}")

    def write(self, name: str, cells: list[str]) -> Path:
        """Write a notebook with these cells into the server's folder."""
        path = self.notebooks / name
        path.write_text(json.dumps(notebook(cells)))
        return path

    def open(self, browser: Browser, name: str, app: App = "lab", theme: str = "light") -> NotebookPage:
        """Open a notebook from the server's folder, in an idle page if there is one. Wait until its kernel is idle."""
        idle = next((page for page in browser.idle if page.server is self), None)
        if app == "lab" and idle is not None:
            browser.idle.remove(idle)
            page = idle
            page.show(name)
        else:
            page = browser.page(self)
            page.page.goto(f"{self.url}/doc/tree/{name}" if app == "lab" else f"{self.url}/notebooks/{name}")
        page.wait_until_ready()
        if theme == "dark":
            page.dark()
        return page


class Browser:
    """Debian's Chromium, headless.

    With `service_workers`, pages may use service workers, whose requests are not blocked.
    """

    def __init__(
        self, *, dark: bool = False, reduced_motion: bool = False, width: int = 1280, service_workers: bool = True
    ) -> None:
        self._service_workers: Any = "allow" if service_workers else "block"
        self._scheme: Any = "dark" if dark else "light"
        self._motion: Any = "reduce" if reduced_motion else "no-preference"
        self._width = width
        self.idle: list[NotebookPage] = []
        """JupyterLab pages without a notebook, kept for reuse because loading JupyterLab takes 8 s of CPU time."""

    def __enter__(self) -> Browser:
        from playwright.sync_api import sync_playwright

        self._manager = sync_playwright()
        self._playwright: Playwright = self._manager.start()
        launch = self._playwright.chromium.launch
        self._browser = launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000 * LIMIT)
        self.context: BrowserContext = self._browser.new_context(
            viewport={"width": self._width, "height": 1000}, color_scheme=self._scheme, reduced_motion=self._motion,
            service_workers=self._service_workers,
        )  # fmt: skip
        self.context.set_default_timeout(1000 * LIMIT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.close()
        self._playwright.stop()

    def page_within(self, address: str) -> Page:
        """Open an empty page that can reach only addresses with this prefix."""
        page = self.context.new_page()
        page.route("**/*", lambda it: it.continue_() if it.request.url.startswith(address) else it.abort())
        return page

    def page(self, server: Server) -> NotebookPage:
        """Open an empty page that can reach only the server."""
        made = NotebookPage(self.context.new_page(), server, self)
        made.guard()
        return made


@contextmanager
def served(folder: Path, *others: Path) -> Iterator[str]:
    """Serve the files of a folder, and other files by name. Yield the address."""
    elsewhere = {f"/{file.name}": str(file) for file in others}

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return elsewhere.get(path) or super().translate_path(path)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class NotebookPage:
    """A notebook that is open in a browser."""

    page: Page
    server: Server
    browser: Browser
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def guard(self) -> None:
        """Record errors and block requests to other machines."""
        self.page.on("console", lambda message: self._console(message.type, message.text))
        self.page.on("pageerror", lambda error: self._uncaught(str(error)))
        self.page.route("**/*", self._route)

    def show(self, name: str) -> None:
        """Open a notebook in an idle JupyterLab page."""
        self.errors.clear()
        self.outside.clear()
        show = "async (path) => { await window.jupyterapp.commands.execute('docmanager:open', { path }); }"
        self.page.evaluate(show, name)

    def close(self) -> None:
        """Close the notebook and end its kernel. Keep this JupyterLab page for reuse, unless another one is idle."""
        self.shut_down()
        if "/doc/tree/" not in self.page.url or self.browser.idle:
            self.page.close()
            return
        self._theme("JupyterLab Light", light=True)
        self.page.evaluate(
            """() => {
              const panel = window.jupyterapp.shell.currentWidget;
              panel.context.model.dirty = false;  // does not ask whether to save
              panel.close();
              for (const name of ['cellsThatRun', 'saidCopied']) delete window[name];
            }"""
        )
        self.wait_for("() => !document.querySelector('.jp-NotebookPanel')")
        self.browser.idle.append(self)

    def _console(self, kind: str, text: str) -> None:
        if kind == "error" and not any(noise in text for noise in _NOISE):
            self.errors.append(text)

    def _uncaught(self, text: str) -> None:
        if not any(known in text for known in (*_NOTEBOOK_ITSELF, *_NOISE)):
            self.errors.append(f"uncaught: {text}")

    def _route(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.server.url, "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(url)
            route.abort()

    def wait_until_ready(self) -> None:
        """Wait until the notebook is shown and its kernel is idle."""
        self.wait_for(
            """async () => {
              const panel = window.jupyterapp?.shell?.currentWidget;
              if (!panel?.context || !panel?.sessionContext) return false;
              await panel.context.ready; await panel.sessionContext.ready;
              const kernel = panel.sessionContext.session?.kernel;
              if (!kernel) return false;
              await kernel.info;
              return kernel.status === 'idle';
            }"""
        )

    def wait_for(self, script: str, argument: Any = None) -> None:
        """Wait until a JavaScript function returns a true value. A function that throws is called again."""
        deadline = time.monotonic() + LIMIT
        while not (found := self._value(script, argument))[0]:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"waited {LIMIT} s for {script}\nlast: {found}\nerrors: {self.errors}\npage: "
                    f"{self.page.evaluate('document.body.innerText')[-3000:]}\nserver: {self.server.log[-2000:]}"
                )
            self.page.wait_for_timeout(100)

    def _value(self, script: str, argument: Any) -> tuple[Any, str]:
        from playwright.sync_api import Error

        try:
            return self.page.evaluate(script, argument), ""
        except Error as error:  # The page is still loading, or has not drawn the element yet.
            if self.page.is_closed():
                raise
            return False, str(error)

    def until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        """Wait until a Python function returns a true value, while the page keeps running."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {LIMIT} s for {what}\nerrors: {self.errors}")
            self.page.wait_for_timeout(100)

    def run(self, index: int) -> None:
        """Execute a cell, without waiting for it."""
        self.page.evaluate(
            """(index) => {
              const app = window.jupyterapp, book = app.shell.currentWidget.content;
              book.activeCellIndex = index;
              book.deselectAll();
              const ran = app.commands.execute('notebook:run-cell'), running = window.cellsThatRun ??= new Set();
              running.add(ran);
              ran.catch(() => {}).then(() => running.delete(ran));
            }""",
            index,
        )

    def idle(self) -> None:
        """Wait until all executed cells have finished and the kernel is idle."""
        # No event reports that the kernel has received the request that a click or a key press sends.
        self.page.wait_for_timeout(200)
        self.wait_for(f"() => !window.cellsThatRun?.size && {_SESSION}.session.kernel.status === 'idle'")

    def interrupt(self) -> None:
        """Click the notebook's stop button."""
        self.page.evaluate(f"() => {_SESSION}.session.kernel.interrupt()")

    def shut_down(self) -> None:
        """Shut down the notebook's kernel."""
        self.page.evaluate(f"async () => {{ await {_SESSION}?.shutdown(); }}")

    def save(self) -> dict[str, Any]:
        """Save the notebook. Return its content."""
        self.page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.context.save(); }")
        path = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        return dict(json.loads((self.server.notebooks / path).read_text()))

    def dark(self) -> None:
        """Switch to the dark theme."""
        self._theme("JupyterLab Dark", light=False)
        self.page.wait_for_timeout(300)

    def _theme(self, theme: str, *, light: bool) -> None:
        change = "window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
        self.page.evaluate(f"async (theme) => {{ await {change}; }}", theme)
        self.wait_for("(light) => document.body.dataset.jpThemeLight === light", str(light).lower())

    def shot(self, name: str, selector: str | None = None) -> Path:
        """Take a screenshot of the page, or of the first element that a selector matches."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        if selector is None:
            self.page.screenshot(path=path)
        else:
            self.page.locator(selector).first.screenshot(path=path)
        return path

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector matches."""
        return str(self.page.locator(selector).first.inner_text())


__all__ = ["SCREENSHOTS", "Browser", "NotebookPage", "Server", "missing", "notebook"]
