/* Curves of a run: one uPlot chart per metric, with controls that work while the kernel is busy.
 *
 * The model's traits `full` and `delta` (see feed.js) hold {seq, prev, series: [[metric, label, count], ...], data}:
 * little-endian float64, for each series its steps, then its seconds, then its values. All text is set as text, never as
 * markup.
 *
 * An entry [metric, label, count, from] is an envelope over many ranks: steps, seconds, mean, minimum and maximum. It
 * replaces the points at steps from `from` on (null: all of them).
 */
const MAX_CHARTS = 60;
const MAX_POINTS = 6000;
const DRAWING_MS = 3;  // of a frame's 16.7 ms: layout and painting follow, which take several times as long without a GPU
const REST = 9;  // after drawing new points, no more are drawn for this many times as long
const PALETTE = {
  light: ["#2563c9", "#c9541a", "#1c8558", "#8f47bd", "#9a6a06", "#0f7f8d", "#c23a73", "#5f6672"],
  dark: ["#6aa5f8", "#f29560", "#5cc795", "#c796ea", "#dbb04f", "#52c3d1", "#f083ad", "#a7aebb"],
};

function isDark(node) {
  for (let at = node; at; at = at.parentElement) {
    const parts = getComputedStyle(at).backgroundColor.match(/[\d.]+/g);
    if (parts && (parts.length < 4 || Number(parts[3]) > 0.5))
      return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function format(value) {
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size && (size >= 1e6 || size < 1e-3)) return Number(value.toExponential(2)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/* Labels of an axis, with enough digits to distinguish neighbours. */
function ticks(splits) {
  const found = splits.filter((value) => value != null);
  const largest = Math.max(...found.map(Math.abs)), step = Math.abs(found[1] - found[0]) || largest || 1;
  const digits = Math.min(9, Math.max(2, 1 + Math.ceil(Math.log10(largest / step + 1e-12))));
  const small = largest && (largest >= 1e6 || largest < 1e-3);
  return splits.map((value) => {
    if (value == null) return "";
    if (!value) return "0";
    return small ? Number(value.toExponential(digits - 1)).toExponential().replace("e+", "e") : String(Number(value.toPrecision(digits + 1)));
  });
}

function duration(seconds) {
  const whole = Math.round(Math.abs(seconds));
  const two = (n) => String(n).padStart(2, "0");
  if (Math.abs(seconds) < 10 && seconds % 1) return `${Number(seconds.toFixed(2))} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)}`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/* Exponential moving average without the bias of its first value (Kingma and Ba, 2015, section 3). */
function smooth(values, weight) {
  let sum = 0, scale = 0;
  return values.map((value) => {
    if (value == null || !Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

class Series {
  constructor() { this.step = []; this.time = []; this.value = []; }
  add(data, at, count) {
    for (let i = 0; i < count; i++) {
      this.step.push(data[at + i]);
      this.time.push(data[at + count + i]);
      this.value.push(data[at + 2 * count + i]);
    }
    if (this.value.length > MAX_POINTS) this.downsample();
  }
  /* M4 over groups of eight: first, last, smallest, largest. */
  downsample() {
    const keep = [];
    for (let i = 0; i < this.value.length; i += 8) {
      const end = Math.min(i + 8, this.value.length);
      let low = i, high = i;
      for (let j = i; j < end; j++) {
        if (this.value[j] < this.value[low]) low = j;
        if (this.value[j] > this.value[high]) high = j;
      }
      keep.push(...[...new Set([i, low, high, end - 1])].sort((a, b) => a - b));
    }
    for (const name of ["step", "time", "value"]) this[name] = keep.map((i) => this[name][i]);
  }
}

/* The mean of many ranks, with their minimum and maximum. */
class Envelope {
  constructor() { this.step = []; this.time = []; this.value = []; this.low = []; this.high = []; }
  columns() { return [this.step, this.time, this.value, this.low, this.high]; }
  replace(data, at, count, from) {
    let kept = from == null ? 0 : this.step.length;
    while (kept && this.step[kept - 1] >= from) kept--;
    this.columns().forEach((column, c) => {
      column.length = kept;
      for (let i = 0; i < count; i++) column.push(data[at + c * count + i]);
    });
  }
}

/* Whether each value is greater than the one before it. */
function increasing(xs) {
  for (let i = 1; i < xs.length; i++) if (!(xs[i] > xs[i - 1])) return false;
  return true;
}

/* Merges tables [x, column, ...] into one x and all columns; `undefined` where a table has no point at an x.
 *
 * uPlot.join sorts the values of all tables, which takes several times as long; it remains for what is not increasing.
 */
function merge(tables) {
  if (!tables.every(([x]) => increasing(x)))
    return uPlot.join(tables, tables.map((table) => table.map((_, i) => (i ? 1 : 0))));
  const xs = [], merged = [xs], next = tables.map(() => 0);
  const columns = tables.map((table) => table.slice(1).map(() => { const column = []; merged.push(column); return column; }));
  for (;;) {
    let x = Infinity;
    tables.forEach(([known], t) => { if (known[next[t]] < x) x = known[next[t]]; });
    if (x === Infinity) return merged;
    xs.push(x);
    tables.forEach((table, t) => {
      const here = table[0][next[t]] === x;
      columns[t].forEach((column, c) => column.push(here ? table[c + 1][next[t]] : undefined));
      if (here) next[t]++;
    });
  }
}

class Metrics {
  constructor() { this.metrics = new Map(); this.labels = []; }
  append(message) {
    const view = message.data;
    const data = new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    const changed = new Set();
    let at = 0;
    for (const [metric, label, count, from] of message.series) {
      if (!this.metrics.has(metric)) this.metrics.set(metric, new Map());
      const curves = this.metrics.get(metric), isEnvelope = from !== undefined;
      if (!curves.has(label)) curves.set(label, isEnvelope ? new Envelope() : new Series());
      if (!this.labels.includes(label)) this.labels.push(label);
      if (isEnvelope) curves.get(label).replace(data, at, count, from);
      else curves.get(label).add(data, at, count);
      at += (isEnvelope ? 5 : 3) * count;
      changed.add(metric);
    }
    // Sorted by name, so that colours and chips do not depend on the order of arrival.
    this.labels.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    return changed;
  }
  replace(message) {
    this.metrics = new Map();
    this.labels = [];
    return this.append(message);
  }
}

/* Points in the order of x, one for each x: the last one that is drawn. */
function sorted(x, values, drawn) {
  const xs = [], ys = [];
  for (const i of [...x.keys()].sort((a, b) => x[a] - x[b])) {
    const shown = drawn(values[i]);
    if (xs.length && xs[xs.length - 1] === x[i]) { if (shown != null) ys[ys.length - 1] = shown; }
    else { xs.push(x[i]); ys.push(shown); }
  }
  return [xs, ys];
}

class Chart {
  constructor(panel, metric) {
    this.panel = panel;
    this.metric = metric;
    this.title = make("span", { class: "na-chart-name" }, metric);
    this.title.title = metric;
    this.readout = make("span", { class: "na-chart-value" });
    this.plot = make("div", { class: "na-chart-plot" });
    this.node = make("figure", { class: "na-chart", tabindex: "0", role: "img" },
      make("figcaption", {}, this.title, this.readout), this.plot);
    this.node.addEventListener("keydown", (event) => this.moveByKey(event));
    this.node.addEventListener("blur", () => this.u && this.u.setCursor({ left: -10, top: -10 }));
    this.parts = [];
    this.drawn = 0;
    this.visible = false;
    this.stale = true;
    this.zoomed = false;
    this.shape = "";
  }
  resized(width) {
    if (!width || width === this.width) return;  // 0 while the tab is hidden
    this.width = width;
    this.stale = true;
    if (this.visible) this.panel.schedule();
  }
  columns() {
    const { panel } = this, tables = [], labels = [];
    const drawn = (value) => (Number.isFinite(value) && !(panel.log && value <= 0) ? value : null);
    const known = panel.data.metrics.get(this.metric);
    for (const label of panel.data.labels) {
      const series = known?.get(label);
      if (!series?.value.length || panel.hidden.has(label)) continue;
      const x = panel.axis === "time" ? series.time : series.step;
      if (series instanceof Envelope) {
        const mean = series.value.map(drawn), shown = panel.smoothing > 0 ? smooth(mean, panel.smoothing) : mean;
        tables.push([[...x], shown, series.low.map(drawn), series.high.map(drawn)]);
        labels.push(label);
        continue;
      }
      const plain = increasing(x) && series.value.every((value) => drawn(value) === value);
      const [xs, ys] = plain ? [x, series.value] : sorted(x, series.value, drawn);
      tables.push(panel.smoothing > 0 ? [xs, smooth(ys, panel.smoothing), ys] : [xs, ys]);
      labels.push(label);
    }
    return { tables, labels };
  }
  /* Returns whether only the points are new. */
  draw() {
    this.stale = false;
    const { tables, labels } = this.columns(), { panel } = this;
    const width = Math.max(160, this.width ?? this.plot.clientWidth);
    const looks = labels.map((label) => [label, panel.colour(label), panel.dashed(label)]);
    const shape = JSON.stringify([looks, panel.axis, panel.log, panel.smoothing > 0, panel.dark, width]);
    const joined = merge(tables);
    this.labels = labels;
    this.joined = joined;
    this.starts = [];
    tables.reduce((at, table) => { this.starts.push(at); return at + table.length - 1; }, 1);
    this.isEnvelope = tables.map((table) => table.length === 4);
    const updates = Boolean(this.u) && shape === this.shape;
    // In a batch uPlot draws at once; otherwise it draws after the frame's last script, where no time is taken.
    if (updates) this.u.batch((u) => u.setData(joined, !this.zoomed));
    else this.build(shape, labels, joined, width);
    this.describe();
    this.drawn = performance.now();
    return updates;
  }
  build(shape, labels, joined, width) {
    const { panel } = this;
    if (this.u) this.u.destroy();
    this.shape = shape;
    this.zoomed = false;
    this.buildReadout(labels);
    if (!labels.length) { this.u = null; this.plot.replaceChildren(make("p", { class: "na-empty" }, "no rank selected")); return; }
    const style = getComputedStyle(panel.root);
    const ink = style.getPropertyValue("--na-muted-ink").trim() || "#888";
    const grid = style.getPropertyValue("--na-grid").trim() || "#8883";
    const time = panel.axis === "time";
    const series = [{}], areas = [];
    for (const [index, label] of labels.entries()) {
      const colour = panel.colour(label);
      const line = { label, stroke: colour, dash: panel.dashed(label) ? [5, 3] : undefined, width: labels.length > 6 || (this.isEnvelope.includes(true) && !this.isEnvelope[index]) ? 1.2 : 1.6, spanGaps: false, points: { show: (u) => u.data[0].length < 3 } };
      if (this.isEnvelope[index]) {
        const edge = { label, stroke: colour, alpha: 0.45, width: 0.6, points: { show: false } };
        series.push({ ...line, width: 2 }, edge, edge);
        areas.push({ series: [this.starts[index] + 2, this.starts[index] + 1], fill: colour + (panel.dark ? "38" : "2b") });
      } else if (panel.smoothing > 0) {
        series.push({ ...line, width: 1.9 });
        series.push({ ...line, label: label + " raw", alpha: 0.25, width: 1 });
      } else series.push(line);
    }
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const options = {
      width, height: 170, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { sync: { key: panel.id }, drag: { x: true, y: false, setScale: true }, points: { size: 6 }, focus: { prox: -1 } },
      scales: { x: { time: false }, y: { distr: panel.log ? 3 : 1, range: panel.log ? undefined : this.range } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 60,
          values: (u, splits) => splits.map((v) => (time ? duration(v) : format(v).replace(/^(-?\d+)$/, (n) => english(Number(n))))) },
        { ...axis, size: 56, space: 34, values: (u, splits) => ticks(splits) },
      ],
      series, bands: areas,
      hooks: {
        setCursor: [() => this.read()],
        setSelect: [(u) => { if (u.select.width > 2) { this.zoomed = true; panel.zoomChanged(); } }],
      },
    };
    this.plot.replaceChildren();
    this.u = new uPlot(options, joined, this.plot);
    this.u.over.addEventListener("dblclick", () => this.reset());
  }
  /* Margins above and below; a flat line is centred. */
  range(u, low, high) {
    if (low == null) return [0, 1];
    if (low === high) { const spread = Math.abs(low) * 0.1 || 1; return [low - spread, high + spread]; }
    const margin = (high - low) * 0.06;
    return [low - margin, high + margin];
  }
  reset() {
    this.zoomed = false;
    if (this.u) this.u.setData(this.joined, true);
    this.panel.zoomChanged();
  }
  /* The value under the cursor, or the last one; of some curves, if there are many. */
  read() {
    if (!this.u) { this.readout.replaceChildren(); this.parts = []; return; }
    const index = this.u.cursor.idx, x = index == null ? null : this.joined[0][index];
    setText(this.position, x == null ? "" : this.panel.axis === "time" ? duration(x) : `step ${english(x)}`);
    for (const { start, value, range } of this.parts) {
      const column = this.joined[start];
      let at = index == null ? column.length - 1 : index;
      while (at > 0 && column[at] == null) at--;
      setText(value, format(column[at]));
      if (range) setText(range, ` ${format(this.joined[start + 1][at])} to ${format(this.joined[start + 2][at])}`);
    }
  }
  /* Builds the elements that `read` fills: their texts change with every point, the elements do not. */
  buildReadout(labels) {
    const many = labels.length > 4;
    this.position = make("b", {}, "");
    this.parts = labels.slice(0, many ? 3 : 4).map((label, i) => {
      const value = document.createTextNode(""), range = this.isEnvelope[i] ? make("small", {}, "") : null;
      const node = make("span", { title: label }, this.panel.sample(label), value, ...(range ? [range] : []));
      return { start: this.starts[i], label, node, value, range };
    });
    this.readout.replaceChildren(this.position, ...this.parts.map((part) => part.node), ...(many ? ["…"] : []));
  }
  describe() {
    this.read();
    const last = this.parts.map(({ label, node }) => `${label} ${node.textContent}`).join(", ");
    this.node.setAttribute("aria-label", `Curve of ${this.metric} over ${this.panel.axis}; latest: ${last || "no value yet"}. Arrow keys move along it.`);
  }
  moveByKey(event) {
    if (!this.u || !this.joined[0].length) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") { this.reset(); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const last = this.joined[0].length - 1;
    const from = this.u.cursor.idx == null ? last : this.u.cursor.idx;
    const to = Math.max(0, Math.min(last, from + moves[event.key]));
    this.u.setCursor({ left: this.u.valToPos(this.joined[0][to], "x"), top: 10 });
    this.panel.announce(`${this.metric}: ${this.readout.textContent}`);
  }
}

class Panel {
  constructor(model, el) {
    this.model = model;
    this.id = randomId();
    this.data = new Metrics();
    this.charts = new Map();
    this.hidden = new Set();
    this.axis = "step";
    this.log = false;
    this.smoothing = 0;
    this.filter = "";
    this.resting = 0;
    this.schedule = oncePerFrame(() => this.paint());
    this.root = make("div", { class: "na-plots" });
    el.append(this.root);
    this.build();
    this.watch();
    this.layout();
    this.feed = new Feed(model, "data", (message) => this.changed(this.data.replace(message)), (message) => this.changed(this.data.append(message)));
  }
  build() {
    const radio = (value, text) => {
      const input = make("input", { type: "radio", name: `${this.id}-x`, value, onchange: () => { this.axis = value; this.redraw(); } });
      input.checked = value === this.axis;
      return make("label", {}, input, make("span", {}, text));
    };
    this.amount = make("output", {}, "off");
    this.slider = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing",
      oninput: () => { this.smoothing = Number(this.slider.value); this.amount.textContent = this.smoothing ? this.smoothing.toFixed(2) : "off"; this.redraw(); } });
    const log = make("input", { type: "checkbox", onchange: () => { this.log = log.checked; this.redraw(); } });
    this.search = make("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics by name",
      oninput: () => { this.filter = this.search.value.trim().toLowerCase(); this.layout(); this.requestMetrics(); } });
    this.chosen = make("input", { type: "search", class: "na-chosen-ranks", placeholder: "Ranks, e.g. 0, 5-7", "aria-label": "Ranks to draw over the envelope",
      oninput: () => { clearTimeout(this.choosing); this.choosing = setTimeout(() => { this.model.set("chosen", this.chosen.value); this.model.save_changes(); }, 400); } });
    this.chosenLabel = make("label", { title: "Draw the curves of single ranks over the envelope" }, "Show ", this.chosen);
    this.chosenLabel.hidden = true;
    this.resetZoom = make("button", { type: "button", class: "na-tool", onclick: () => this.charts.forEach((chart) => chart.reset()) }, "Reset zoom");
    this.resetZoom.hidden = true;
    this.chips = make("div", { class: "na-chips", role: "group", "aria-label": "Shown curves" });
    this.bar = make("div", { class: "na-tools", role: "group", "aria-label": "How curves are drawn" },
      this.search,
      make("span", { class: "na-segments", role: "radiogroup", "aria-label": "Horizontal axis" }, radio("step", "Step"), radio("time", "Time")),
      make("label", { class: "na-check" }, log, " Log scale"),
      make("label", { class: "na-slide" }, "Smoothing ", this.slider, this.amount),
      this.chosenLabel, this.resetZoom);
    this.grid = make("div", { class: "na-charts" });
    this.note = make("p", { class: "na-note" });
    this.live = make("div", { class: "na-hidden", "aria-live": "polite" });
    this.root.append(this.bar, this.chips, this.grid, this.note, this.live);
  }
  watch() {
    const theme = () => requestAnimationFrame(() => { this.dark = undefined; this.redraw(); });
    const themes = new MutationObserver(theme);
    for (const node of [document.documentElement, document.body])
      themes.observe(node, { attributes: true, attributeFilter: ["class", "style", "theme", "data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind"] });
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", theme);
    // The widths are kept: to read one between two drawings would compute the layout of the whole page each time.
    this.sizes = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) this.charts.get(target.parentElement?.dataset.metric)?.resized(contentRect.width);
    });
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.get(entry.target.dataset.metric);
        if (!chart) continue;
        chart.visible = entry.isIntersecting;
        if (chart.visible && chart.stale) this.schedule();
      }
    }, { rootMargin: "200px" });
    const hidden = () => this.layout();
    this.model.on("change:hidden_metrics", hidden);
    this.stop = () => {
      clearTimeout(this.waiting);
      themes.disconnect(); this.sizes.disconnect(); this.seen.disconnect();
      media.removeEventListener("change", theme);
      this.feed.stop();
      this.model.off("change:hidden_metrics", hidden);
      this.charts.forEach((chart) => chart.u && chart.u.destroy());
    };
  }
  requestMetrics() {
    if (!this.model.get("hidden_metrics") && this.model.get("wanted") === "") return;
    clearTimeout(this.requesting);
    this.requesting = setTimeout(() => { this.model.set("wanted", this.filter); this.model.save_changes(); }, 400);
  }
  changed(metrics) {
    for (const metric of metrics) {
      const chart = this.charts.get(metric);
      if (chart) chart.stale = true;
    }
    this.layout();
    this.paintChips();
    this.schedule();
  }
  layout() {
    const all = [...this.data.metrics.keys()];
    const names = all.filter((name) => name.toLowerCase().includes(this.filter));
    const shown = names.slice(0, MAX_CHARTS);
    const key = JSON.stringify(shown);
    this.bar.hidden = !all.length;
    this.chosenLabel.hidden = ![...this.data.metrics.values()].some((curves) => [...curves.values()].some((curve) => curve instanceof Envelope));
    this.search.hidden = all.length < 5 && !this.filter;
    const unseen = names.length - shown.length + (this.model.get("hidden_metrics") || 0);
    this.note.textContent = !all.length ? this.model.get("empty_text")
      : !names.length ? "No metric name contains this text."
      : unseen > 0 ? `${english(unseen)} more metrics: filter by name to see them.` : "";
    if (key === this.shown) return;
    this.shown = key;
    const wanted = new Set(shown);
    for (const [name, chart] of this.charts)
      if (!wanted.has(name)) { this.seen.unobserve(chart.node); this.sizes.unobserve(chart.plot); chart.node.remove(); if (chart.u) chart.u.destroy(); this.charts.delete(name); }
    shown.forEach((name, index) => {
      let chart = this.charts.get(name);
      if (!chart) {
        chart = new Chart(this, name);
        chart.node.dataset.metric = name;
        this.charts.set(name, chart);
        this.seen.observe(chart.node);
        this.sizes.observe(chart.plot);
      }
      if (this.grid.children[index] !== chart.node) this.grid.insertBefore(chart.node, this.grid.children[index] || null);
    });
  }
  colour(label) {
    const colours = PALETTE[this.dark ? "dark" : "light"];
    return colours[Math.max(0, this.data.labels.indexOf(label)) % colours.length];
  }
  /* The colours repeat after the eighth curve, with dashes. */
  dashed(label) { return Math.floor(this.data.labels.indexOf(label) / PALETTE.light.length) % 2 === 1; }
  sample(label) {
    const colour = this.colour(label);
    return this.dashed(label) ? make("i", { class: "na-dashed", style: `border-color:${colour}` }) : make("i", { style: `background:${colour}` });
  }
  paintChips() {
    const key = JSON.stringify([this.data.labels, [...this.hidden], this.dark]);
    if (key === this.chipKey) return;
    this.chipKey = key;
    this.chips.hidden = this.data.labels.length < 2;
    const focused = this.chips.contains(document.activeElement) ? document.activeElement.dataset.label : null;
    this.chips.replaceChildren(...this.data.labels.map((label) => {
      const on = !this.hidden.has(label);
      const chip = make("button", { type: "button", class: "na-chip", "aria-pressed": String(on),
        title: "Click: show or hide. Double-click: only this one." },
      this.sample(label), label);
      chip.dataset.label = label;
      chip.addEventListener("click", () => { on ? this.hidden.add(label) : this.hidden.delete(label); this.paintChips(); this.redraw(); });
      chip.addEventListener("dblclick", () => { this.hidden = new Set(this.data.labels.filter((other) => other !== label)); this.paintChips(); this.redraw(); });
      return chip;
    }));
    if (focused != null) [...this.chips.children].find((chip) => chip.dataset.label === focused)?.focus();
  }
  zoomChanged() { this.resetZoom.hidden = ![...this.charts.values()].some((chart) => chart.zoomed); }
  /* Draws all again, at once: the user has changed how. */
  redraw() { this.charts.forEach((chart) => { chart.stale = true; }); this.resting = 0; this.schedule(); }
  /* Draws what is stale and visible, for as long as a frame allows; the rest follows in the next one. */
  paint() {
    if (!this.root.isConnected) return;
    this.dark ??= isDark(this.root);
    this.paintChips();
    const begin = performance.now();
    if (begin < this.resting) { this.scheduleLater(this.resting - begin); return; }
    const stale = [...this.charts.values()].filter((chart) => chart.visible && chart.stale).sort((a, b) => a.drawn - b.drawn);
    let now = begin, updating = 0;
    while (stale.length && now - begin < DRAWING_MS) {
      const updated = stale.shift().draw(), before = now;
      now = performance.now();
      if (updated) updating += now - before;
    }
    this.resting = now + REST * updating;
    if (stale.length) this.scheduleLater(this.resting - now);
  }
  scheduleLater(milliseconds) {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(this.schedule, milliseconds);
  }
  announce(text) { this.live.textContent = text; }
}

export default widgetOf(Panel);
