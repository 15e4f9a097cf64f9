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
const ALTERNATING = 2000;  // the points of a chart up to which curves with the same values are drawn with alternating colours
const MAX_ALTERNATING = 8;  // curves
const DASH = 7;  // their length in pixels
const FEW_METRICS = 3;  // this many metrics need no sections
const DRAWING_MS = 3;  // of a frame's 16.7 ms, because layout and painting follow, which take several times as long without a GPU
const REST = 9;  // after drawing new points, no more are drawn for this many times as long

/* ---- the points: series of ranks or runs, their envelope, and tables for uPlot */

const MAX_POINTS = 6000;

const SMOOTHED_POINTS = 250;  // fewer than any thinned curve has, so that thinning does not change the smoothing

/* Exponential moving average of the line through the points, without the bias of its first value (Kingma and Ba, 2015,
 * section 3). An interval counts by its width rather than by its points, because thinning leaves fewer of them in some
 * parts of a curve. A value that is `reach` away counts 1/e as much.
 */
function smooth(xs, values, reach) {
  let sum = 0, scale = 0, before = null;
  return values.map((value, i) => {
    if (value == null || !Number.isFinite(value)) return value;
    const width = before == null ? 0 : xs[i] - xs[before];
    if (width > 0) {
      const added = -Math.expm1(-width / reach), slope = (value - values[before]) / width;
      sum += added * (value - sum) - slope * (reach * added - width * (1 - added));
      scale += added * (1 - scale);
    }
    before = i;
    return scale > 0 ? sum / scale : value;
  });
}

/* Returns the reach of smoothing, which is the same for all curves of a chart. For few points, `weight` is the weight of
 * the previous point, and for many, that of the point before among `SMOOTHED_POINTS` of equal distance.
 */
function reachOf(tables, weight) {
  let first = Infinity, last = -Infinity, count = 0;
  for (const [xs] of tables) {
    if (!xs.length) continue;
    first = Math.min(first, xs[0]); last = Math.max(last, xs.at(-1)); count = Math.max(count, xs.length);
  }
  return (last - first) / Math.max(1, Math.min(SMOOTHED_POINTS, count - 1)) / -Math.log(weight);
}

/* Returns a table with its curve smoothed: an envelope with its edges, or another curve with its values after it. */
function smoothed([xs, ...columns], reach) {
  const means = columns.map((values) => smooth(xs, values, reach));
  return columns.length > 1 ? [xs, ...means] : [xs, ...means, ...columns];
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
  /* M4 over groups of eight: first, last, smallest, largest, and the first NaN. */
  downsample() {
    const keep = [], { value } = this;
    for (let i = 0; i < value.length; i += 8) {
      const end = Math.min(i + 8, value.length);
      let low = i, high = i, missing = i;
      for (let j = end - 1; j >= i; j--) {
        if (value[j] !== value[j]) { missing = j; continue; }
        if (!(value[j] > value[low])) low = j;
        if (!(value[j] < value[high])) high = j;
      }
      keep.push(...[...new Set([i, low, high, missing, end - 1])].sort((a, b) => a - b));
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

/* Returns whether each value is greater than the one before it. */
function increasing(xs) {
  for (let i = 1; i < xs.length; i++) if (!(xs[i] > xs[i - 1])) return false;
  return true;
}

/* Merges tables [x, column, ...] into one x and all columns, with `undefined` where a table has no point at an x.
 *
 * uPlot.join sorts the values of all tables, which takes several times as long. It is used only if an x does not increase.
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

/* Returns points in the order of x, with only the last one drawn at each x. */
function sorted(x, values, drawn) {
  const xs = [], ys = [];
  for (const i of [...x.keys()].sort((a, b) => x[a] - x[b])) {
    const shown = drawn(values[i]);
    if (xs.length && xs[xs.length - 1] === x[i]) { if (shown != null) ys[ys.length - 1] = shown; }
    else { xs.push(x[i]); ys.push(shown); }
  }
  return [xs, ys];
}

/* Returns whether two series have the same values at their common steps. Most steps must be in both, but not all: ranks
 * report at different moments, and their points are downsampled at different lengths.
 */
function identical(one, other) {
  if (!increasing(one.step) || !increasing(other.step)) return false;
  let common = 0;
  for (let i = 0, j = 0; i < one.step.length && j < other.step.length;) {
    if (one.step[i] < other.step[j]) i++;
    else if (one.step[i] > other.step[j]) j++;
    else {
      if (!Object.is(one.value[i], other.value[j])) return false;
      common++; i++; j++;
    }
  }
  return common > 0 && 2 * common >= Math.min(one.step.length, other.step.length);
}

/* Returns the mean of several tables [x, values], with the smallest and the largest value at each x. */
function meanOf(tables) {
  const [xs, ...columns] = merge(tables.map(([x, values]) => [x, values]));
  const mean = [], low = [], high = [];
  for (let i = 0; i < xs.length; i++) {
    let sum = 0, count = 0, least = Infinity, most = -Infinity;
    for (const column of columns) {
      const value = column[i];
      if (value == null) continue;
      sum += value; count++;
      if (value < least) least = value;
      if (value > most) most = value;
    }
    mean.push(count ? Math.min(most, Math.max(least, sum / count)) : null);  // rounding may place a mean outside
    low.push(count ? least : null);
    high.push(count ? most : null);
  }
  return [xs, mean, low, high];
}

/* Returns the values that no axis can show as [{x, until, value, label, last}, ...]. Neighbours of the same kind share an
 * entry. `last` tells whether the series ends with them.
 */
const MAX_MARKS = 200;

function notFinite(x, values, label) {
  const marks = [];
  let mark = null;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) { mark = null; continue; }
    if (mark && Object.is(mark.value, values[i])) mark.until = x[i];
    else if (marks.length === MAX_MARKS) return marks;
    else marks.push(mark = { x: x[i], until: x[i], value: values[i], label, last: false });
  }
  if (mark) mark.last = true;
  return marks;
}

/* ---- one chart: the curves of a metric on a card, with its readout and its tools */

const AUTOMATIC = {
  "auto/loss": "loss", "auto/lr": "learning rate", "auto/grad_norm": "gradient norm", "auto/steps_per_second": "steps per second",
  "system/cpu_percent": "CPU, % of one core", "system/memory_gb": "memory", "system/gpu_percent": "GPU, %",
  "system/gpu_memory_gb": "GPU memory",
};
const IN_GB = new Set(["system/memory_gb", "system/gpu_memory_gb"]);
const isAutomatic = (metric) => metric.startsWith("auto/") || metric in AUTOMATIC;
const titleOf = (metric) => AUTOMATIC[metric] ?? metric.replace(/^auto\/lr_group_/, "learning rate of group ");
/* Returns the name of a run without the arguments that follow it, such as "train 3" for "train 3: lr 0.1". */
const runOf = (label) => label.split(": ", 1)[0];
const isRank = (label) => /(^|· )rank \d+$/.test(label);

function icon(path) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "path");
  for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: "14", height: "14", fill: "none", stroke: "currentColor", "stroke-width": "1.4", "stroke-linejoin": "round", "stroke-linecap": "round", "aria-hidden": "true" })) svg.setAttribute(name, value);
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

