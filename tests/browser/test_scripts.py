"""Parts of the panels' scripts in chromium, without a notebook."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.launch.report.document import Action, Cell, Column, Group, Row, Table
from notebook_accelerate.widgets.panel_elements import asset, script
from notebook_accelerate.widgets.plot import SCRIPTS
from notebook_accelerate.widgets.table_view import TableView
from tests.support.browser import Browser


def _load(page: Any, *names: str) -> None:
    """Load scripts into the page, so that it can use their functions and classes."""
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
    _load(blank, *SCRIPTS)
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


_CURVES = """(curves) => {
    const handlers = {}, values = { empty_text: "", wanted: "", hidden_metrics: 0 };
    const model = { get: (name) => values[name], set() {}, save_changes() {}, send() {}, off() {},
        on: (event, handler) => { handlers[event] = handler; } };
    const columns = [], series = [];
    for (const [metric, points] of Object.entries(curves)) {
        series.push([metric, "rank 0", points.length]);
        columns.push(...points.keys(), ...points.keys(), ...points);
    }
    window.drawn = [];
    const fillText = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const { a, e } = this.getTransform(), width = this.measureText(text).width * a;
        const left = a * x + e - { left: 0, start: 0, center: width / 2, right: width, end: width }[this.textAlign];
        window.drawn.push({ chart: this.canvas.closest("figure")?.dataset.metric, text, left, right: left + width,
            room: this.canvas.width });
        return fillText.apply(this, arguments);
    };
    const box = document.createElement("div");
    box.style.width = "400px";
    document.body.append(box);
    globalThis.view.render({ model, el: box });
    values.full = { seq: 1, prev: 0, series, data: new DataView(new Float64Array(columns).buffer) };
    handlers["change:full"]();
}"""


def _labels(page: Any, metric: str) -> list[str]:
    """Return the texts drawn in a metric's chart, after checking that all are inside it."""
    page.wait_for_function("(metric) => window.drawn.some(each => each.chart === metric)", arg=metric)
    drawn = [each for each in page.evaluate("() => window.drawn") if each["chart"] == metric]
    assert [each for each in drawn if each["left"] < 0 or each["right"] > each["room"]] == []
    return [str(each["text"]) for each in drawn]


@pytest.mark.parametrize(
    "values",
    [
        [1e30, 9e30], [1e31, 7e33], [-1e38, 1e38], [1e200, 9e200], [0.1, 0.9], [1e-10, 9e-10],
        [-1.000001e-9, -1.000009e-9], [12345678.0, 12345679.0],
    ],
    ids=str,
)  # fmt: skip
def test_values_of_any_size_have_ticks_that_are_not_clipped(blank: Any, values: list[float]) -> None:
    _load(blank, *SCRIPTS)
    blank.evaluate(_CURVES, {"loss": values * 300})
    # Leave out the labels of the steps.
    numbers = {float(text) for text in _labels(blank, "loss")} - {0.0, 200.0, 400.0}
    assert len(numbers) >= 2
    assert all(min(values) <= number <= max(values) for number in numbers)


def test_sizes_have_the_units_of_all_other_texts(blank: Any) -> None:
    _load(blank, *SCRIPTS)
    sizes = [0, 999, 999.4, 1536, 9_996, 64e6, 94.48e6, 999_600_000, 340e9, 2.5e15, -2e6]
    assert blank.evaluate("(sizes) => sizes.map(sizeText)", sizes) == [size_text(size) for size in sizes]
    blank.evaluate(_CURVES, {"system/memory_gb": [0.0934, 0.0941, 0.09448]})
    labels = {text for text in _labels(blank, "system/memory_gb") if not text.endswith(" s")}
    assert {"93.4 MB", "94 MB"} <= labels
    assert blank.locator(".na-chart-name").inner_text() == "memory"
    assert blank.locator(".na-chart-value").inner_text().strip() == "94.5 MB"


