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
