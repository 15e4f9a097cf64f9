/* The view of a timeline: tools, an overview with a ruler, the tracks on one canvas, and the details of an event.
 *
 * The visible part eases towards `goal`, which is changed by zooming and by keys that move it. Dragging moves both.
 */
const EASE_MS = 70, LEAST_SPAN = 0.05, MOST_HEIGHT = 560;
const HELP = "Drag to move · Ctrl + wheel or W, S to zoom · A, D to move · Shift + drag to measure · click an event for who waits for whom · "
  + "arrow keys to its neighbours · F to zoom to it · 0 for all · / to search";
const TOUCH_HELP = "Drag to move · pinch to zoom · tap an event for what it is, and for who waits for whom";

class TimelineView {
  constructor(model, el) {
    this.model = model;
    this.data = new TimelineData(model.get("data"));
    this.folded = new Set();
    this.from = 0;
    this.to = this.data.span;
    this.goal = [0, this.data.span];
    this.chosen = this.hovered = -1;
    this.range = null;
    this.pointers = new Map();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.schedule = oncePerFrame(() => this.paint());
    this.build(el);
    this.painter = new Painter(this.canvas, this.data);
    this.overview = new Overview(this.map, this.data);
    this.layout();
    this.listen();
    this.watch();
  }
  stop() {
    this.unwatch();
    this.sizes.disconnect();
  }

  /* ---- elements */

  build(el) {
    const { data } = this;
    const button = (text, title, act) => make("button", { class: "na-tool", type: "button", title, "aria-label": title, onclick: act }, text);
    this.search = make("input", { type: "search", placeholder: "Search names and lines", "aria-label": "Search events by name or cell line" });
    this.matches = make("span", { class: "na-tl-matches", role: "status" });
    this.previous = button("↑", "Previous match (Shift + Enter)", () => this.jump(-1));
    this.next = button("↓", "Next match (Enter)", () => this.jump(1));
    this.whole = button("Whole", "Show the whole span (0)", () => this.show(0, data.span));
    this.foldAll = button("Fold ranks", "Fold or unfold all ranks", () => this.toggleAll());
    const size = `${data.ranks.length === 1 ? "1 rank" : `${data.ranks.length} ranks`} · ${english(data.events)} events · ${microseconds(data.span)}`;
    const tools = make("div", { class: "na-tools na-tl-tools" },
      this.search, this.previous, this.next, this.matches,
      make("span", { class: "na-tl-zoom" }, button("−", "Zoom out (S)", () => this.zoom(1.6)), button("+", "Zoom in (W)", () => this.zoom(1 / 1.6)), this.whole),
      this.foldAll, make("span", { class: "na-count" }, size));
    this.map = make("canvas", { class: "na-tl-map", role: "img", "aria-label": "Overview and times; drag here to zoom to a part" });
    this.canvas = make("canvas", { class: "na-tl-canvas", "aria-hidden": "true" });
    this.labels = make("div", { class: "na-tl-labels" });
    this.content = make("div", { class: "na-tl-content" }, this.canvas, this.labels);
    const id = randomId();
    // JupyterLab's own keys, such as A for a new cell, must not act on what is typed here.
    this.scroll = make("div", {
      class: "na-tl-scroll", tabindex: "0", role: "application", "aria-label": `Timeline of ${size}`, "aria-describedby": id, "data-lm-suppress-shortcuts": "true",
    }, this.content);
    this.tip = make("div", { class: "na-tl-tip", hidden: "" });
    this.details = make("div", { class: "na-tl-details", "aria-live": "polite" });
    this.legend = make("ul", { class: "na-legend na-tl-legend" });
    this.root = make("div", { class: "na-run na-tl" }, tools, make("div", { class: "na-tl-top" }, this.map), this.scroll, this.tip,
      this.legend, this.details, make("p", { class: "na-hint", id }, matchMedia("(hover: none)").matches ? TOUCH_HELP : HELP));
    if (data.shortest) this.details.before(make("p", { class: "na-note" }, `Events of ${microseconds(data.shortest)} and less are left out: there are too many.`));
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    el.append(this.root);
    this.describe();
  }
  /* Computes the rows, and the labels beside them. */
  layout() {
    const { data } = this;
    this.rows = [];
    let y = 0;
    for (const rank of data.ranks) {
      const tracks = data.tracks.filter((track) => track.rank === rank), folded = this.folded.has(rank);
      const lane = folded && data.summary(tracks);
      const head = { kind: "rank", rank, y, laneTop: HEAD - 2, height: folded ? HEAD + LANE + 2 : HEAD, lanes: lane ? [lane] : [], tracks: folded ? tracks : [] };
      this.rows.push(head);
      y += head.height;
      if (folded) continue;
      for (const track of tracks) {
        if (!track.lanes.length) continue;
        const row = { kind: "track", rank, track, y, laneTop: 2, height: LANE * track.lanes.length + MARGIN, lanes: track.lanes, tracks: [track] };
        this.rows.push(row);
        y += row.height;
      }
    }
    this.total = Math.max(y, 60);
    this.content.style.height = `${this.total}px`;
    this.scroll.style.setProperty("--na-tl-height", `${Math.min(this.total + 2, MOST_HEIGHT)}px`);
    this.labels.replaceChildren(...this.rows.map((row) => this.label(row)));
    this.foldAll.textContent = this.folded.size ? "Unfold ranks" : "Fold ranks";
    this.schedule();
  }
  label(row) {
    const style = `top:${row.y}px;height:${row.height}px`;
    if (row.kind === "track") return make("div", { class: "na-tl-label", style, title: row.track.name }, row.track.title);
    const fold = make("button", {
      class: "na-fold na-tl-rank", type: "button", style, "aria-expanded": String(!this.folded.has(row.rank)), onclick: () => this.toggle(row.rank),
    }, make("i"), `rank ${row.rank}`);
    fold.dataset.rank = row.rank;
    return fold;
  }
  toggle(rank) {
    if (!this.folded.delete(rank)) this.folded.add(rank);
    this.layout();
    this.labels.querySelector(`[data-rank="${rank}"]`).focus();
  }
  toggleAll() {
    this.folded = this.folded.size ? new Set() : new Set(this.data.ranks);
    this.layout();
  }