def test_a_curve_without_positive_values_says_why_a_log_scale_is_empty(blank: Any) -> None:
    _load(blank, *SCRIPTS)
    blank.evaluate(_CURVES, {"reward": [-3.0, -2.0], "loss": [1.0, 2.0]})
    _labels(blank, "reward")
    blank.get_by_role("checkbox").check()
    blank.wait_for_function("() => document.body.innerText.includes('A log scale shows positive values only')")
    assert blank.locator(".na-empty").count() == 1
    assert blank.locator("figure[data-metric=loss] canvas").count() == 1
    blank.get_by_role("checkbox").uncheck()
    blank.wait_for_function("() => document.querySelector('figure[data-metric=reward] canvas')")


def test_an_axis_of_steps_has_whole_numbers_that_differ(blank: Any) -> None:
    _load(blank, *SCRIPTS)
    blank.evaluate(_CURVES, {"four": [0.5, 0.6, 0.7, 0.8], "one": [0.5]})
    assert [text for text in _labels(blank, "four") if "." not in text] == ["0", "1", "2", "3"]
    assert [text for text in _labels(blank, "one") if text and "." not in text] == ["0", "1"], (
        "not the steps from 0 to 100"
    )


_DUPLICATES = """() => {
    const found = [], starts = [0, 1, 7.3, 9.5, 59, 3599, 1e4, 65536, 123456, 999999, 12345678, 3.2e9];
    const check = (name, labels, increments) => {
        for (const start of starts) for (const step of increments.filter(step => step > 1e-9 * start && step < 1e12)) {
            const first = Math.ceil(start / step), splits = [...Array(6).keys()].map(i => (first + i) * step);
            const texts = labels(splits);
            if (new Set(texts).size < texts.length) found.push([name, start, step, texts]);
        }
    };
    check("values", ticks, INCREMENTS.filter(step => step > 1e-6));
    check("seconds", durations, DURATIONS);
    check("steps", splits => splits.map(english), STEPS);
    return [found, STEPS.every(Number.isInteger)];
}"""


def test_neighbours_on_an_axis_have_different_labels(blank: Any) -> None:
    _load(blank, *SCRIPTS)
    duplicates, whole = blank.evaluate(_DUPLICATES)
    assert duplicates[:5] == []
    assert whole


_SMOOTHING = """([xs, values, kept]) => {
    const reach = reachOf([[xs]], 0.9), all = smooth(xs, values, reach);
    const some = smooth(kept.map(i => xs[i]), kept.map(i => values[i]), reach);
    return [kept.map(i => all[i]), some, reachOf([[kept.map(i => xs[i])]], 0.9) / reach];
}"""


