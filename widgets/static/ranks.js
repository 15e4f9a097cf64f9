/* The table of many ranks: nodes, outliers, and the other ranks behind a fold that opens while the kernel is busy.
 *
 * `full` holds {seq, prev, head, sections: [{key, title, folded, all: [[key, name, kind, badge, state, ...cells], ...]}]};
 * a `delta` (see feed.js) has sections of {key, title, order, rows, cells: [[key, index, text, ...], ...]}.
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
    values.forEach((_, index) => this.paint(index));
  }
  set(index, text) { this.values[index] = text; this.paint(index); }
  paint(index) {
    const text = this.values[index];
    if (index === NAME) this.name.textContent = text;
    else if (index === KIND) this.node.className = [this.isNode ? "na-node" : "", text === "late" ? "na-late" : text === "dead" ? "na-dead" : ""].join(" ").trim();
    else if (index === BADGE) { this.badge.textContent = text; this.badge.hidden = !text; }
    else if (index === STATE) this.paintState(text);
    else this.cells[index - CELLS].textContent = text;
  }
  paintState(text) {
    if (!STATES.has(text)) { this.state.textContent = text; return; }
    this.state.replaceChildren(make("span", { class: `na-state na-state-${text}` }, capitalized(text)));
  }
}

class Section {
  constructor(table, section, width) {
    this.table = table;
    this.key = section.key;
    this.rows = new Map();
    this.body = make("tbody");
    this.folded = section.folded;
    this.text = make("span");
    this.heading = make("tr", { class: "na-section" });
    const cell = make("th", { colspan: String(width), scope: "rowgroup" });
    if (this.folded) {
      this.button = make("button", { type: "button", class: "na-fold", onclick: () => table.toggle(this) }, make("i", { "aria-hidden": "true" }), this.text);
      cell.append(this.button);
    } else cell.append(this.text);
    this.heading.append(cell);
    this.head = make("tbody", {}, this.heading);
    this.setTitle(section.title);
    this.open(table.unfolded.has(this.key));
    this.add(section.all);
    this.order(section.all.map((row) => row[0]));
  }
  setTitle(text) { this.text.textContent = text; this.head.hidden = !text; }
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
  apply(change) {
    if (change.title !== undefined) this.setTitle(change.title);
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
    this.sections = new Map();
    this.unfolded = new Set(model.get("unfolded") || []);
    this.table = make("table", { class: "na-table na-many" });
    el.append(make("div", { class: "na-scroll" }, this.table));
    this.feed = new Feed(model, "sections", (message) => this.replace(message), (message) => this.apply(message));
  }
  stop() { this.feed.stop(); }
  replace(message) {
    const focused = [...this.sections.values()].find((section) => section.focused())?.key;
    this.width = message.head.length + 2;
    this.sections = new Map();
    const titles = message.head.map((text) => make("th", { scope: "col", class: "na-num" }, text));
    const first = [make("th", { scope: "col" }, "node, rank"), make("th", { scope: "col" }, "state")];
    this.table.replaceChildren(make("caption", { class: "na-hidden" }, "Nodes and ranks"), make("thead", {}, make("tr", {}, ...first, ...titles)));
    message.sections.forEach((section) => this.put(section));
    this.sections.get(focused)?.focus();
  }
  put(section) {
    const made = new Section(this, section, this.width), old = this.sections.get(section.key), focused = old?.focused();
    this.sections.set(section.key, made);
    if (old) {
      old.head.replaceWith(made.head);
      old.body.replaceWith(made.body);
      if (focused) made.focus();
      return;
    }
    const fold = [...this.sections.values()].find((other) => other.key === "others" && other !== made);
    if (fold) fold.head.before(made.head, made.body);
    else this.table.append(made.head, made.body);
  }
  apply(message) {
    for (const change of message.sections) {
      if (change.all) this.put(change);
      else this.sections.get(change.key)?.apply(change);
    }
    for (const key of message.removed || []) {
      const section = this.sections.get(key);
      if (section) { section.head.remove(); section.body.remove(); this.sections.delete(key); }
    }
  }
  toggle(section) {
    const on = !this.unfolded.has(section.key);
    on ? this.unfolded.add(section.key) : this.unfolded.delete(section.key);
    section.open(on);
    this.model.set("unfolded", [...this.unfolded]);
    this.model.save_changes();
  }
}

export default widgetOf(Table);
