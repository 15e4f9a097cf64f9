/* The table of many ranks: nodes, ranks that stand out, all others behind a fold that opens while the kernel is busy.
 *
 * `full` holds {seq, prev, head, parts: [{key, title, folded, whole: [[key, name, kind, badge, state, ...cells], ...]}]};
 * a `delta` (see feed.js) has parts of {key, title, order, rows, cells: [[key, place, text, ...], ...]}.
 * Text is set as text, never as markup.
 */
const NAME = 0, KIND = 1, BADGE = 2, STATE = 3, CELLS = 4;

const STATES = new Set(["starting", "running", "stopping", "succeeded", "failed", "stopped"]);

class Row {
  constructor(values, node) {
    this.values = values;
    this.name = make("span");
    this.badge = make("span", { class: "na-badge" });
    this.state = make("td");
    this.cells = values.slice(CELLS).map(() => make("td", { class: "na-num" }));
    this.node = make("tr", {}, make("th", { scope: "row" }, this.name, this.badge), this.state, ...this.cells);
    this.isNode = node;
    values.forEach((_, place) => this.paint(place));
  }
  set(place, text) { this.values[place] = text; this.paint(place); }
  paint(place) {
    const text = this.values[place];
    if (place === NAME) this.name.textContent = text;
    else if (place === KIND) this.node.className = [this.isNode ? "na-node" : "", text === "late" ? "na-late" : text === "dead" ? "na-dead" : ""].join(" ").trim();
    else if (place === BADGE) { this.badge.textContent = text; this.badge.hidden = !text; }
    else if (place === STATE) this.paintState(text);
    else this.cells[place - CELLS].textContent = text;
  }
  paintState(text) {
    if (!STATES.has(text)) { this.state.textContent = text; return; }
    this.state.replaceChildren(make("span", { class: `na-state na-state-${text}` }, text[0].toUpperCase() + text.slice(1)));
  }
}

class Part {
  constructor(table, part, width) {
    this.table = table;
    this.key = part.key;
    this.rows = new Map();
    this.body = make("tbody");
    this.folded = part.folded;
    this.text = make("span");
    this.heading = make("tr", { class: "na-part" });
    const cell = make("th", { colspan: String(width), scope: "rowgroup" });
    if (this.folded) {
      this.button = make("button", { type: "button", class: "na-fold", onclick: () => table.toggle(this) }, make("i", { "aria-hidden": "true" }), this.text);
      cell.append(this.button);
    } else cell.append(this.text);
    this.heading.append(cell);
    this.head = make("tbody", {}, this.heading);
    this.title(part.title);
    this.open(table.unfolded.has(this.key));
    this.add(part.whole);
    this.order(part.whole.map((row) => row[0]));
  }
  title(text) { this.text.textContent = text; this.head.hidden = !text; }
  open(on) {
    this.body.hidden = this.folded && !on;
    if (this.button) this.button.setAttribute("aria-expanded", String(on));
  }
  focused() { return this.button !== undefined && this.button === document.activeElement; }
  focus() { this.button?.focus({ preventScroll: true }); }
  add(rows) { for (const [key, ...values] of rows) this.rows.set(key, new Row(values, key.startsWith("n"))); }
  order(keys) {
    const wanted = new Set(keys);
    for (const key of [...this.rows.keys()]) if (!wanted.has(key)) this.rows.delete(key);
    this.body.replaceChildren(...keys.map((key) => this.rows.get(key)?.node).filter(Boolean));
  }
  take(change) {
    if (change.title !== undefined) this.title(change.title);
    if (change.rows) this.add(change.rows);
    if (change.order) this.order(change.order);
    for (const [key, ...pairs] of change.cells || []) {
      const row = this.rows.get(key);
      for (let i = 0; row && i < pairs.length; i += 2) row.set(pairs[i], pairs[i + 1]);
    }
  }
}

class Table {
  constructor(model, el) {
    this.model = model;
    this.parts = new Map();
    this.unfolded = new Set(model.get("unfolded") || []);
    this.table = make("table", { class: "na-table na-many" });
    el.append(make("div", { class: "na-scroll" }, this.table));
    this.feed = new Feed(model, "parts", (message) => this.full(message), (message) => this.delta(message));
  }
  full(message) {
    const focused = [...this.parts.values()].find((part) => part.focused())?.key;
    this.width = message.head.length + 2;
    this.parts = new Map();
    const titles = message.head.map((text) => make("th", { scope: "col", class: "na-num" }, text));
    const first = [make("th", { scope: "col" }, "node, rank"), make("th", { scope: "col" }, "state")];
    this.table.replaceChildren(make("caption", { class: "na-hidden" }, "Nodes and ranks"), make("thead", {}, make("tr", {}, ...first, ...titles)));
    message.parts.forEach((part) => this.put(part));
    this.parts.get(focused)?.focus();
  }
  put(part) {
    const made = new Part(this, part, this.width), old = this.parts.get(part.key), focused = old?.focused();
    this.parts.set(part.key, made);
    if (old) {
      old.head.replaceWith(made.head);
      old.body.replaceWith(made.body);
      if (focused) made.focus();
      return;
    }
    const fold = [...this.parts.values()].find((other) => other.key === "others" && other !== made);
    if (fold) fold.head.before(made.head, made.body);
    else this.table.append(made.head, made.body);
  }
  delta(message) {
    for (const part of message.parts) {
      if (part.whole) this.put(part);
      else this.parts.get(part.key)?.take(part);
    }
    for (const key of message.gone || []) {
      const part = this.parts.get(key);
      if (part) { part.head.remove(); part.body.remove(); this.parts.delete(key); }
    }
  }
  toggle(part) {
    const on = !this.unfolded.has(part.key);
    on ? this.unfolded.add(part.key) : this.unfolded.delete(part.key);
    part.open(on);
    this.model.set("unfolded", [...this.unfolded]);
    this.model.save_changes();
  }
}

export default {
  render({ model, el }) {
    const table = new Table(model, el);
    return () => table.feed.stop();
  },
};
