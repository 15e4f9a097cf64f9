"""Parts of the panels' scripts in chromium, without a notebook."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accelerate.widgets.assets import script
from tests.support.browser import Browser


def _load(page: Any, *names: str) -> None:
    """Define a script's functions and classes on the page."""
    page.add_script_tag(content=script(*names).replace("export default", "globalThis.view ="))


@pytest.fixture
def blank(chromium: Browser) -> Iterator[Any]:
    page = chromium.context.new_page()
    yield page
    page.close()


def _table(rng: random.Random, columns: int, *, ordered: bool) -> list[list[float | None]]:
    xs: list[float | None] = [float(x) for x in rng.sample(range(40), 20)]
    values = [[rng.choice([rng.random(), None]) for _ in xs] for _ in range(columns)]
    return [sorted(xs, key=lambda x: x or 0.0) if ordered else xs, *values]


@pytest.mark.parametrize("ordered", [True, False])
def test_tables_are_merged_as_uplot_joins_them(blank: Any, *, ordered: bool) -> None:
    _load(blank, "uPlot.iife.min.js", "feed.js", "plot.js")
    rng = random.Random(0)
    compare = """(tables) => {
        const missing = (key, value) => value === undefined ? "missing" : value;
        const modes = tables.map(table => table.map((_, i) => i ? 1 : 0));
        const joined = uPlot.join(structuredClone(tables), modes);
        return [JSON.stringify(merge(tables), missing), JSON.stringify(joined, missing)];
    }"""
    for columns in ([1], [1, 1], [3, 1, 2]):
        merged, joined = blank.evaluate(compare, [_table(rng, count, ordered=ordered) for count in columns])
        assert merged == joined
    assert blank.evaluate("() => JSON.stringify(merge([]))") == "[[]]"


_LOGS = """() => {
    const handlers = {}, values = {};
    window.model = {
        get: (name) => values[name], send() {}, off() {},
        on: (event, handler) => { handlers[event] = handler; },
        put(name, value) { values[name] = value; handlers[`change:${name}`](); },
    };
    globalThis.view.render({ model: window.model, el: document.body });
    window.say = (seq, first, count) => model.put(seq === 1 ? "full" : "delta", {
        seq, prev: seq - 1, skipped: {},
        lines: [...Array(count).keys()].map(i => [0, 0, "stdout", `line ${first + i}`]),
    });
    window.texts = () => [...document.querySelectorAll('.na-line-text')].map(node => node.textContent);
}"""


def test_new_lines_leave_the_rows_before_them(blank: Any) -> None:
    _load(blank, "feed.js", "logs.js")
    blank.evaluate(_LOGS)
    blank.evaluate("() => say(1, 0, 600)")
    blank.wait_for_function("() => texts().length === 600")
    blank.evaluate("() => { window.kept = document.querySelectorAll('.na-line')[599]; say(2, 600, 600); }")
    blank.wait_for_function("() => texts().at(-1) === 'line 1199'")
    texts = blank.evaluate("() => texts()")
    assert texts == [f"line {number}" for number in range(200, 1200)], "the last thousand"
    assert blank.evaluate("() => document.querySelectorAll('.na-line')[399] === window.kept")
    blank.evaluate("() => say(3, 1200, 1100)")
    blank.wait_for_function("() => texts()[0] === 'line 1300'")
    assert blank.evaluate("() => texts().length") == 1000
    blank.get_by_role("searchbox").fill("line 2299")
    blank.wait_for_function("() => texts().length === 1")
    blank.get_by_role("searchbox").fill("")
    blank.wait_for_function("() => texts().length === 1000 && texts()[0] === 'line 1300'")


_CURVE = """() => {
    const handlers = {}, values = { hidden_metrics: 0, chosen: "" };
    window.model = {
        get: (name) => values[name], set() {}, save_changes() {}, send() {}, off() {},
        on: (event, handler) => { handlers[event] = handler; },
        put(name, value) { values[name] = value; handlers[`change:${name}`](); },
    };
    window.panel = new Panel(window.model, document.body);
    window.log = (seq, first, count) => {
        const steps = [...Array(count).keys()].map(i => first + i);
        const data = new DataView(new Float64Array([...steps, ...steps, ...steps.map(Math.sin)]).buffer);
        model.put(seq === 1 ? "full" : "delta", { seq, prev: seq - 1, series: [["loss", "run 1", count]], data });
    };
    window.chart = () => panel.charts.get("loss").u;
    window.beads = () => chart().series[1].points.show(chart(), 1);
}"""


def test_only_the_first_points_of_a_curve_are_drawn_as_points(blank: Any) -> None:
    """The first step may take long: what is right for one point is not for the hundred that follow."""
    _load(blank, "uPlot.iife.min.js", "feed.js", "plot.js")
    blank.evaluate(_CURVE)
    blank.evaluate("() => log(1, 0, 1)")
    blank.wait_for_function("() => panel.charts.get('loss')?.u?.data[0].length === 1")
    assert blank.evaluate("() => beads()") is True
    blank.evaluate("() => { window.first = chart(); log(2, 1, 100); }")
    blank.wait_for_function("() => chart().data[0].length === 101")
    assert blank.evaluate("() => chart() === window.first"), "built for the first point"
    assert blank.evaluate("() => beads()") is False