function save(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const csvText = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

class Chart {
  constructor(panel, metric) {
    this.panel = panel;
    this.metric = metric;
    const inGB = IN_GB.has(metric);
    this.format = inGB ? (value) => sizeText(value == null ? value : 1e9 * value) : format;
    this.ticks = inGB ? (splits) => sizes(splits.map((value) => (value == null ? value : 1e9 * value))) : ticks;
    this.title = make("span", { class: "na-chart-name", onclick: () => this.enlarge(!this.large) }, titleOf(metric));
    this.title.title = metric;
    this.flag = make("span", { class: "na-chart-flag" });
    this.flag.hidden = true;
    this.readout = make("span", { class: "na-chart-value" });
    this.plot = make("div", { class: "na-chart-plot" });
    this.node = make("figure", { class: "na-chart", tabindex: "0", role: "group" },
      make("figcaption", {}, make("div", { class: "na-chart-head" }, this.title, this.flag, this.tools()), this.readout), this.plot);
    if (isAutomatic(metric)) this.title.after(make("span", { class: "na-auto", title: "Sampled automatically, without a call of log" }, "auto"));
    this.large = this.wide = false;
    this.node.addEventListener("keydown", (event) => this.moveByKey(event));
    this.node.addEventListener("blur", () => this.u && this.u.setCursor({ left: -10, top: -10 }));
    this.parts = [];
    this.drawn = 0;
    this.visible = false;
    this.stale = true;
    this.zoomed = false;
    this.shape = "";
  }
  tools() {
    const tool = (name, label, action, ...content) =>
      make("button", { type: "button", class: `na-card-tool ${name}`, "aria-label": `${label}: ${this.metric}`, title: label, onclick: action }, ...content);
    this.pinTool = tool("na-pin", "Pin to the top", () => this.panel.pin(this.metric), icon("M9.5 1.5 14.5 6.5 11 8 10.5 11.5 4.5 5.5 8 5zM7 9 2 14"));
    this.sizeTool = tool("na-size", "Enlarge", () => this.enlarge(!this.large), icon("M9 2h5v5M14 2 9.5 6.5M7 14H2V9M2 14l4.5-4.5"));
    return make("span", { class: "na-card-tools" }, this.pinTool,
      tool("na-png", "Download as PNG", () => this.savePng(), "PNG"), tool("na-csv", "Download as CSV", () => this.saveCsv(), "CSV"), this.sizeTool);
  }
  enlarge(large) {
    this.large = large;
    this.node.classList.toggle("na-large", large);
    this.sizeTool.title = large ? "Shrink" : "Enlarge";
    this.sizeTool.setAttribute("aria-label", `${this.sizeTool.title}: ${this.metric}`);
    this.sizeTool.setAttribute("aria-pressed", String(large));
    this.stale = true;
    this.panel.schedule();
    if (large) requestAnimationFrame(() => this.node.scrollIntoView({ block: "nearest" }));
  }
  height() { return this.large ? 380 : this.wide ? 240 : 170; }
  /* Curves of hosts are always drawn over time, because they have no steps. */
  get overTime() { return this.panel.axis === "time" || this.metric.startsWith("system/"); }
  resized(width) {
    if (!width || width === this.width) return;  // 0 while the tab is hidden
    this.width = width;
    this.stale = true;
    if (this.visible) this.panel.schedule();
  }
  columns() {
    const { panel } = this, tables = [], labels = [], ranks = [];
    this.marks = [];
    this.same = new Map();
    const drawn = (value) => (Number.isFinite(value) && !(panel.log && value <= 0) ? value : null);
    const known = panel.data.metrics.get(this.metric);
    const shown = panel.data.labels.filter((label) => known?.get(label)?.value.length && panel.isShown(label));
    const single = shown.filter((label) => isRank(label) && known.get(label) instanceof Series);
    if (single.length > 1 && single.slice(1).every((label) => identical(known.get(single[0]), known.get(label))))
      this.same.set(single[0], single.length === 2 ? `${single[0]} = ${single[1]}` : `${single[0]} = … = ${single.at(-1)}`);
    for (const label of shown) {
      const series = known.get(label), x = this.overTime ? series.time : series.step;
      if (this.same.size && single.includes(label) && label !== single[0]) continue;
      this.marks.push(...notFinite(x, series.value, label));
      if (series instanceof Envelope) {
        tables.push([[...x], series.value.map(drawn), series.low.map(drawn), series.high.map(drawn)]);
        labels.push(label);
        continue;
      }
      const plain = increasing(x) && series.value.every((value) => drawn(value) === value);
      const [xs, ys] = plain ? [x, series.value] : sorted(x, series.value, drawn);
      if (panel.mean && !this.same.size && single.length > 1 && single.includes(label)) { ranks.push([xs, ys]); continue; }
      tables.push([xs, ys]);
      labels.push(label);
    }
    if (ranks.length) {
      tables.push(meanOf(ranks));
      labels.push(`mean of ${ranks.length} ranks`);
    }
    if (!panel.smoothing) return { tables, labels };
    const reach = reachOf(tables, panel.smoothing);
    return { tables: tables.map((table) => smoothed(table, reach)), labels };
  }
  /* Returns whether only the points are new. */
  draw() {
    this.stale = false;
    const { tables, labels } = this.columns(), { panel } = this;
    const width = Math.max(160, this.width ?? this.plot.clientWidth);
    this.reason = labels.length && !tables.some((table) => table[1].some((value) => value != null)) ? this.whyEmpty() : "";
    const looks = labels.map((label) => [label, panel.colour(label), panel.dashed(label)]);
    const shape = JSON.stringify([this.reason, looks, [...this.same], panel.axis, panel.log, panel.mean, panel.smoothing > 0, panel.dark, width, this.height()]);
    const joined = merge(tables);
    this.labels = labels;
    this.joined = joined;
    this.starts = [];
    tables.reduce((at, table) => { this.starts.push(at); return at + table.length - 1; }, 1);
    this.isEnvelope = tables.map((table) => table.length === 4);
    this.lines = labels.flatMap((label, i) => (tables[i].length < 4 ? [this.starts[i]] : []));
    const updates = Boolean(this.u) && shape === this.shape;
    // In a batch, uPlot draws at once. Otherwise it draws after the frame's last script, where the time is not measured.
    if (updates) this.u.batch((u) => { this.setAlpha(u); u.setData(joined, !this.zoomed); });
    else this.build(shape, labels, joined, width);
    this.describe();
    this.describeMarks();
    this.drawn = performance.now();
    return updates;
  }
  /* Returns why a metric with values has no curve. */
  whyEmpty() {
    const known = [...(this.panel.data.metrics.get(this.metric)?.values() ?? [])];
    return known.some((series) => series.value.some(Number.isFinite))
      ? "A log scale shows positive values only, and this metric has none."
      : "All values of this metric are NaN or infinite.";
  }
  /* Shows beside the title where the first value that is not finite is. */
  describeMarks() {
    const first = this.marks.reduce((least, mark) => (least && least.x <= mark.x ? least : mark), null);
    this.flag.hidden = !first;
    if (!first) return;
    const at = this.overTime ? duration(first.x) : `step ${english(first.x)}`;
    const where = this.panel.data.labels.length > 1 ? ` on ${first.label}` : "";
    setText(this.flag, `${this.format(first.value)} since ${at}${where}`);
    this.flag.title = "Values that are NaN or infinite are crosses and triangles at the edges of the plot";
  }
  /* Draws marks on the edges of the plot: a cross at the bottom for NaN, a triangle at the top or bottom for an infinite
   * value, and a line to the last of several neighbours. */
  drawMarks(u) {
    const { ctx, bbox } = u, size = 3.5 * devicePixelRatio, end = bbox.left + bbox.width;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = getComputedStyle(this.panel.root).getPropertyValue("--na-bad").trim() || "#c62833";
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const { x, until, value } of this.marks) {
      const left = u.valToPos(x, "x", true), right = until > x ? u.valToPos(until, "x", true) : left;
      if (!(right >= bbox.left - 1 && left <= end + 1)) continue;
      const up = value === Infinity, y = up ? bbox.top + size : bbox.top + bbox.height - size;
      ctx.beginPath();
      if (right > left) { ctx.moveTo(Math.max(left, bbox.left), y); ctx.lineTo(Math.min(right, end), y); }
      if (left < bbox.left - 1) { ctx.stroke(); continue; }
      if (Number.isNaN(value)) {
        ctx.moveTo(left - size, y - size); ctx.lineTo(left + size, y + size);
        ctx.moveTo(left - size, y + size); ctx.lineTo(left + size, y - size);
        ctx.stroke();
      } else {
        ctx.stroke();
        ctx.beginPath();
        const tip = up ? -size : size;
        ctx.moveTo(left, y + tip); ctx.lineTo(left - size, y - tip); ctx.lineTo(left + size, y - tip);
        ctx.fill();
      }
    }
    ctx.restore();
  }
  get alternates() { return this.lines.length > 1 && this.lines.length <= MAX_ALTERNATING && this.joined[0].length <= ALTERNATING; }
  setAlpha(u) {
    const alpha = this.lines.length > 1 && !this.alternates && this.labels.some(isRank) ? 0.7 : 1;
    for (const at of this.lines) u.series[at].alpha = alpha;
  }
  /* Draws dashes of each curve over itself, so that curves with the same values show the colours of all of them. Of other
   * curves, the dashes are invisible. Ranks with many points are transparent instead, because dashes take longer. */
  drawDashes(u) {
    if (!this.alternates) return;
    const { ctx, bbox } = u, length = DASH * devicePixelRatio, count = this.lines.length;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const shift = ((u.series[this.lines[0]].width * devicePixelRatio) % 2) / 2;  // by which uPlot shifts lines
    ctx.translate(shift, shift);
    ctx.lineJoin = "round";
    this.lines.forEach((at, place) => {
      const { _paths: paths, _stroke: stroke, width } = u.series[at];
      if (!paths?.stroke || u.series[at].dash) return;
      ctx.strokeStyle = stroke;
      ctx.lineWidth = width * devicePixelRatio;
      ctx.setLineDash([length, (count - 1) * length]);
      ctx.lineDashOffset = -place * length;
      ctx.stroke(paths.stroke);
    });
    ctx.restore();
  }
  /* Returns the mark of a curve at an x or, if x is null, at the end of the curve. */
  markAt(label, x) {
    return this.marks.find((mark) => mark.label === label && (x == null ? mark.last : x >= mark.x && x <= mark.until));
  }
  build(shape, labels, joined, width) {
    const { panel } = this;
    if (this.u) this.u.destroy();
    this.shape = shape;
    this.zoomed = false;
    this.buildReadout(labels);
    if (!labels.length || this.reason) {
      this.u = null;
      this.plot.replaceChildren(make("p", { class: "na-empty" }, this.reason || "no rank selected"));
      return;
    }
    const style = getComputedStyle(panel.root);
    const ink = style.getPropertyValue("--na-muted-ink").trim() || "#888";
    const grid = style.getPropertyValue("--na-grid").trim() || "#8883";
    const time = this.overTime;
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
    const axis = { stroke: ink, font: AXIS_FONT, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const xLabels = time ? durations : (steps) => steps.map((step) => (step < 0 ? "" : english(step)));
    const ends = ({ min, max }) => (min == null ? [0] : time ? [max - (max - min) / 10, max] : [Math.round(max)]);
    const right = (u) => Math.max(10, 2 + widest(u, xLabels(ends(u.scales.x))) / 2);  // of the last tick's label
    const options = {
      width, height: this.height(), legend: { show: false }, padding: [8, right, 0, 0],
      cursor: { sync: { key: panel.id }, drag: { x: true, y: false, setScale: true }, points: { size: 6 }, focus: { prox: -1 } },
      scales: { x: { time: false, range: (u, first, last) => this.domain(u.data[0], first, last) }, y: { distr: panel.log ? 3 : 1, range: panel.log ? undefined : this.range } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 60, incrs: time ? DURATIONS : STEPS, values: (u, splits) => xLabels(splits) },
        { ...axis, size: (u, values) => Math.max(56, 14 + widest(u, values ?? [])), space: 34,
          ...(panel.log ? {} : { incrs: INCREMENTS }), values: (u, splits) => this.ticks(splits) },
      ],
      series, bands: areas,
      hooks: {
        setCursor: [() => this.read()],
        draw: [(u) => { this.drawDashes(u); this.drawMarks(u); }],
        setSelect: [(u) => { if (u.select.width > 2) { this.zoomed = true; panel.zoomChanged(); } }],
      },
    };
    this.plot.replaceChildren();
    this.u = new uPlot(options, joined, this.plot);
    this.setAlpha(this.u);
    this.u.over.addEventListener("dblclick", () => this.reset());
  }
  /* Returns the ends of the horizontal axis: the first and the last point, or the surroundings of the only one. */
  domain(xs, first, last) {
    if (xs.length !== 1) return first == null ? [0, 1] : [first, last];
    return this.overTime ? [Math.max(0, xs[0] - 0.5), xs[0] + 0.5] : [xs[0] - 1, xs[0] + 1];
  }
  /* Margins above and below; a flat line is centred, even if a mean of equal values is rounded. */
  range(u, low, high) {
    if (low == null) return [0, 1];
    if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) { const spread = Math.abs(low) * 0.1 || 1; return [low - spread, high + spread]; }
    const margin = high * 0.06 - low * 0.06;  // the difference itself may be infinite
    return [Math.max(low - margin, -Number.MAX_VALUE), Math.min(high + margin, Number.MAX_VALUE)];
  }
  reset() {
    this.zoomed = false;
    if (this.u) this.u.setData(this.joined, true);
    this.panel.zoomChanged();
  }
  /* Shows the values under the cursor, or else the last ones. If there are many curves, only some are shown. */
  read() {
    if (!this.u) { this.readout.replaceChildren(); this.parts = []; return; }
    const index = this.u.cursor.idx, x = index == null ? null : this.joined[0][index];
    setText(this.position, x == null ? "" : this.overTime ? duration(x) : `step ${english(x)}`);
    for (const { start, curve, value, range } of this.parts) {
      const column = this.joined[start], mark = this.markAt(curve, x);
      let at = index == null ? column.length - 1 : index;
      while (at > 0 && column[at] == null) at--;
      setText(value, this.format(mark ? mark.value : column[at]));
      if (range) setText(range, ` ${this.format(this.joined[start + 1][at])} to ${this.format(this.joined[start + 2][at])}`);
    }
  }
  /* Builds the elements that `read` fills. Only their text changes with every point. */
  buildReadout(labels) {
    const many = labels.length > 4;
    this.position = make("b", {}, "");
    this.parts = labels.slice(0, many ? 3 : 4).map((label, i) => {
      const value = document.createTextNode(""), range = this.isEnvelope[i] ? make("small", {}, "") : null;
      const same = this.same.get(label);
      const node = make("span", { title: same ? `${same}: the same values` : label }, same ? this.panel.sharedSample(label) : this.panel.sample(label), value, ...(range ? [range] : []), ...(same ? [make("small", {}, ` ${same}`)] : []));
      return { start: this.starts[i], curve: label, label: same || label, node, value, range };
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
    if (event.key === "Escape") { this.large ? this.enlarge(false) : this.reset(); return; }
    if (event.key === "Enter" && event.target === this.node) { this.enlarge(!this.large); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const last = this.joined[0].length - 1;
    const from = this.u.cursor.idx == null ? last : this.u.cursor.idx;
    const to = Math.max(0, Math.min(last, from + moves[event.key]));
    this.u.setCursor({ left: this.u.valToPos(this.joined[0][to], "x"), top: 10 });
    this.panel.announce(`${this.metric}: ${this.readout.textContent}`);
  }
  /* Saves the points of the visible curves that the browser has. Of long curves, it has only a selection. */
  saveCsv() {
    const rows = [["metric", "curve", "step", "seconds", "value", "min", "max"]];
    for (const [label, series] of this.panel.data.metrics.get(this.metric) ?? []) {
      if (!this.panel.isShown(label)) continue;
      for (let i = 0; i < series.value.length; i++)
        rows.push([this.metric, label, series.step[i], series.time[i], series.value[i], series.low?.[i] ?? "", series.high?.[i] ?? ""]);
    }
    const text = rows.map((row) => row.map((cell) => csvText(String(cell))).join(",") + "\r\n").join("");
    save(`${this.metric}.csv`, new Blob([text], { type: "text/csv" }));
  }
  /* The chart with its name and the names of its curves, in the colours of the page. */
  savePng() {
    if (!this.u) return;
    const ratio = devicePixelRatio, source = this.u.ctx.canvas, style = getComputedStyle(this.panel.root);
    const canvas = make("canvas"), ctx = canvas.getContext("2d"), head = 48 * ratio;
    canvas.width = source.width + 16 * ratio;
    canvas.height = source.height + head + 8 * ratio;
    ctx.fillStyle = this.panel.dark ? "#111418" : "#ffffff";
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(source, 8 * ratio, head);
    ctx.scale(ratio, ratio);
    ctx.fillStyle = style.color;
    ctx.font = "600 13px system-ui, sans-serif";
    ctx.fillText(this.metric, 16, 20);
    ctx.font = AXIS_FONT;
    let left = 16;
    for (const label of this.labels) {
      const text = this.same.get(label) ?? label;
      ctx.fillStyle = this.panel.colour(label);
      ctx.fillRect(left, 31, 10, 3);
      ctx.fillStyle = style.color;
      ctx.fillText(text, left + 15, 37);
      left += 27 + ctx.measureText(text).width;
    }
    canvas.toBlob((blob) => save(`${this.metric}.png`, blob));
  }
}

/* ---- the panel: all charts, in sections, with their controls */

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
    this.mean = false;
    this.filter = "";
    this.pins = new Set();  // the metrics that the user has pinned
    this.folded = new Set(["system"]);
    this.sections = new Map();
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
    const radio = (name, text, checked, choose) => {
      const input = make("input", { type: "radio", name: `${this.id}-${name}`, onchange: () => { choose(); this.redraw(); } });
      input.checked = checked;
      return make("label", {}, input, make("span", {}, text));
    };
    this.amount = make("output", {}, "off");
    this.slider = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing",
      oninput: () => { this.smoothing = Number(this.slider.value); this.amount.textContent = this.smoothing ? this.smoothing.toFixed(2) : "off"; this.redraw(); } });
    const log = make("input", { type: "checkbox", onchange: () => { this.log = log.checked; this.redraw(); } });
    this.search = make("input", { type: "search", placeholder: "Filter, e.g. loss|acc", "aria-label": "Filter metrics by name, with text or a regular expression",
      oninput: () => { this.filter = this.search.value.trim(); this.layout(); this.requestMetrics(); } });
    this.chosen = make("input", { type: "search", class: "na-chosen-ranks", placeholder: "Ranks, e.g. 0, 5-7", "aria-label": "Ranks to draw over the envelope",
      oninput: () => { clearTimeout(this.choosing); this.choosing = setTimeout(() => { this.model.set("chosen", this.chosen.value); this.model.save_changes(); }, 400); } });
    this.chosenLabel = make("label", { title: "Draw the curves of single ranks over the envelope" }, "Show ", this.chosen);
    this.chosenLabel.hidden = true;
    this.resetZoom = make("button", { type: "button", class: "na-tool", onclick: () => this.charts.forEach((chart) => chart.reset()) }, "Reset zoom");
    this.resetZoom.hidden = true;
    this.chips = make("div", { class: "na-chips", role: "group", "aria-label": "Shown curves" });
    this.bar = make("div", { class: "na-tools", role: "group", "aria-label": "How curves are drawn" },
      this.search,
      make("span", { class: "na-segments", role: "radiogroup", "aria-label": "Horizontal axis" },
        radio("x", "Step", true, () => { this.axis = "step"; }), radio("x", "Time", false, () => { this.axis = "time"; })),
      this.modes = make("span", { class: "na-segments", role: "radiogroup", "aria-label": "Curves of ranks" },
        radio("ranks", "Ranks", true, () => { this.mean = false; }), radio("ranks", "Mean", false, () => { this.mean = true; })),
      make("label", { class: "na-check" }, log, " Log scale"),
      make("label", { class: "na-slide" }, "Smoothing ", this.slider, this.amount),
      this.chosenLabel, this.resetZoom);
    this.hint = make("p", { class: "na-note" });
    this.grids = make("div", { class: "na-sections" });
    this.note = make("p", { class: "na-note" });
    this.live = make("div", { class: "na-hidden", "aria-live": "polite" });
    this.root.append(this.hint, this.bar, this.chips, this.grids, this.note, this.live);
  }
  watch() {
    const unwatch = watchTheme(() => requestAnimationFrame(() => { this.dark = undefined; this.redraw(); }));
    // The widths are kept, because reading one between two drawings would compute the layout of the whole page.
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
    const hidden = () => this.layout(), order = () => { this.chipKey = ""; this.redraw(); };
    /* A new run may change the names of the others, because names contain the arguments that differ. */
    const renamed = () => {
      const now = this.model.get("order") ?? [], named = new Map(now.map((label) => [runOf(label), label]));
      this.hidden = new Set([...this.hidden].map((label) => (now.includes(label) ? label : named.get(runOf(label)) ?? label)));
      order();
    };
    this.model.on("change:hidden_metrics", hidden);
    this.model.on("change:order", renamed);
    // The filter of a table in the same card hides curves; see table.js.
    const filtered = ({ target, detail }) => {
      if (!this.root.closest(".na-card")?.contains(target)) return;
      this.only = detail.colours && new Set(detail.colours);
      order();
    };
    document.addEventListener("na-filter", filtered);
    this.stop = () => {
      clearTimeout(this.waiting);
      document.removeEventListener("na-filter", filtered);
      unwatch(); this.sizes.disconnect(); this.seen.disconnect();
      this.feed.stop();
      this.model.off("change:hidden_metrics", hidden);
      this.model.off("change:order", renamed);
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
  /* A filter is a regular expression. If it is not a valid one, it is text to look for. */
  matcher() {
    const { filter } = this, plain = (name) => name.toLowerCase().includes(filter.toLowerCase());
    this.search.setAttribute("aria-invalid", "false");
    if (!filter) return () => true;
    try {
      const expression = new RegExp(filter, "i");
      return (name) => expression.test(name) || expression.test(titleOf(name));
    } catch {
      this.search.setAttribute("aria-invalid", "true");
      return plain;
    }
  }
  pin(metric) {
    if (!this.pins.delete(metric)) this.pins.add(metric);
    this.layout();
    this.schedule();
  }
  /* Returns the sections: pinned metrics, metrics without a prefix, one section per prefix, and automatic ones last. */
  grouped(names, pinned) {
    const groups = new Map();
    const put = (key, name) => { if (!groups.has(key)) groups.set(key, []); groups.get(key).push(name); };
    for (const name of pinned) put("pinned", name);
    const rest = names.filter((name) => !pinned.includes(name)), few = [...this.data.metrics.keys()].filter((name) => !isAutomatic(name)).length <= FEW_METRICS;
    const prefix = (name) => (name.includes("/") && !few ? name.slice(0, name.indexOf("/")) : "");
    const late = (name) => ["auto", "system"].indexOf(isAutomatic(name) ? name.slice(0, name.indexOf("/")) : "");
    for (const name of rest) if (late(name) < 0 && !prefix(name)) put("/", name);
    const prefixes = [...new Set(names.filter((name) => late(name) < 0).map(prefix))].filter(Boolean);  // pinned ones keep their place
    for (const each of prefixes) for (const name of rest) if (late(name) < 0 && prefix(name) === each) put(`/${each}`, name);
    for (const key of ["auto", "system"]) for (const name of rest) if (late(name) >= 0 && name.startsWith(`${key}/`)) put(key, name);
    return groups;
  }
  /* Returns all metrics except the automatic ones that the run also logs itself. */
  wantedNames() {
    const all = [...this.data.metrics.keys()], own = all.filter((name) => !isAutomatic(name));
    const logged = (pattern) => own.some((name) => pattern.test(name.split("/").at(-1)) && !/val|test|eval/i.test(name));
    const spare = { "auto/loss": /loss/i, "auto/lr": /^(lr|learning_rate)/i, "auto/grad_norm": /grad.*norm/i };
    return all.filter((name) => !(name in spare) || !logged(spare[name]));
  }
  layout() {
    const all = this.wantedNames(), pinned = all.filter((name) => this.pins.has(name)), fits = this.matcher();
    const matching = all.filter(fits), groups = this.grouped(matching, pinned.filter((name) => matching.includes(name)));
    let left = MAX_CHARTS;
    for (const [key, names] of groups) {
      groups.set(key, names.slice(0, left));
      left -= groups.get(key).length;
      if (!groups.get(key).length) groups.delete(key);
    }
    const unseen = matching.length - Math.min(matching.length, MAX_CHARTS) + (this.model.get("hidden_metrics") || 0);
    this.bar.hidden = !all.length;
    const curves = [...this.data.metrics.values()].map((known) => [...known]);
    this.chosenLabel.hidden = !curves.some((known) => known.some(([, curve]) => curve instanceof Envelope));
    this.modes.hidden = !curves.some((known) => known.filter(([label, curve]) => isRank(label) && curve instanceof Series).length > 1);
    this.search.hidden = all.length < 5 && !this.filter;
    setText(this.hint, all.length && all.every(isAutomatic) ? this.model.get("empty_text") : "");
    this.hint.hidden = !this.hint.textContent;
    setText(this.note, !all.length ? this.model.get("empty_text")
      : !matching.length ? `No metrics match '${this.filter}'.`
      : unseen > 0 ? `${english(unseen)} more metrics: filter by name to see them.` : "");
    this.arrange(groups, pinned);
  }
  arrange(groups, pinned) {
    const key = JSON.stringify([[...groups], pinned]);
    if (key === this.shown) return;
    this.shown = key;
    const wanted = new Set([...groups.values()].flat());
    for (const [name, chart] of this.charts)
      if (!wanted.has(name)) { this.seen.unobserve(chart.node); this.sizes.unobserve(chart.plot); chart.node.remove(); if (chart.u) chart.u.destroy(); this.charts.delete(name); }
    for (const [name, section] of this.sections) if (!groups.has(name)) { section.node.remove(); this.sections.delete(name); }
    const own = [...groups.keys()].filter((name) => name === "pinned" || name.startsWith("/"));
    [...groups].forEach(([name, metrics], index) => {
      // Cards have the same size, except pinned ones and those of a single section, which fill the row.
      const section = this.section(name), fills = name === "pinned" || (own.length < 2 && (own.includes(name) || groups.size < 2));
      section.grid.classList.toggle("na-fills", fills);
      section.head.hidden = groups.size < 2;
      setText(section.count, String(metrics.length));
      this.showSection(section, groups.size < 2 || !this.folded.has(name));
      if (this.grids.children[index] !== section.node) this.grids.insertBefore(section.node, this.grids.children[index] || null);
      metrics.forEach((metric, place) => {
        const chart = this.chart(metric), on = pinned.includes(metric);
        chart.wide = fills && metrics.length === 1;
        chart.stale = true;
        chart.pinTool.setAttribute("aria-pressed", String(on));
        chart.pinTool.title = on ? "Unpin" : "Pin to the top";
        if (section.grid.children[place] !== chart.node) section.grid.insertBefore(chart.node, section.grid.children[place] || null);
      });
    });
  }
  section(name) {
    if (this.sections.has(name)) return this.sections.get(name);
    const titles = { pinned: "Pinned", "/": "Metrics", auto: "Automatic", system: "System" };
    const section = { name, count: make("span", { class: "na-section-count" }), grid: make("div", { class: "na-charts" }) };
    section.button = make("button", { type: "button", class: "na-fold", onclick: () => {
      this.folded.has(name) ? this.folded.delete(name) : this.folded.add(name);
      this.showSection(section, !this.folded.has(name));
      this.schedule();
    } }, make("i"), make("span", {}, titles[name] ?? name.slice(1)), section.count);
    section.head = make("div", { class: "na-section-head" }, section.button);
    if (name === "auto" || name === "system") section.head.append(make("span", { class: "na-muted" }, name === "auto" ? "sampled without logging" : "processes of the ranks, over time"));
    section.node = make("section", { class: `na-section na-section-${["pinned", "auto", "system"].includes(name) ? name : "own"}` }, section.head, section.grid);
    this.sections.set(name, section);
    return section;
  }
  showSection(section, open) {
    section.grid.hidden = !open;
    section.button.setAttribute("aria-expanded", String(open));
  }
  chart(name) {
    let chart = this.charts.get(name);
    if (!chart) {
      chart = new Chart(this, name);
      chart.node.dataset.metric = name;
      this.charts.set(name, chart);
      this.seen.observe(chart.node);
      this.sizes.observe(chart.plot);
    }
    return chart;
  }
  /* Returns the place of a curve's colour. Tables beside the plot may determine the order. */
  place(label) {
    const order = this.model.get("order");
    return Math.max(0, (order?.includes(label) ? order : this.data.labels).indexOf(label));
  }
  colour(label) {
    const colours = PALETTE[this.dark ? "dark" : "light"];
    return colours[this.place(label) % colours.length];
  }
  /* After the eighth curve, the colours repeat with dashes. */
  dashed(label) { return Math.floor(this.place(label) / PALETTE.light.length) % 2 === 1; }
  isShown(label) { return !this.hidden.has(label) && this.passes(label); }
  passes(label) { return !this.only || this.only.has(this.place(label)); }
  sample(label) {
    const colour = this.colour(label);
    return this.dashed(label) ? make("i", { class: "na-dashed", style: `border-color:${colour}` }) : make("i", { style: `background:${colour}` });
  }
  /* The sample of a curve that stands for all ranks has their first two colours. */
  sharedSample(label) {
    const ranks = this.data.labels.filter(isRank), other = ranks[ranks.indexOf(label) + 1] ?? ranks[0];
    return make("i", { style: `background:linear-gradient(90deg, ${this.colour(label)} 50%, ${this.colour(other)} 50%)` });
  }
  paintChips() {
    const key = JSON.stringify([this.data.labels, [...this.hidden], this.dark]);
    if (key === this.chipKey) return;
    this.chipKey = key;
    this.chips.hidden = this.data.labels.length < 2;
    const focused = this.chips.contains(document.activeElement) ? document.activeElement.dataset.label : null;
    this.chips.replaceChildren(...this.data.labels.filter((label) => this.passes(label)).map((label) => {
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
  /* Draws everything again at once, because the user has changed a setting. */
  redraw() { this.charts.forEach((chart) => { chart.stale = true; }); this.resting = 0; this.schedule(); }
  /* Draws stale and visible charts for as long as a frame allows. The others follow in the next frame. */
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