def test_smoothing_does_not_depend_on_the_number_of_points(blank: Any) -> None:
    """Thinning has left every tenth point in the first half of this curve, which is straight between them."""
    _load(blank, *SCRIPTS)
    xs = [float(x) for x in range(6000)]
    rng = random.Random(0)
    corners = [rng.random() for _ in range(601)]
    values = [corners[int(x) // 10] + (corners[int(x) // 10 + 1] - corners[int(x) // 10]) * (x % 10) / 10 for x in xs]
    kept = [*range(0, 3000, 10), *range(3000, 6000)]
    every, some, same = blank.evaluate(_SMOOTHING, [xs, values, kept])
    assert some == pytest.approx(every, abs=1e-9)
    assert same == pytest.approx(1.0)
    assert max(some[300:]) - min(some[300:]) < 0.5 < max(values) - min(values), "the curve is smoothed"


def test_the_range_of_ranks_surrounds_their_mean(blank: Any) -> None:
    """The mean of equal values may be rounded to another value, and smoothing delays a mean."""
    _load(blank, *SCRIPTS)
    tables = [[[0, 1, 2], [0.1, 0.1, value]] for value in (0.1, 0.1, 0.3)]
    means = blank.evaluate("(tables) => [meanOf(tables), smoothed(meanOf(tables), 2)]", tables)
    for _, mean, low, high in means:
        assert all(least <= value <= most for least, value, most in zip(low, mean, high, strict=True))
    assert means[0][1][0] == 0.1


_COLOURED = """(metric) => {
    const { canvas } = card(metric).u.ctx, { left, top, width, height } = card(metric).u.bbox;
    const { data } = canvas.getContext("2d").getImageData(left, top, width, height), found = [0, 0];
    for (const [rank, colour] of PALETTE[panel.dark ? "dark" : "light"].slice(0, 2).entries()) {
        const wanted = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
        for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] > 200 && wanted.every((part, c) => Math.abs(part - data[at + c]) < 25)) found[rank]++;
    }
    return found;
}"""


@pytest.mark.parametrize(("kind", "axis"), [("rank", "Step"), ("rank", "Time"), ("run", "Step")])
def test_curves_with_the_same_values_show_both_colours(blank: Any, kind: str, axis: str) -> None:
    """Only the last of a hundred values differs, so that the curves are not drawn as one."""
    _load(blank, *SCRIPTS)
    blank.add_style_tag(content=asset("palette.css") + asset("panel.css") + asset("uPlot.min.css") + asset("plot.css"))
    rising = [float(step) for step in range(100)]
    blank.evaluate(_CARDS, [["loss", f"{kind} 0", rising], ["loss", f"{kind} 1", [*rising[:-1], 99.2]]])
    blank.wait_for_function("() => card('loss')?.u?.height === 240")
    blank.get_by_text(axis, exact=True).click()
    blank.wait_for_function("() => !card('loss').stale")
    first, second = blank.evaluate(_COLOURED, "loss")
    assert first > 0
    assert 0.5 < first / second < 2, "the colours of both curves alternate"


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


def test_new_lines_leave_the_earlier_rows_unchanged(blank: Any) -> None:
    _load(blank, "feed.js", "logs.js")
    blank.evaluate(_LOGS)
    blank.evaluate("() => say(1, 0, 600)")
    blank.wait_for_function("() => texts().length === 600")
    blank.evaluate("() => { window.kept = document.querySelectorAll('.na-line')[599]; say(2, 600, 600); }")
    blank.wait_for_function("() => texts().at(-1) === 'line 1199'")
    texts = blank.evaluate("() => texts()")
    assert texts == [f"line {number}" for number in range(200, 1200)], "the last thousand lines remain"
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
    """The first step may be slow, so its point is drawn alone, and the same chart then draws a hundred more."""
    _load(blank, *SCRIPTS)
    blank.evaluate(_CURVE)
    blank.evaluate("() => log(1, 0, 1)")
    blank.wait_for_function("() => panel.charts.get('loss')?.u?.data[0].length === 1")
    assert blank.evaluate("() => beads()") is True
    blank.evaluate("() => { window.first = chart(); log(2, 1, 100); }")
    blank.wait_for_function("() => chart().data[0].length === 101")
    assert blank.evaluate("() => chart() === window.first"), "the chart that was built for the first point is kept"
    assert blank.evaluate("() => beads()") is False


def test_a_hidden_curve_stays_hidden_when_its_run_is_renamed(blank: Any) -> None:
    """The names of runs contain the arguments that differ, so a second run changes the name of the first."""
    _load(blank, *SCRIPTS)
    blank.evaluate(_CURVE)
    blank.evaluate("() => { model.put('order', ['run 1']); log(1, 0, 5); panel.hidden.add('run 1'); }")
    blank.evaluate("() => model.put('order', ['run 1: lr 3', 'run 2: lr 4'])")
    assert blank.evaluate("() => [...panel.hidden]") == ["run 1: lr 3"]
    blank.evaluate("() => model.put('order', ['run 2: lr 4', 'run 3: lr 5'])")
    assert blank.evaluate("() => [...panel.hidden]") == ["run 1: lr 3"]
    blank.evaluate("() => model.put('order', ['run 3', 'run 1: lr 3, width 8'])")
    assert blank.evaluate("() => [...panel.hidden]") == ["run 1: lr 3, width 8"]


_CARDS = """(curves) => {
    const handlers = {}, values = { hidden_metrics: 0, chosen: "", wanted: "", order: [], empty_text: "none" };
    const model = { get: (name) => values[name], set(name, value) { values[name] = value; }, save_changes() {},
        send() {}, off() {}, on: (event, handler) => { handlers[event] = handler; } };
    const columns = [], series = [];
    for (const [metric, label, points] of curves) {
        const numbers = points.map(each => typeof each === "string" ? Number(each) : each);
        series.push([metric, label, numbers.length]);
        columns.push(...numbers.keys(), ...numbers.keys(), ...numbers);
    }
    document.body.className = "na-run";
    window.panel = new Panel(model, document.body);
    values.full = { seq: 1, prev: 0, series, data: new DataView(new Float64Array(columns).buffer) };
    handlers["change:full"]();
    window.shown = () => [...document.querySelectorAll(".na-section")].map(section => [
        section.querySelector(".na-fold span").textContent, section.querySelector(".na-charts").hidden,
        ...[...section.querySelectorAll("figure")].map(chart => chart.dataset.metric)]);
    window.card = (metric) => panel.charts.get(metric);
}"""


def _cards(page: Any) -> None:
    """Draw eight metrics of two ranks: one has NaN and an infinite value, one is the same on both ranks."""
    rising = [float(step) for step in range(50)]
    broken: list[Any] = [*rising[:20], "NaN", *rising[21:30], "Infinity", *rising[31:]]
    names = ["train/loss", "train/accuracy", "val/loss", "val/accuracy", "speed", "auto/lr", "system/memory_gb"]
    curves: list[list[Any]] = [[name, f"rank {rank}", [x + rank for x in rising]] for name in names for rank in (0, 1)]
    curves += [["train/scale", "rank 0", rising], ["train/scale", "rank 1", broken]]
    curves[10:12] = [["auto/lr", f"rank {rank}", rising] for rank in (0, 1)]
    _load(page, *SCRIPTS)
    page.add_style_tag(content=asset("palette.css") + asset("panel.css") + asset("uPlot.min.css") + asset("plot.css"))
    page.evaluate(_CARDS, curves)
    page.wait_for_function("() => card('train/loss')?.u && card('train/scale')?.u && card('auto/lr')?.u")


def test_curves_are_cards_in_sections(blank: Any) -> None:
    errors: list[str] = []
    blank.on("pageerror", lambda error: errors.append(str(error)))
    _cards(blank)
    assert blank.evaluate("() => shown()") == [
        ["Metrics", False, "speed"],
        ["train", False, "train/loss", "train/accuracy", "train/scale"],
        ["val", False, "val/loss", "val/accuracy"],
        ["Automatic", False, "auto/lr"],
        ["System", True, "system/memory_gb"],
    ]
    assert blank.locator("figure[data-metric='auto/lr'] .na-chart-head").inner_text().split()[:3] == [
        "learning", "rate", "auto",
    ]  # fmt: skip

    # Check values that no axis can show, and ranks that log the same values.
    assert (
        blank.locator("figure[data-metric='train/scale'] .na-chart-flag").inner_text() == "NaN since step 20 on rank 1"
    )
    assert blank.evaluate("() => card('train/scale').marks.map(mark => [mark.x, String(mark.value)])") == [
        [20, "NaN"], [30, "Infinity"],
    ]  # fmt: skip
    assert blank.evaluate("() => [card('auto/lr').u.series.length, card('train/loss').u.series.length]") == [2, 3]
    assert "rank 0 = rank 1" in blank.locator("figure[data-metric='auto/lr'] .na-chart-value").inner_text()

    # Show the mean over ranks, with their range.
    blank.get_by_text("Mean", exact=True).click()
    blank.wait_for_function("() => card('train/loss').labels[0] === 'mean of 2 ranks'")
    assert blank.evaluate("() => card('train/loss').joined.map(column => column[10])") == [10, 10.5, 10, 11]
    blank.get_by_text("Ranks", exact=True).click()
    blank.wait_for_function("() => card('train/loss').labels.length === 2")

    # Fold, pin and enlarge cards.
    blank.get_by_role("button", name="System 1").click()
    blank.wait_for_function("() => card('system/memory_gb').u")
    blank.locator("figure[data-metric='val/loss']").hover()
    blank.get_by_role("button", name="Pin to the top: val/loss").click()
    assert blank.evaluate("() => shown()[0]") == ["Pinned", False, "val/loss"]
    blank.locator("figure[data-metric='speed'] .na-chart-name").click()
    blank.wait_for_function("() => card('speed').u.height === 380")
    assert blank.evaluate("() => card('speed').node.offsetWidth === document.querySelector('.na-sections').offsetWidth")
    blank.locator("figure[data-metric='speed'] .na-chart-name").click()
    blank.wait_for_function("() => card('speed').u.height === 170")

    # A filter is a regular expression or plain text.
    search = blank.get_by_role("searchbox", name="Filter metrics by name")
    search.fill("^val/|speed$")
    assert blank.evaluate("() => shown().flatMap(each => each.slice(2))") == ["val/loss", "speed", "val/accuracy"]
    search.fill("(loss")
    assert search.get_attribute("aria-invalid") == "true"
    assert blank.locator(".na-note", has_text="No metrics match '(loss'.").count() == 1
    search.fill("")

    # Save the files of a card.
    chart = blank.locator("figure[data-metric='train/scale']")
    chart.hover()
    with blank.expect_download() as csv:
        blank.get_by_role("button", name="Download as CSV: train/scale").click()
    rows = Path(csv.value.path()).read_text().splitlines()
    assert csv.value.suggested_filename == "train_scale.csv"
    assert rows[0] == "metric,curve,step,seconds,value,min,max"
    assert [row for row in rows if row.startswith("train/scale,rank 1,20,")] == ["train/scale,rank 1,20,20,NaN,,"]
    with blank.expect_download() as png:
        blank.get_by_role("button", name="Download as PNG: train/scale").click()
    assert Path(png.value.path()).read_bytes().startswith(b"\x89PNG")
    assert errors == []


def test_a_metric_that_stays_nan_has_one_mark_until_its_end(blank: Any) -> None:
    _load(blank, *SCRIPTS)
    blank.add_style_tag(content=asset("palette.css") + asset("panel.css") + asset("uPlot.min.css") + asset("plot.css"))
    rising = [float(step) for step in range(900)]
    blank.evaluate(_CARDS, [["loss", "rank 0", rising], ["loss", "rank 1", [*rising[:300], *["NaN"] * 600]]])
    blank.wait_for_function("() => card('loss')?.u?.height === 240")
    across = "() => card('loss').node.offsetWidth === document.querySelector('.na-sections').offsetWidth"
    assert blank.evaluate(across), "a single metric has a wide card"
    marks = "() => card('loss').marks.map(mark => [mark.label, mark.x, mark.until])"
    assert blank.evaluate(marks) == [["rank 1", 300, 899]]
    values = blank.locator("figure[data-metric='loss'] .na-chart-value span")
    assert values.all_inner_texts() == ["899", "NaN"]
    blank.evaluate("() => card('loss').u.setCursor({ left: card('loss').u.valToPos(100, 'x'), top: 10 })")
    assert values.all_inner_texts() == ["100", "100"]
    blank.evaluate("() => card('loss').u.setCursor({ left: card('loss').u.valToPos(400, 'x'), top: 10 })")
    assert values.all_inner_texts() == ["400", "NaN"]


_RUNS = """() => {
    window.sent = [];
    const handlers = {}, values = {};
    const model = { get: (name) => values[name], send(message) { window.sent.push(message); },
        off() {}, set() {}, save_changes() {}, on: (event, handler) => { handlers[event] = handler; } };
    document.body.className = "na-run";
    view.render({ model, el: document.body });
    window.put = (name, message) => { values[name] = message; handlers[`change:${name}`](); };
    window.texts = () => [...document.querySelectorAll("tbody tr")].map(row => row.innerText.split(/\\s+/).join(" "));
}"""


def _row(key: int, state: str, loss: str, *actions: str, tone: str = "", lr: str = "") -> Row:
    cells: tuple[str | Cell, ...] = (
        Cell(text=str(key), colour=key),
        Cell(text=state, state=state),
        loss,
        *([lr] if lr else []),
    )
    order: tuple[float | str | None, ...] = (key, state, float(loss), *([float(lr)] if lr else []))
    labels = {"open": ("Open", "Open the panel of"), "close": ("Close", "Close the panel of"), "stop": ("Stop", "Stop")}
    made = [
        Action(id="stop" if name == "stop" else "open", label=label, hint=f"{hint} run {key}")
        for name in actions
        for label, hint in (labels[name],)
    ]
    return Row(key=str(key), cells=cells, order=order, tone=tone, actions=tuple(made))


class _Runs:
    """A live table whose messages a page receives."""

    def __init__(self, page: Any) -> None:
        self.view, self.page, self.now = TableView(), page, 0.0
        self.sent: list[str] = []

    def show(self, *rows: Row, columns: tuple[str, ...] = ("loss",), whole: bool = False) -> str:
        """Send rows to the page. Return the kind of the message, or "" if nothing was sent."""
        heads = [Column(title="run", kind="run"), Column(title="state", kind="state")]
        heads += [Column(title=name, numeric=True) for name in columns]
        table = Table(key="runs", columns=tuple(heads), groups=(Group(key="runs", rows=rows),), sortable=True)
        seq, self.now = self.view._seq, self.now + 0.01
        self.view._full_requested |= whole
        self.view.update(self.now, lambda _: table)
        if self.view._seq == seq:
            return ""
        kind = "full" if self.view.full["seq"] > seq else "delta"
        self.page.evaluate("([kind, message]) => put(kind, message)", [kind, getattr(self.view, kind)])
        return kind


@pytest.mark.parametrize("whole", [False, True], ids=["deltas", "everything"])
def test_a_click_on_a_row_outlasts_an_update(blank: Any, *, whole: bool) -> None:
    _load(blank, "feed.js", "looks.js", "table.js")
    blank.evaluate(_RUNS)
    runs = _Runs(blank)
    assert runs.show(_row(2, "running", "0.5", "open", "stop"), _row(1, "succeeded", "0.7", "open")) == "full"
    blank.wait_for_function("() => texts().length === 2")
    assert blank.evaluate("() => texts()") == ["2 OpenStop Running 0.5", "1 Open Succeeded 0.7"]
    stop = blank.get_by_role("button", name="Stop run 2")
    stop.focus()
    stop.hover()
    blank.mouse.down()
    changed = (_row(2, "running", "0.4", "open", "stop"), _row(1, "succeeded", "0.7", "open"))
    assert runs.show(*changed, whole=whole) == ("full" if whole else "delta")
    blank.wait_for_function("() => texts()[0].endsWith('0.4')")
    blank.mouse.up()
    clicks = "() => sent.filter(each => each.kind === 'action')"
    assert blank.evaluate(clicks) == [{"kind": "action", "key": "2", "action": "stop"}]
    assert blank.evaluate("() => document.activeElement.textContent") == "Stop"

    # Change the order, end a run, open a panel, add a column, and remove a run.
    blank.get_by_role("button", name="loss", exact=True).click()
    blank.wait_for_function("() => texts()[0].startsWith('1 ')")
    ended = _row(2, "stopped", "0.4", "close", tone="opened")
    runs.show(ended, _row(1, "succeeded", "0.7", "open"), whole=whole)
    blank.wait_for_function("() => texts()[1] === '2 Close Stopped 0.4'")
    assert blank.locator("tr.na-opened").get_attribute("data-key") == "2"
    assert runs.show(_row(2, "stopped", "0.4", "close", tone="opened", lr="0.1"), columns=("loss", "lr")) == "full"
    blank.wait_for_function("() => texts().length === 1 && texts()[0] === '2 Close Stopped 0.4 0.1'")
    assert blank.locator("thead th").count() == 5
    assert blank.locator("thead [aria-sort]").inner_text() == "loss↓"


@pytest.mark.parametrize("whole", [False, True], ids=["deltas", "everything"])
def test_input_selection_and_scrolling_survive_updates_of_a_table(blank: Any, *, whole: bool) -> None:
    _load(blank, "feed.js", "looks.js", "table.js")
    styles = "".join(asset(f"{name}.css") for name in ("palette", "panel", "table"))
    blank.add_style_tag(content=f"{styles}.na-scroll {{ width: 120px; }}")
    blank.evaluate(_RUNS)
    runs = _Runs(blank)
    runs.show(*(_row(key, "running", f"0.{key}", "open") for key in (3, 2, 1)))
    search = blank.get_by_role("searchbox", name="Filter runs")
    search.fill("[")
    assert search.get_attribute("aria-invalid") == "true"
    search.fill("run [23]|0.1")
    blank.evaluate("""() => {
        document.querySelector(".na-scroll").scrollLeft = 30;
        const cell = document.querySelector("tr[data-key='1'] td:last-child");
        document.querySelector("input").setSelectionRange(0, 3);
        window.cell = cell;
    }""")
    runs.show(*(_row(key, "running", f"0.{key + 1}", "open") for key in (3, 2, 1)), whole=whole)
    blank.wait_for_function("() => texts().length === 2")
    assert blank.evaluate("() => document.querySelector('.na-count').textContent") == "2 of 3 runs"
    assert blank.evaluate("() => [document.activeElement.value, document.activeElement.selectionEnd]") == [
        "run [23]|0.1",
        3,
    ]
    assert blank.evaluate("() => document.querySelector('.na-scroll').scrollLeft") == 30
    search.fill("nothing")
    assert blank.get_by_text("No runs match 'nothing'.").is_visible()
    search.fill("")
    assert blank.evaluate("() => document.querySelector(\"tr[data-key='1'] td:last-child\") === cell")


def test_a_long_message_is_folded_until_a_click(blank: Any) -> None:
    _load(blank, "feed.js", "actions.js")
    blank.evaluate(_RUNS.replace("values = {}", "values = { rows: [], note: {}, label: '', kernel: '' }"))
    text = "the ranks disagree " * 20
    row = {"key": "one", "text": text, "actions": [], "tone": "warn"}
    blank.evaluate("(rows) => put('rows', rows)", [row])
    shown = blank.locator(".na-row-text")
    assert shown.inner_text().startswith("the ranks disagree")
    assert len(shown.inner_text()) < 220
    blank.get_by_role("button", name="Show all").click()
    assert text.strip() in shown.inner_text()
    blank.evaluate("(rows) => put('rows', rows)", [{**row, "text": f"{text} still"}])
    assert "still" in shown.inner_text(), "an update does not fold the text again"
    blank.get_by_role("button", name="Show less").click()
    assert len(shown.inner_text()) < 220
    blank.evaluate("(rows) => put('rows', rows)", [{**row, "text": "short"}])
    assert shown.inner_text().strip() == "short"


def test_a_button_with_a_question_acts_at_the_second_click(blank: Any) -> None:
    _load(blank, "feed.js", "actions.js")
    blank.evaluate(_RUNS.replace("values = {}", "values = { rows: [], note: {}, label: '', kernel: '' }"))
    clicks = "() => sent.filter(each => each.kind === 'click').length"
    stop = Action(id="stop", label="Stop", hint="Ask every rank to stop", tone="stop", question="Stop run?")
    rows = [{"key": "run", "text": "", "actions": [asdict(stop)], "tone": ""}]
    blank.evaluate("(rows) => put('rows', rows)", rows)
    button = blank.get_by_role("button")
    button.click()
    assert button.inner_text() == "Stop run?"
    blank.evaluate("(rows) => put('rows', rows)", [{**rows[0], "tone": "bad"}])
    assert button.inner_text() == "Stop run?", "an update does not take the question away"
    assert blank.evaluate(clicks) == 0
    button.click()
    assert blank.evaluate(clicks) == 1
    blank.evaluate("(rows) => put('rows', rows)", rows)
    assert button.inner_text() == "Stop"
    button.click()
    # Without a second click, the question disappears by itself.
    blank.wait_for_function("() => document.querySelector('.na-action').textContent === 'Stop'")
    assert blank.evaluate(clicks) == 1


def test_columns_with_equal_values_are_folded(blank: Any) -> None:
    _load(blank, "feed.js", "looks.js", "table.js")
    blank.add_style_tag(content="".join(asset(f"{name}.css") for name in ("palette", "panel", "table")))
    blank.evaluate(_RUNS)
    runs = _Runs(blank)
    columns = ("loss", "lr")
    runs.show(*(_row(key, "succeeded", f"0.{key}", "open", lr="0.1") for key in (2, 1)), columns=columns)
    heads = """() => [...document.querySelectorAll('thead th')].filter(node => !node.hidden)
        .map(node => node.innerText.trim())"""
    assert blank.evaluate(heads) == ["run", "actions", "state", "loss"]
    blank.get_by_role("button", name="Show 1 equal column").click()
    assert blank.evaluate(heads) == ["run", "actions", "state", "loss", "lr"]
    blank.get_by_role("button", name="Hide 1 equal column").click()
    runs.show(
        _row(2, "succeeded", "0.2", "open", lr="0.2"), _row(1, "succeeded", "0.1", "open", lr="0.1"), columns=columns
    )
    assert blank.evaluate(heads) == ["run", "actions", "state", "loss", "lr"], "the values differ now"
