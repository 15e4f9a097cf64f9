"""A launch configured and started in the browser, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.widgets.panel_elements import script
from tests.support.browser import DAILY_IN_LAB, App, Browser, NotebookPage, Server

TRAIN = """
import os, time
import notebook_accelerate
from notebook_accelerate import Accelerator, telemetry
from notebook_accelerate.telemetry import MetricEvent

def train(seconds):
    rank = int(os.environ["RANK"])
    print("steps per update", Accelerator().gradient_accumulation_steps)
    for step in range(int(seconds / 0.02)):
        telemetry.emit(MetricEvent({"loss": 1 / (step + 1)}, step))
        time.sleep(0.02)
    return rank
"""
CONFIGURE = "panel = notebook_accelerate.configure()\npanel"
PLAN = ".na-form .na-plan"
FOCUSED = """() => {
  const element = document.activeElement;
  return element.getAttribute('aria-label') || element.labels?.[0]?.innerText || element.innerText || '';
}"""
LAUNCH = ".na-form button.na-primary"
# The message is shown only for four seconds.
WATCH_FOR_COPIED = """() => {
  const text = () => [...document.querySelectorAll('[role=status]')].some(e => e.textContent.includes('Copied'));
  new MutationObserver(() => { window.saidCopied ||= text(); }).observe(document.body, {
    subtree: true, childList: true, characterData: true,
  });
}"""


BOTH = pytest.mark.parametrize("app", ["lab", "notebook"], indirect=True)


@pytest.fixture
def app(request: pytest.FixtureRequest) -> App:
    """The application that opens the notebook: JupyterLab, unless the test requests both."""
    found: App = getattr(request, "param", "lab")
    return found


@pytest.fixture
def opened(server: Server, chromium: Browser, app: App) -> Iterator[Any]:
    """Open a notebook whose second cell shows the panel."""
    pages: list[NotebookPage] = []

    def start(*more: str, theme: str = "light") -> NotebookPage:
        name = f"{app}-{time.monotonic_ns()}.ipynb"
        server.write(name, [TRAIN, CONFIGURE, *more])
        page = server.open(chromium, name, app, theme)
        pages.append(page)
        page.run(0)
        page.idle()
        page.run(1)
        page.wait_for("() => document.querySelector('.na-form .na-plan')")
        page.idle()
        page.page.locator(PLAN).scroll_into_view_if_needed()
        return page

    yield start
    for page in pages:
        page.close()
        assert page.errors == []
        assert page.outside == []


def _plan(page: NotebookPage, text: str) -> None:
    page.wait_for(f"(text) => document.querySelector('{PLAN}').innerText.includes(text)", text)


def _tab(page: NotebookPage, title: str) -> None:
    page.page.locator(".na-form [role=tab]", has_text=title).first.click()


# ---- the script alone

MODEL = """() => {
  const handlers = {};
  const field = (name, kind, more) => ({
    name, label: name, kind, help: "", placeholder: "default", optional: true, choices: [], ...more,
  });
  window.traits = {
    parts: [
      { kind: "fields", id: "f", title: "", names: ["a", "b"] },
      { kind: "fields", id: "f", title: "Folded", names: ["inner", "mode"] },
    ],
    tables: {
      f: [
        field("a", "text"), field("b", "area"), field("inner", "nested"), field("mode", "choice", { choices: ["x"] }),
      ],
      size: [field("size", "text")],
    },
    entries: { "f.a": "1", "f.b": "2", "f.inner": false, "f.mode": "" },
    version: 7, errors: {}, suggestions: {}, texts: {}, code: "", disabled: [],
  };
  window.sent = [];
  window.model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = value; (handlers[`change:${name}`] || []).forEach((handler) => handler()); },
    on: (event, handler) => { (handlers[event] ||= []).push(handler); },
    off: (event, handler) => { handlers[event] = handlers[event].filter((each) => each !== handler); },
    send: (message) => sent.push(message),
  };
  const el = document.createElement("div");
  el.className = "na-form";
  document.body.append(el);
  const stop = view.render({ model, el });
  window.leave = () => { stop(); return Object.values(handlers).flat().length; };
}"""


@pytest.fixture
def drawn(chromium: Browser) -> Iterator[Any]:
    """Draw a form of four fields on an empty page."""
    page = chromium.context.new_page()
    page.add_script_tag(content=script("copy.js", "forms.js").replace("export default", "globalThis.view ="))
    page.evaluate(MODEL)
    yield page
    page.close()


def test_typed_text_is_sent_and_never_replaced_during_typing(drawn: Any) -> None:
    a, b = drawn.get_by_label("a", exact=True), drawn.get_by_label("b", exact=True)
    a.focus()
    drawn.keyboard.press("End")
    drawn.keyboard.type("0")
    assert drawn.evaluate("sent") == [{"kind": "enter", "path": "f.a", "value": "10", "version": 7}]
    drawn.evaluate("model.set('errors', {'f.a': '<b>wrong'})")
    drawn.evaluate("model.set('entries', {...traits.entries, 'f.a': '5', 'f.b': '6'})")
    assert drawn.locator("[role=alert]").inner_text() == "<b>wrong"
    assert (a.input_value(), b.input_value()) == ("10", "6")
    drawn.keyboard.type("2")
    assert a.input_value() == "102"
    drawn.evaluate("model.set('entries', {...traits.entries, 'f.a': '5'})")
    b.focus()
    assert a.input_value() == "5"


def test_folds_stay_open_and_count_their_errors(drawn: Any) -> None:
    drawn.locator("summary").click()
    drawn.get_by_label("inner", exact=True).check()
    assert drawn.evaluate("sent.at(-1).path") == "f.inner"
    drawn.evaluate("model.set('tables', {...traits.tables, 'f.inner': traits.tables.size})")
    drawn.evaluate("model.set('entries', {...traits.entries, 'f.inner.size': 'many', 'f.mode': 'an object'})")
    drawn.evaluate("model.set('errors', {'f.inner.size': 'not a number', 'f.a': 'wrong'})")
    assert drawn.locator("summary").inner_text() == "Folded (1 to correct)"
    assert drawn.locator("details").evaluate("each => each.open")
    assert drawn.get_by_label("size", exact=True).input_value() == "many"
    assert drawn.get_by_label("mode", exact=True).input_value() == "an object"
    drawn.get_by_label("inner", exact=True).uncheck()
    assert not drawn.get_by_label("size", exact=True).is_visible()
    assert drawn.evaluate("leave()") == 0, "the handlers of the model are removed"


# ---- in a notebook


@BOTH
def test_a_launch_can_be_configured_and_started(opened: Any, app: App) -> None:
    page = opened()
    page.shot(f"config-panel-{app}", ".na-form")
    form = page.page
    form.get_by_label("Number of processes").fill("2")
    form.get_by_label("Mixed precision").select_option("bf16")
    form.get_by_label("Use only the CPU").check()
    _tab(page, "Training")
    form.get_by_label("Batch size").fill("8")
    form.get_by_label("Gradient accumulation steps").fill("4")
    _plan(page, "2 processes on cpu, fork, gloo, bf16; effective batch: 64")
    form.get_by_label("Function").fill("train")
    form.get_by_label("Arguments").fill("2.0")
    page.wait_for("() => document.querySelector('.na-form .na-code').innerText.includes('(2.0,)')")
    page.shot(f"config-panel-filled-{app}", ".na-form")
    form.locator(LAUNCH).click()
    page.wait_for("() => document.body.innerText.includes('[rank 1] steps per update 4')")
    page.wait_for("() => document.querySelector('.na-card') || document.querySelector('.notebook-accelerate-report')")
    page.wait_for(
        "() => [...document.querySelectorAll('.na-form .na-good')].some(e => /run 1 succeeded/.test(e.innerText))"
    )
    page.idle()
    page.shot(f"config-panel-launched-{app}")


EDGES = """() => {
  const edges = (selector) => [...document.querySelectorAll(`.na-form ${selector}`)]
    .filter(each => each.checkVisibility()).map(each => each.getBoundingClientRect());
  const inputs = edges(':is(.na-fields, .na-launch) :is(input[type=text], select)');
  const spread = (values) => Math.max(...values) - Math.min(...values);
  const [button] = edges(".na-launch > button"), [panel] = edges('.na-plan');
  return [inputs.length, spread(inputs.map(each => each.left)), spread(inputs.map(each => each.width)),
    Math.abs(panel.right - button.right)];
}"""


def test_the_inputs_form_one_column_with_the_launch_button_on_the_right(opened: Any) -> None:
    page = opened()
    count, lefts, widths, right = page.page.evaluate(EDGES)
    assert count >= 5
    assert max(lefts, widths, right) <= 4, "pixels"


def test_entries_are_checked_during_typing(opened: Any, app: App) -> None:
    page = opened()
    box = page.page.get_by_label("Number of processes")
    box.click()
    page.page.keyboard.type("0")
    alert = "document.querySelector('.na-form .na-aside [role=alert]')"
    page.wait_for(f"() => {alert}?.innerText.includes('\"Number of processes\" = 0')")
    page.wait_for(f"() => document.querySelector('{LAUNCH}').disabled")
    copies = page.page.locator(".na-form .na-copies button")
    assert [copies.nth(place).is_disabled() for place in range(copies.count())] == [True, True]
    page.shot(f"config-panel-wrong-{app}", ".na-form")
    page.page.keyboard.press("Backspace")
    page.page.keyboard.type("2")
    _plan(page, "2 processes on")
    page.wait_for(f"() => !document.querySelector('{LAUNCH}').disabled")
    page.wait_for(f"() => !{alert}")


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    page = opened()
    page.page.get_by_label("Number of processes").focus()
    page.page.keyboard.type("2")
    _plan(page, "2 processes on")
    page.idle()
    seen = []
    for _ in range(25):
        page.page.keyboard.press("Tab")
        seen.append(page.page.evaluate(FOCUSED).strip())
    for name in ("Mixed precision", "Start method", "Function", "Arguments", "Launch", "The cell"):
        assert name in seen, seen
    assert any(name.startswith("Copy this cell") for name in seen)


def test_the_cell_can_be_copied_and_inserted(opened: Any, chromium: Browser) -> None:
    page = opened()
    chromium.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.get_by_label("Number of processes").fill("3")
    _plan(page, "3 processes on")
    page.wait_for("() => document.querySelector('.na-form .na-code').innerText.includes('num_processes=3')")
    page.idle()
    page.page.evaluate(WATCH_FOR_COPIED)
    page.page.get_by_role("button", name="Copy this cell to the clipboard").click()
    page.wait_for("() => window.saidCopied")
    copied = page.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == page.text(".na-form .na-code")
    assert "num_processes=3" in copied
    page.page.get_by_role("button", name="Insert a cell below with this code").click()
    book = "window.jupyterapp.shell.currentWidget.content"
    page.wait_for(f"(code) => {book}.activeCell.model.sharedModel.getSource() === code", copied)
    assert page.page.evaluate(f"() => {book}.activeCellIndex") == 2


def test_files_can_be_saved_and_loaded(opened: Any, tmp_path: Path) -> None:
    page = opened()
    form = page.page
    form.get_by_label("Number of processes").fill("2")
    _plan(page, "2 processes on")
    _tab(page, "Configuration file")
    form.get_by_label("Path", exact=True).fill(str(tmp_path / "config.yaml"))
    form.get_by_role("button", name="Save", exact=True).last.click()
    page.wait_for("() => document.body.innerText.includes('Saved. Not stored: block.')")
    assert "num_processes: 2" in (tmp_path / "config.yaml").read_text()
    _tab(page, "Launch")
    form.get_by_label("Number of processes").fill("7")
    _plan(page, "7 processes on")
    _tab(page, "Configuration file")
    form.get_by_role("button", name="Load", exact=True).last.click()
    _plan(page, "2 processes on")


def test_a_failing_launch_is_shown_in_the_panel(opened: Any) -> None:
    page = opened()
    page.page.get_by_label("Function").fill("nothing_like_it")
    page.page.locator(LAUNCH).click()
    page.wait_for("() => document.body.innerText.includes('is not a function in this notebook; enter one of: train')")


@DAILY_IN_LAB
def test_the_saved_notebook_keeps_the_settings(opened: Any) -> None:
    page = opened("panel.close()")
    page.page.get_by_label("Number of processes").fill("2")
    _plan(page, "2 processes on")
    page.idle()
    left = lambda: page.save()["cells"][1]["outputs"][1]["data"]["text/html"]  # noqa: E731
    page.until(lambda: "num_processes=2" in "".join(left()), "the settings next to the live panel")
    page.run(2)
    page.wait_for("() => !document.querySelector('.na-form')")
    page.idle()
    outputs = page.save()["cells"][1]["outputs"]
    assert all("application/vnd.jupyter.widget-view+json" not in output["data"] for output in outputs)
    assert "num_processes=2" in "".join(outputs[0]["data"]["text/html"])


@DAILY_IN_LAB
def test_the_dark_theme_is_legible(opened: Any, app: App) -> None:
    page = opened(theme="dark")
    page.page.get_by_label("Number of processes").fill("0")
    page.wait_for("() => document.querySelector('.na-form .na-aside [role=alert]')")
    page.shot(f"config-panel-dark-{app}", ".na-form")
    style = "getComputedStyle(document.querySelector('.na-form .na-facts li'))"
    # The text is light on a dark background.
    page.wait_for(f"() => Math.min(...{style}.color.match(/\\d+/g).slice(0, 3).map(Number)) > 150")
