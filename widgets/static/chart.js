/* One chart: the curves of a metric on a card, with its readout and its tools. */
const AUTOMATIC = {
  "auto/loss": "loss", "auto/lr": "learning rate", "auto/grad_norm": "gradient norm", "auto/steps_per_second": "steps per second",
  "system/cpu_percent": "CPU, % of one core", "system/memory_gb": "memory, GB", "system/gpu_percent": "GPU, %",
  "system/gpu_memory_gb": "GPU memory, GB",
};
const isAutomatic = (metric) => metric.startsWith("auto/") || metric in AUTOMATIC;
const titleOf = (metric) => AUTOMATIC[metric] ?? metric.replace(/^auto\/lr_group_/, "learning rate of group ");
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
  /* Hosts' curves are drawn over time whatever the axis of the others: no step belongs to them. */
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
    const shown = panel.data.labels.filter((label) => known?.get(label)?.value.length && !panel.hidden.has(label));
    const single = shown.filter((label) => isRank(label) && known.get(label) instanceof Series);
    if (single.length > 1 && single.slice(1).every((label) => identical(known.get(single[0]), known.get(label))))
      this.same.set(single[0], single.length === 2 ? `${single[0]} = ${single[1]}` : `${single[0]} = … = ${single.at(-1)}`);
    for (const label of shown) {
      const series = known.get(label), x = this.overTime ? series.time : series.step;
      if (this.same.size && single.includes(label) && label !== single[0]) continue;
      this.marks.push(...notFinite(x, series.value, label));
      if (series instanceof Envelope) {
        const mean = series.value.map(drawn), shown = panel.smoothing > 0 ? smooth(mean, panel.smoothing) : mean;
        tables.push([[...x], shown, series.low.map(drawn), series.high.map(drawn)]);
        labels.push(label);
        continue;
      }
      const plain = increasing(x) && series.value.every((value) => drawn(value) === value);
      const [xs, ys] = plain ? [x, series.value] : sorted(x, series.value, drawn);
      if (panel.mean && !this.same.size && single.length > 1 && single.includes(label)) { ranks.push([xs, ys]); continue; }
      tables.push(panel.smoothing > 0 ? [xs, smooth(ys, panel.smoothing), ys] : [xs, ys]);
      labels.push(label);
    }
    if (ranks.length) {
      const [xs, mean, low, high] = meanOf(ranks);
      tables.push([xs, panel.smoothing > 0 ? smooth(mean, panel.smoothing) : mean, low, high]);
      labels.push(`mean of ${ranks.length} ranks`);
    }
    return { tables, labels };
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
    const updates = Boolean(this.u) && shape === this.shape;
    // In a batch uPlot draws at once; otherwise it draws after the frame's last script, where no time is taken.
    if (updates) this.u.batch((u) => u.setData(joined, !this.zoomed));
    else this.build(shape, labels, joined, width);
    this.describe();
    this.describeMarks();
    this.drawn = performance.now();
    return updates;
  }
  /* Why a metric with values has no curve. */
  whyEmpty() {
    const known = [...(this.panel.data.metrics.get(this.metric)?.values() ?? [])];
    return known.some((series) => series.value.some(Number.isFinite))
      ? "A log scale shows positive values only, and this metric has none."
      : "All values of this metric are NaN or infinite.";
  }
  /* Says beside the title where the first value is that is not finite. */
  describeMarks() {
    const first = this.marks.reduce((least, mark) => (least && least.x <= mark.x ? least : mark), null);
    this.flag.hidden = !first;
    if (!first) return;
    const at = this.overTime ? duration(first.x) : `step ${english(first.x)}`;
    const where = this.panel.data.labels.length > 1 ? ` on ${first.label}` : "";
    setText(this.flag, `${format(first.value)} since ${at}${where}`);
    this.flag.title = "Values that are NaN or infinite are crosses and triangles at the edges of the plot";
  }
  /* Marks on the edges of the plot: a cross for NaN below, a triangle for an infinite value at its end; a line to the
   * last of several neighbours. */
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
  /* The value of a curve at an x that no axis shows; null: the last one. */
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
    const xLabel = (value) => (time ? duration(value) : format(value).replace(/^(-?\d+)$/, (n) => english(Number(n))));
    const right = (u) => Math.max(10, 2 + widest(u, [xLabel(u.scales.x.max ?? 0)]) / 2);  // of the last tick's label
    const options = {
      width, height: this.height(), legend: { show: false }, padding: [8, right, 0, 0],
      cursor: { sync: { key: panel.id }, drag: { x: true, y: false, setScale: true }, points: { size: 6 }, focus: { prox: -1 } },
      scales: { x: { time: false }, y: { distr: panel.log ? 3 : 1, range: panel.log ? undefined : this.range } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 60, values: (u, splits) => splits.map(xLabel) },
        { ...axis, size: (u, values) => Math.max(56, 14 + widest(u, values ?? [])), space: 34,
          ...(panel.log ? {} : { incrs: INCREMENTS }), values: (u, splits) => ticks(splits) },
      ],
      series, bands: areas,
      hooks: {
        setCursor: [() => this.read()],
        draw: [(u) => this.drawMarks(u)],
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
    const margin = high * 0.06 - low * 0.06;  // not of their difference, which may be infinite
    return [Math.max(low - margin, -Number.MAX_VALUE), Math.min(high + margin, Number.MAX_VALUE)];
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
    setText(this.position, x == null ? "" : this.overTime ? duration(x) : `step ${english(x)}`);
    for (const { start, curve, value, range } of this.parts) {
      const column = this.joined[start], mark = this.markAt(curve, x);
      let at = index == null ? column.length - 1 : index;
      while (at > 0 && column[at] == null) at--;
      setText(value, format(mark ? mark.value : column[at]));
      if (range) setText(range, ` ${format(this.joined[start + 1][at])} to ${format(this.joined[start + 2][at])}`);
    }
  }
  /* Builds the elements that `read` fills: their texts change with every point, the elements do not. */
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
  /* The points that the browser has, of the curves that are shown; of long curves the browser has a selection. */
  saveCsv() {
    const rows = [["metric", "curve", "step", "seconds", "value", "min", "max"]];
    for (const [label, series] of this.panel.data.metrics.get(this.metric) ?? []) {
      if (this.panel.hidden.has(label)) continue;
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
