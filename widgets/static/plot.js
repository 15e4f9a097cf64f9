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
const FEW_METRICS = 3;  // so many need no sections
const DRAWING_MS = 3;  // of a frame's 16.7 ms: layout and painting follow, which take several times as long without a GPU
const REST = 9;  // after drawing new points, no more are drawn for this many times as long

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
    this.pins = new Map();  // by metric, what the user chose
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
    this.search = make("input", { type: "search", placeholder: "Filter, e.g. loss|acc", "aria-label": "Filter metrics by name, a text or a regular expression",
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
    const hidden = () => this.layout(), order = () => { this.chipKey = ""; this.redraw(); };
    this.model.on("change:hidden_metrics", hidden);
    this.model.on("change:order", order);
    this.stop = () => {
      clearTimeout(this.waiting);
      themes.disconnect(); this.sizes.disconnect(); this.seen.disconnect();
      media.removeEventListener("change", theme);
      this.feed.stop();
      this.model.off("change:hidden_metrics", hidden);
      this.model.off("change:order", order);
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
  /* A filter is a regular expression; one that is none is a text to look for. */
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
  /* The loss and the accuracy are pinned where there are many metrics, and the automatic loss where nothing is logged,
   * unless the user chose otherwise. */
  pinned(names) {
    const own = names.filter((name) => !isAutomatic(name)), last = (name) => name.split("/").at(-1);
    const first = (pattern) => own.find((name) => pattern.test(last(name)) && !/val|test|eval/i.test(name)) ?? own.find((name) => pattern.test(last(name)));
    const usual = own.length > FEW_METRICS ? [first(/loss/i), first(/acc/i)] : own.length ? [] : ["auto/loss"];
    return [...usual, ...names].filter((name, place, all) => all.indexOf(name) === place && names.includes(name)).filter((name) => this.pins.get(name) ?? usual.includes(name));
  }
  pin(metric) {
    this.pins.set(metric, !this.pinned([...this.data.metrics.keys()]).includes(metric));
    this.layout();
    this.schedule();
  }
  /* The sections: pinned metrics, then those without a prefix, then one section per prefix; automatic ones come last. */
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
  /* All metrics but the automatic ones for what the run logs itself. */
  wantedNames() {
    const all = [...this.data.metrics.keys()], own = all.filter((name) => !isAutomatic(name));
    const logged = (pattern) => own.some((name) => pattern.test(name.split("/").at(-1)) && !/val|test|eval/i.test(name));
    const spare = { "auto/loss": /loss/i, "auto/lr": /^(lr|learning_rate)/i, "auto/grad_norm": /grad.*norm/i };
    return all.filter((name) => !(name in spare) || !logged(spare[name]));
  }
  layout() {
    const all = this.wantedNames(), pinned = this.pinned(all), fits = this.matcher();
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
      // Cards of one size, but for what is pinned, and where there is one section: these fill the row.
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
  /* The place of a curve's colour: tables beside the plot may give the order. */
  place(label) {
    const order = this.model.get("order");
    return Math.max(0, (order?.includes(label) ? order : this.data.labels).indexOf(label));
  }
  colour(label) {
    const colours = PALETTE[this.dark ? "dark" : "light"];
    return colours[this.place(label) % colours.length];
  }
  /* The colours repeat after the eighth curve, with dashes. */
  dashed(label) { return Math.floor(this.place(label) / PALETTE.light.length) % 2 === 1; }
  sample(label) {
    const colour = this.colour(label);
    return this.dashed(label) ? make("i", { class: "na-dashed", style: `border-color:${colour}` }) : make("i", { style: `background:${colour}` });
  }
  /* The sample of a curve that stands for all ranks: their first two colours. */
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
