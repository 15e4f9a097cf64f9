/* The output of the ranks, with a tab for each rank and a search, which also work while the kernel is busy.
 *
 * `full` and `delta` (see feed.js) hold {seq, prev, lines: [[rank, seconds, stream, text], ...], skipped: {rank: count}}.
 * Text is set as text, never as markup.
 */
const MAX_KEPT = 2000;
const MAX_SHOWN = 1000;
const MAX_TABS = 16;
const ANSI = /\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*(?:\x07|\x1b\\)/g;

class Logs {
  constructor(model, el) {
    this.model = model;
    this.lines = [];
    this.added = 0;
    this.counts = new Map();
    this.skipped = new Map();
    this.nodes = new Map();
    this.rank = "all";
    this.id = randomId();
    this.schedule = oncePerFrame(() => this.paint());
    this.visible = false;
    this.seen = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.schedule();
    }, { rootMargin: "200px" });
    this.tabs = make("div", { class: "na-segments", role: "tablist", "aria-label": "Rank" });
    this.tabs.addEventListener("keydown", (event) => this.moveByKey(event));
    this.picker = make("select", { "aria-label": "Ranks whose lines are shown", onchange: () => { this.pick(this.picker.value); } });
    this.search = make("input", { type: "search", placeholder: "Search lines", "aria-label": "Search the lines", oninput: () => this.schedule() });
    this.errors = make("input", { type: "checkbox", onchange: () => this.schedule() });
    this.follow = make("input", { type: "checkbox", onchange: () => this.schedule() });
    this.follow.checked = true;
    this.count = make("span", { class: "na-count" });
    this.body = make("div", { class: "na-log", role: "log", tabindex: "0", "aria-label": "Output of the ranks", "aria-live": "off", id: this.id });
    el.append(make("div", { class: "na-logs" },
      make("div", { class: "na-tools" }, this.tabs, this.picker, this.search,
        make("label", { class: "na-check" }, this.errors, " stderr only"),
        make("label", { class: "na-check" }, this.follow, " Follow"), this.count),
      this.body));
    this.seen.observe(this.body);
    this.ended = () => { this.selection = null; this.schedule(); };
    model.on("change:empty_text", this.ended);
    this.feed = new Feed(model, "lines", (message) => this.replace(message), (message) => this.append(message));
    this.schedule();
  }
  stop() { this.seen.disconnect(); this.feed.stop(); this.model.off("change:empty_text", this.ended); }
  replace(message) {
    this.lines = [];
    this.counts = new Map();
    this.skipped = new Map();
    this.nodes = new Map(Object.entries(message.nodes || {}).map(([rank, node]) => [Number(rank), node]));
    this.append(message);
  }
  append(message) {
    for (const [rank, time, stream, text] of message.lines) {
      this.lines.push({ rank, time, stream, text: text.replace(ANSI, ""), number: this.added++ });
      this.counts.set(rank, (this.counts.get(rank) || 0) + 1);
    }
    for (const [rank, count] of Object.entries(message.skipped)) this.skipped.set(Number(rank), (this.skipped.get(Number(rank)) || 0) + count);
    const most = Math.min(MAX_KEPT * Math.max(1, this.counts.size), 40 * MAX_SHOWN);
    if (this.lines.length > most) this.lines.splice(0, this.lines.length - most);
    this.schedule();
  }
  paintTabs() {
    const names = ["all", ...[...this.counts.keys()].sort((a, b) => a - b)];
    const key = JSON.stringify([names, this.rank]);
    if (key === this.tabKey) return;
    this.tabKey = key;
    const many = names.length > MAX_TABS + 1;
    this.tabs.hidden = many;
    this.picker.hidden = !many;
    if (many) { this.paintPicker(names); return; }
    const focused = this.tabs.contains(document.activeElement);
    this.tabs.replaceChildren(...names.map((name) => {
      const on = name === this.rank;
      return make("button", { type: "button", role: "tab", "aria-selected": String(on), "aria-controls": this.id, tabindex: on ? "0" : "-1",
        onclick: () => { this.rank = name; this.schedule(); } }, name === "all" ? "All" : `Rank ${name}`);
    }));
    if (focused) this.tabs.querySelector("[aria-selected=true]").focus();
  }
  /* If there are many ranks, a list replaces the tabs. It is grouped if there are several nodes. */
  paintPicker(names) {
    const option = (value, text) => make("option", { value: String(value) }, text);
    const groups = new Map();
    for (const rank of names.slice(1)) {
      const node = this.nodes.size ? this.nodes.get(rank) : undefined;
      if (!groups.has(node)) groups.set(node, []);
      groups.get(node).push(rank);
    }
    const ranks = (members) => members.map((rank) => option(rank, `Rank ${rank}`));
    const listed = [...groups].sort(([a], [b]) => a - b).flatMap(([node, members]) => node === undefined ? ranks(members)
      : [make("optgroup", { label: `Node ${node}` }, option(`node ${node}`, `All of node ${node}`), ...ranks(members))]);
    this.picker.replaceChildren(option("all", `All ${names.length - 1} ranks`), ...listed);
    this.picker.value = String(this.rank);
  }
  pick(value) { this.rank = /^\d+$/.test(value) ? Number(value) : value; this.schedule(); }
  shows(rank) { return this.rank === "all" || rank === this.rank || this.rank === `node ${this.nodes.get(rank)}`; }
  moveByKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const all = [...this.tabs.children];
    const next = all[(all.findIndex((tab) => tab.getAttribute("aria-selected") === "true") + move + all.length) % all.length];
    next.focus();
    next.click();
  }
  paint() {
    if (!this.visible) return;
    this.paintTabs();
    const query = this.search.value.toLowerCase();
    const found = this.lines.filter((line) => this.shows(line.rank)
      && (!this.errors.checked || line.stream === "stderr") && (!query || line.text.toLowerCase().includes(query)));
    const lost = [...this.skipped].reduce((sum, [rank, n]) => sum + (this.shows(rank) ? n : 0), 0);
    setText(this.count, query ? `${english(found.length)} found`
      : `${english(found.length)} ${found.length === 1 ? "line" : "lines"}` + (lost ? `, ${english(lost)} more in run.logs()` : ""));
    const selection = `${this.rank} ${query} ${this.errors.checked}`, follows = this.follow.checked;
    if (!follows && this.selection === selection) return;
    const at = follows && !query ? null : this.body.scrollTop;
    this.paintLines(found.slice(-MAX_SHOWN), query, this.selection === selection ? this.rows : []);
    this.body.scrollTop = at ?? this.body.scrollHeight;
    this.selection = selection;
  }
  /* Shows these lines, and keeps the rows that are already shown. */
  paintLines(lines, query, rows) {
    const known = rows.length ? rows[rows.length - 1].number : -1;
    const kept = rows.filter(({ number }) => lines.length && number >= lines[0].number);
    if (kept.length) rows.slice(0, rows.length - kept.length).forEach(({ node }) => node.remove());
    else this.body.replaceChildren();
    const added = lines.filter(({ number }) => number > known).map((line) => ({ number: line.number, node: this.row(line, query) }));
    this.rows = [...kept, ...added];
    this.body.append(...added.map(({ node }) => node));
    if (!lines.length) this.body.append(make("p", { class: "na-empty" }, this.lines.length ? "No line matches." : this.model.get("empty_text")));
  }
  row(line, query) {
    const row = make("div", { class: line.stream === "stderr" ? "na-line na-stderr" : "na-line" });
    if (typeof this.rank !== "number") row.append(make("span", { class: "na-line-rank" }, `rank ${line.rank}`));
    row.append(this.marked(line.text, query));
    return row;
  }
  marked(text, query) {
    const node = make("span", { class: "na-line-text" });
    if (!query) { node.textContent = text; return node; }
    const lower = text.toLowerCase();
    let from = 0;
    for (let at = lower.indexOf(query); at >= 0 && from < text.length; at = lower.indexOf(query, from)) {
      node.append(text.slice(from, at), make("mark", {}, text.slice(at, at + query.length)));
      from = at + query.length;
    }
    node.append(text.slice(from));
    return node;
  }
}

export default widgetOf(Logs);