  /* ---- what is visible */

  watch() {
    this.unwatch = watchTheme(() => requestAnimationFrame(() => { this.look = undefined; this.overview.stale = true; this.schedule(); }));
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.scroll);
  }
  resize() {
    const gutter = this.labels.offsetWidth, width = Math.floor(this.scroll.clientWidth - gutter), height = this.scroll.clientHeight;
    if (width < 20 || height < 20) return;
    this.map.style.marginLeft = this.canvas.style.marginLeft = `${gutter}px`;
    if (width !== this.overview.width) this.overview.resize(width, this.data.ranks.length);
    this.painter.resize(width, Math.min(height, this.total));
    this.schedule();
  }
  /* Shows a part of the span, after moving it inside the span. */
  show(from, to, now = false) {
    const { span } = this.data, wide = Math.min(span, Math.max(LEAST_SPAN, to - from));
    const left = Math.min(Math.max(0, (from + to - wide) / 2), span - wide);
    this.goal = [left, left + wide];
    if (now || this.still.matches) [this.from, this.to] = this.goal;
    this.moved = performance.now();
    this.schedule();
  }
  zoom(factor, time = this.middle()) {
    const [from, to] = this.goal;
    this.show(time - (time - from) * factor, time + (to - time) * factor);
  }
  pan(share) {
    const [from, to] = this.goal, shift = (to - from) * share;
    this.show(...this.inside(from + shift, to + shift));
  }
  inside(from, to) {
    const shift = from < 0 ? -from : to > this.data.span ? this.data.span - to : 0;
    return [from + shift, to + shift];
  }
  middle() { return this.pointed ?? (this.goal[0] + this.goal[1]) / 2; }
  ease() {
    const now = performance.now(), part = 1 - Math.exp(-Math.min(50, now - this.moved) / EASE_MS), [from, to] = this.goal;
    this.moved = now;
    if (Math.abs(this.from - from) + Math.abs(this.to - to) < 0.002 * (to - from)) [this.from, this.to] = this.goal;
    else {
      this.from += (from - this.from) * part;
      this.to += (to - this.to) * part;
      this.schedule();
    }
  }
  paint() {
    const { painter } = this;
    if (!this.root.isConnected || !painter.width) return;
    if (!this.look) { this.look = new Look(this.root, this.data); this.paintLegend(); }
    this.ease();
    const scene = {
      from: this.from, to: this.to, top: this.scroll.scrollTop, hovered: this.hovered, chosen: this.chosen, range: this.range, ...rulerTicks(this.from, this.to, painter.width),
    };
    painter.draw(this.rows, scene, this.look);
    this.overview.draw(scene, this.look);
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
  }
  paintLegend() {
    const { data, look } = this, present = new Set(data.category);
    const entries = data.categories.map((name, index) => present.has(index) && make("li", {}, make("span", { class: "na-swatch", style: `background:${look.category(index)}` }), data.looks[index][0]));
    if (data.waitsFor.size) entries.push(make("li", {}, make("span", { class: "na-swatch na-tl-hatched" }), "waits for another rank"));
    this.legend.replaceChildren(...entries.filter(Boolean));
  }

  /* ---- pointers and keys */

  listen() {
    const on = (node, names, handler, options) => names.split(" ").forEach((name) => node.addEventListener(name, handler, options));
    on(this.scroll, "scroll", () => { this.hover(null); this.schedule(); }, { passive: true });
    on(this.scroll, "wheel", (event) => this.wheel(event), { passive: false });
    on(this.scroll, "keydown", (event) => this.key(event));
    on(this.root, "keydown", (event) => { if (event.key === "Escape") this.choose(-1); });
    on(this.canvas, "pointerdown", (event) => this.press(event));
    on(this.canvas, "pointermove", (event) => this.move(event));
    on(this.canvas, "pointerup pointercancel", (event) => this.release(event));
    on(this.canvas, "pointerleave", () => { this.pointed = undefined; this.hover(null); });
    on(this.canvas, "dblclick", () => this.zoomTo(this.chosen));
    on(this.map, "pointerdown", (event) => this.pressMap(event));
    on(this.map, "pointermove", (event) => this.moveMap(event));
    on(this.map, "pointerup pointercancel", () => this.releaseMap());
    on(this.map, "dblclick", () => this.show(0, this.data.span));
    on(this.search, "input", () => this.find());
    on(this.search, "keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); this.jump(event.shiftKey ? -1 : 1); }
    });
  }
  timeAt(event) { return this.from + (event.clientX - this.canvas.getBoundingClientRect().left) * this.painter.perPixel; }
  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const amount = Math.max(-100, Math.min(100, event.deltaY * (event.deltaMode ? 30 : 1)));
      this.zoom(Math.exp(amount * (event.ctrlKey && Math.abs(event.deltaY) < 20 ? 0.012 : 0.004)), this.timeAt(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(((event.deltaX || event.deltaY) * (event.deltaMode ? 30 : 1)) / this.painter.width);
    }
  }
  press(event) {
    if (event.button > 0) return;
    this.scroll.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    const time = this.timeAt(event);
    this.drag = { x: event.clientX, y: event.clientY, from: this.from, to: this.to, top: this.scroll.scrollTop, time, measures: event.shiftKey, moved: false };
    this.hover(null);
  }
  move(event) {
    if (!this.pointers.has(event.pointerId)) {
      this.pointed = this.timeAt(event);
      this.hover(event);
      return;
    }
    const others = [...this.pointers.values()].filter((other) => other.pointerId !== event.pointerId);
    if (others.length) this.pinch(this.pointers.get(event.pointerId), event, others[0]);
    else this.dragTo(event);
    this.pointers.set(event.pointerId, event);
  }
  dragTo(event) {
    const { drag } = this, dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    drag.moved = true;
    if (drag.measures) {
      this.range = [drag.time, this.timeAt(event)].map((time) => Math.min(this.data.span, Math.max(0, time))).sort((a, b) => a - b);
      this.schedule();
      return;
    }
    this.canvas.classList.add("na-tl-moving");
    const shift = -dx * this.painter.perPixel;
    this.show(...this.inside(drag.from + shift, drag.to + shift), true);
    if (event.pointerType === "mouse") this.scroll.scrollTop = drag.top - dy;
  }
  pinch(before, now, other) {
    const was = Math.max(20, Math.abs(before.clientX - other.clientX)), is = Math.max(20, Math.abs(now.clientX - other.clientX));
    const left = this.canvas.getBoundingClientRect().left, center = (before.clientX + other.clientX) / 2 - left, target = (now.clientX + other.clientX) / 2 - left;
    const time = this.from + center * this.painter.perPixel, perPixel = (this.painter.perPixel * was) / is, from = time - target * perPixel;
    this.show(...this.inside(from, from + perPixel * this.painter.width), true);
    this.drag.moved = true;
    Object.assign(this.drag, { x: now.clientX, from: this.from, to: this.to });
  }
  release(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    this.canvas.classList.remove("na-tl-moving");
    const { drag } = this;
    if (!drag.moved && event.type === "pointerup") { this.range = null; this.choose(this.eventAt(event)); }
    else if (drag.measures) { this.chosen = -1; this.describe(); }
    const [left] = this.pointers.values();
    if (left) this.drag = { ...drag, x: left.clientX, y: left.clientY, from: this.from, to: this.to, moved: true };
  }
  mapTime(event) {
    const { left, top } = this.map.getBoundingClientRect(), { width, mapHeight } = this.overview, share = Math.min(1, Math.max(0, (event.clientX - left) / width));
    const ruler = this.mapDrag ? this.mapDrag.ruler : event.clientY - top > mapHeight;
    return { ruler, time: ruler ? this.from + share * (this.to - this.from) : share * this.data.span };
  }
  /* A drag in the ruler, or outside the visible part, zooms to the dragged range. A drag inside moves the part. */
  pressMap(event) {
    this.map.setPointerCapture(event.pointerId);
    const { ruler, time } = this.mapTime(event), grabbed = !ruler && time >= this.from && time <= this.to && this.to - this.from < 0.95 * this.data.span;
    this.mapDrag = { ruler, time, grabbed, from: this.from, to: this.to, x: event.clientX };
  }
  moveMap(event) {
    const drag = this.mapDrag;
    if (!drag || (!drag.moved && Math.abs(event.clientX - drag.x) < 4)) return;
    drag.moved = true;
    const { time } = this.mapTime(event);
    if (drag.grabbed) this.show(...this.inside(drag.from + time - drag.time, drag.to + time - drag.time), true);
    else { this.range = [drag.time, time].sort((a, b) => a - b); this.schedule(); }
  }
  releaseMap() {
    const drag = this.mapDrag;
    this.mapDrag = null;
    if (!drag || drag.grabbed) return;
    const half = (drag.to - drag.from) / 2;
    if (drag.moved && this.range) this.show(...this.range);
    else if (!drag.ruler) this.show(...this.inside(drag.time - half, drag.time + half));
    this.range = null;
    this.schedule();
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.scroll) return;
    const chosen = this.chosen >= 0;
    const acts = {
      w: () => this.zoom(1 / 1.35), s: () => this.zoom(1.35), "+": () => this.zoom(1 / 1.6), "=": () => this.zoom(1 / 1.6), "-": () => this.zoom(1.6),
      a: () => this.pan(-0.12), d: () => this.pan(0.12), 0: () => this.show(0, this.data.span), Home: () => this.show(0, this.data.span),
      f: () => (this.range ? this.show(...this.range) : this.zoomTo(this.chosen)), "/": () => this.search.focus(), n: () => this.jump(1), N: () => this.jump(-1),
      ArrowLeft: () => (chosen ? this.step(-1) : this.pan(-0.12)), ArrowRight: () => (chosen ? this.step(1) : this.pan(0.12)),
      ArrowUp: chosen && (() => this.climb(-1)), ArrowDown: chosen && (() => this.climb(1)), Enter: () => (chosen ? this.zoomTo(this.chosen) : this.chooseFirst()),
    };
    const act = acts[event.key] || acts[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /* ---- events */

  eventAt({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect(), y = clientY - box.top + this.scroll.scrollTop, row = this.rows.find((each) => y >= each.y && y < each.y + each.height);
    if (!row) return -1;
    const depth = Math.floor((y - row.y - row.laneTop) / LANE), lane = row.kind === "rank" ? (depth === 0 ? row.lanes[0] : undefined) : row.lanes[depth];
    return lane ? this.data.at(lane, this.from + (clientX - box.left) * this.painter.perPixel, 2 * this.painter.perPixel) : -1;
  }
  hover(pointer) {
    const event = pointer ? this.eventAt(pointer) : -1;
    if (event !== this.hovered) { this.hovered = event; this.schedule(); }
    this.tip.hidden = event < 0;
    if (event < 0) return;
    const { data } = this;
    if (this.tipped !== event) {
      this.tipped = event;
      const wait = data.waited(event), lines = [`rank ${data.rankOf(event)} · ${data.laneOf(event).track.title} · ${data.kind(event)}`, data.detail(event)];
      if (wait) lines.push(`waits ${microseconds(wait)} for rank ${data.rankOf(data.waitsFor.get(event))}`);
      this.tip.replaceChildren(make("div", {}, make("b", {}, data.text(event)), ` ${microseconds(data.duration[event])}`),
        ...lines.filter(Boolean).map((line) => make("div", { class: "na-muted" }, line)));
    }
    const box = this.root.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.tip;
    const left = Math.min(pointer.clientX - box.left + 14, box.width - offsetWidth - 4), below = pointer.clientY - box.top + 18;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${below + offsetHeight > box.height ? below - offsetHeight - 30 : below}px`;
  }
  choose(event) {
    this.chosen = event;
    if (event >= 0) this.range = null;
    this.describe();
    this.schedule();
  }
  /* Chooses an event, and moves so that it is visible. */
  goTo(event) {
    if (event < 0) return;
    const { data } = this, [from, to] = this.goal, start = data.start[event], end = data.end(event), lane = data.laneOf(event);
    if (start < from || Math.min(end, start + (to - from) / 2) > to) {
      const middle = Math.min((start + end) / 2, start + (to - from) / 3), half = (to - from) / 2;
      this.show(...this.inside(middle - half, middle + half));
    }
    if (this.folded.has(lane.track.rank) && !this.rows.some((row) => row.lanes.includes(lane))) { this.folded.delete(lane.track.rank); this.layout(); }
    const row = this.rows.find((each) => each.lanes.includes(lane)), y = row.y + row.laneTop + (row.kind === "rank" ? 0 : LANE * lane.depth), { scrollTop, clientHeight } = this.scroll;
    if (y < scrollTop || y + LANE > scrollTop + clientHeight) this.scroll.scrollTop = y - clientHeight / 2;
    this.choose(event);
  }
  zoomTo(event) {
    if (event < 0) return;
    const { start, duration } = this.data, margin = Math.max(duration[event] * 0.6, LEAST_SPAN);
    this.show(start[event] - margin, this.data.end(event) + margin);
  }
  chooseFirst() {
    const lane = this.rows.find((row) => row.lanes.length && row.y + row.height > this.scroll.scrollTop)?.lanes[0];
    if (lane) this.goTo(Math.min(lane.last - 1, this.data.firstUntil(lane, this.from)));
  }
  /* Chooses a neighbour in the lane. */
  step(by) {
    const lane = this.data.laneOf(this.chosen), event = this.chosen + by;
    if (event >= lane.first && event < lane.last) this.goTo(event);
  }
  /* Chooses the event that contains the chosen one, or the first event in it. */
  climb(by) {
    const { data, chosen } = this, lane = data.laneOf(chosen), next = lane.track.lanes[lane.depth + by];
    if (!next) return;
    const event = by < 0 ? data.startingAt(data.start[chosen] + 1e-9, next.first, next.last) - 1 : data.startingAt(data.start[chosen], next.first, next.last);
    if (event >= next.first && event < next.last && (by < 0 || data.start[event] <= data.end(chosen))) this.goTo(event);
  }
  find() {
    this.data.search(this.search.value);
    this.current = undefined;
    this.showMatches();
    this.schedule();
  }
  jump(step) {
    const { data } = this;
    if (!data.found?.total) return;
    const known = this.current !== undefined, start = known ? data.start[this.current] : step > 0 ? this.goal[0] : this.goal[1];
    let event = data.neighbour(start, known ? this.current : step > 0 ? -1 : data.count, step);
    if (event < 0) event = data.neighbour(step > 0 ? -Infinity : Infinity, 0, step);  // continue from the other end
    this.current = event;
    this.goTo(event);
    this.showMatches();
  }
  showMatches() {
    const { found } = this.data;
    const at = found && this.current !== undefined ? `${english(this.data.place(this.current) + 1)} of ` : "";
    this.matches.textContent = found ? `${at}${found.total === 1 ? "1 match" : `${english(found.total)} matches`}` : "";
    this.previous.disabled = this.next.disabled = !found?.total;
  }

  /* ---- details */

  describe() {
    if (this.chosen >= 0) this.details.replaceChildren(...this.ofEvent(this.chosen));
    else if (this.range) this.details.replaceChildren(...this.ofRange(...this.range));
    else this.details.replaceChildren();
    this.showMatches();
  }
  ofEvent(event) {
    const { data } = this, track = data.laneOf(event).track, step = data.stepAt(track.rank, data.start[event]);
    const facts = [["Rank", track.rank], ["Track", track.title], ["Kind", data.kind(event)], ["Starts at", microseconds(data.start[event], 6)],
      ["Takes", microseconds(data.duration[event], 4)], ["Step", step?.number], ["Line", data.detail(event)]];
    const list = make("dl", {}, ...facts.filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
    const head = make("p", { class: "na-tl-name" }, make("b", {}, data.text(event)));
    return [head, list, ...this.ofCollective(event)];
  }
  /* Describes which ranks wait for which in the collective of an event. */
  ofCollective(event) {
    const { data } = this, [last, ...others] = data.collective(event);
    if (last === undefined) return [];
    const name = (each) => make("button", { class: "na-tl-link", type: "button", onclick: () => this.goTo(each) }, `rank ${data.rankOf(each)}`);
    const waits = others.map((each) => [each, data.waited(each)]).sort((a, b) => b[1] - a[1]);
    const row = make("p", { class: "na-tl-waits" }, make("b", {}, "Waiting for "), name(last), ", which enters last: ");
    waits.slice(0, 16).forEach(([each, time], index) => row.append(index ? ", " : "", name(each), ` ${microseconds(time)}`));
    if (waits.length > 16) row.append(`, and ${waits.length - 16} more`);
    return [row];
  }
  ofRange(from, to) {
    const rows = this.data.totals(from, to, 8), most = rows[0]?.time || 1;
    const zoom = make("button", { class: "na-tool", type: "button", onclick: () => { this.show(from, to); this.range = null; this.describe(); } }, "Zoom to it");
    const head = make("p", { class: "na-tl-name" }, make("b", {}, microseconds(to - from, 4)), ` selected, ${microseconds(from, 6)} to ${microseconds(to, 6)} `, zoom);
    const table = make("table", { class: "na-table" }, make("caption", {}, "Time of their own in it, of all ranks"),
      make("tbody", {}, ...rows.map(({ name, category, time, count }) => make("tr", {}, make("th", {}, name), make("td", {}, category),
        make("td", { class: "na-num" }, microseconds(time)), make("td", { class: "na-num" }, `${english(count)} ×`),
        make("td", {}, make("div", { class: "na-meter na-tl-meter" }, make("i", { style: `width:${(100 * time) / most}%` })))))));
    return rows.length ? [head, make("div", { class: "na-scroll" }, table)] : [head];
  }
}

export default widgetOf(TimelineView);
