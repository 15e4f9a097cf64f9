/* A `Table` of report/document.py that is updated while it is shown.
 *
 * `full` holds {seq, prev, key, label, columns: [[title, kind], ...], sortable, actions, empty, groups: [{key, title,
 * folded, all: [row, ...]}, ...]}; a row is [key, cells, {tone, order, actions}]. A `delta` (see feed.js) has `order`, the
 * keys of all groups, if they have changed, and groups of {key, title, order: [key, ...], rows: [new row, ...],
 * changes: [[key, place, value, ...], ...]}; a place is the index of a cell, "tone", "order" or "actions".
 * A cell is a string, [state], or an object with attributes of `Cell`. Text is set as text, never as markup.
 */
class Row {
  constructor(view, key, cells) {
    Object.assign(this, { view, key, cells: [], tone: "", order: null, actions: [] });
    this.nodes = cells.map((_, index) => make(index ? "td" : "th", index ? { class: view.columns[index][1] === "number" ? "na-num" : "" } : { scope: "row" }));
    this.node = make("tr", { "data-key": key }, ...this.nodes);
    this.buttons = make("td", { class: "na-actions" });
    if (view.actions) this.nodes[0].after(this.buttons);
  }
  update(cells, { tone = "", order = null, actions = [] } = {}) {
    cells.forEach((cell, index) => { if (JSON.stringify(cell) !== JSON.stringify(this.cells[index])) this.set(index, cell); });
    for (const [place, value] of Object.entries({ tone, order, actions })) this.set(place, value);
  }
  set(place, value) {
    if (typeof place === "number") { this.cells[place] = value; this.paint(place, value); return; }
    this[place] = value;
    if (place === "tone") this.node.className = value.replace(/\S+/g, "na-$&");
    if (place !== "actions") return;
    showButtons(this.buttons, value, (id) => this.view.model.send({ kind: "action", key: this.key, action: id }));
    for (const button of this.buttons.children) button.setAttribute("aria-label", button.title);
  }
  paint(index, cell) {
    const node = this.nodes[index], dotted = this.view.columns[index][1] === "run";
    const { text, badge, state, part, meter, colour = dotted ? -1 : undefined, title = this.view.sortable ? text : "" } = described(cell);
    if (title || node.title) node.title = title;  // narrow columns of a sortable table cut off their texts
    if (typeof cell === "string" && colour === undefined && !node.firstElementChild) { setText(node, cell); return; }
    node.replaceChildren(
      ...(colour === undefined ? [] : [make("i", { class: "na-run-colour", "data-colour": colour })]),
      ...(part === undefined ? [] : [make("span", { class: "na-swatch", style: `background:var(--na-part-${part})` })]),
      ...(meter === undefined ? [] : [make("span", { class: "na-meter" }, make("i", { style: `width:${100 * meter}%` }))]),
      state ? make("span", { class: `na-state na-state-${state.replaceAll(" ", "-")}` }, capitalized(text)) : text,
      ...(badge ? [make("span", { class: "na-badge" }, badge)] : []));
    if (colour !== undefined) this.view.schedule();
  }
  /* Returns the value by which a column is sorted. */
  value(index) { return this.order ? this.order[index] : described(this.cells[index]).text; }
}

const described = (cell) => (typeof cell === "string" ? { text: cell } : Array.isArray(cell) ? { text: cell[0], state: cell[0] } : cell);

class Group {
  constructor(view, { key, folded }) {
    Object.assign(this, { view, key, folded, rows: new Map(), keys: [] });
    this.text = make("span");
    this.cell = make("th", { scope: "rowgroup" }, this.text);
    if (folded) {
      this.button = make("button", { type: "button", class: "na-fold", onclick: () => view.toggle(this) }, make("i", { "aria-hidden": "true" }), this.text);
      this.cell.append(this.button);
    }
    this.head = make("tbody", {}, make("tr", { class: "na-section" }, this.cell));
    this.body = make("tbody");
    this.open(view.unfolded.has(key));
  }
  open(on) {
    this.body.hidden = this.folded && !on;
    this.button?.setAttribute("aria-expanded", String(on));
  }
  apply({ title, all, rows = all ?? [], order = all?.map(([key]) => key), changes = [] }) {
    if (title !== undefined) setText(this.text, title);
    for (const [key, cells, more] of rows) {
      if (!this.rows.has(key)) this.rows.set(key, new Row(this.view, key, cells));
      this.rows.get(key).update(cells, more);
    }
    for (const [key, ...pairs] of changes)
      for (let i = 0; i < pairs.length; i += 2) this.rows.get(key)?.set(pairs[i], pairs[i + 1]);
    if (!order) return;
    this.keys = order;
    const wanted = new Set(order);
    for (const key of [...this.rows.keys()]) if (!wanted.has(key)) this.rows.delete(key);
  }
  get nodes() { return this.text.textContent ? [this.head, this.body] : [this.body]; }
}

class TableView {
  constructor(model, el) {
    Object.assign(this, { model, groups: new Map(), columns: [], sorting: null });  // sorting: {title, down}
    this.unfolded = new Set(model.get("unfolded") || []);
    this.search = make("input", { type: "search", placeholder: "Filter, e.g. failed|baseline", oninput: () => this.arrange() });
    this.count = make("span", { class: "na-count" });
    this.same = make("button", { type: "button", class: "na-tool", "aria-pressed": "false", title: "Columns whose values are equal in all rows",
      onclick: () => { this.showsSame = !this.showsSame; this.arrange(); } });
    this.more = make("button", { type: "button", class: "na-tool na-more", title: "Scroll to the columns on the right",
      onclick: () => this.scroller.scrollBy({ left: 0.7 * this.scroller.clientWidth }) });
    this.bar = make("div", { class: "na-tools" }, this.search, this.same, this.more, this.count);
    this.caption = make("caption", { class: "na-hidden" });
    this.heads = make("tr");
    this.table = make("table", {}, this.caption, make("thead", {}, this.heads));
    this.note = make("p", { class: "na-empty" });
    this.countCut = oncePerFrame(() => this.paintMore());
    this.scroller = make("div", { class: "na-scroll", onscroll: this.countCut }, this.table);
    this.root = make("div", {}, this.bar, this.scroller, this.note);
    el.append(this.root);
    const sizes = new ResizeObserver(this.countCut);
    for (const node of [this.scroller, this.table]) sizes.observe(node);
    this.schedule = oncePerFrame(() => this.colour());
    const unwatch = watchTheme(this.schedule);
    this.feed = new Feed(model, "groups", (message) => this.replace(message), (message) => this.apply(message));
    this.stop = () => { this.feed.stop(); unwatch(); sizes.disconnect(); clearTimeout(this.sharing); };
  }
  replace(message) {
    const { key, label, columns, sortable, actions, empty, groups } = message, shape = JSON.stringify([columns, actions]);
    if (shape !== this.shape) for (const group of this.groups.values()) group.rows.clear();
    Object.assign(this, { key, columns, sortable, actions, empty, shape });
    this.table.className = `na-table ${sortable ? "na-runs-table" : "na-many"}`;
    this.root.className = `na-${key}`;
    this.search.setAttribute("aria-label", `Filter ${key} by any text in their row`);
    setText(this.caption, label);
    this.paintHeads();
    this.apply({ groups, order: groups.map((group) => group.key) });
  }
  apply({ groups, order }) {
    for (const change of groups) {
      if (!this.groups.has(change.key)) this.groups.set(change.key, new Group(this, change));
      this.groups.get(change.key).apply(change);
    }
    for (const key of order ? [...this.groups.keys()] : []) if (!order.includes(key)) this.groups.delete(key);
    this.keys = order ?? this.keys;
    const moved = order || groups.some((change) => change.all || change.order);
    const shown = this.keys.map((key) => this.groups.get(key));
    for (const { cell } of shown) cell.colSpan = this.heads.children.length;
    place(this.table, [this.caption, this.heads.parentNode, ...shown.flatMap((group) => group.nodes)]);
    if (moved || this.sortable) this.arrange();
  }
  /* Shows the rows that the filter lets through, in the order of the sorted column. */
  arrange() {
    const matches = this.matcher(), query = this.search.value.trim();
    let every = 0, found = 0;
    const passed = [];
    for (const group of this.groups.values()) {
      const rows = group.keys.map((key) => group.rows.get(key)).filter(Boolean), shown = this.sorted(rows.filter(matches));
      [every, found] = [every + rows.length, found + shown.length];
      place(group.body, shown.map((row) => row.node));
      passed.push(...shown);
    }
    if (this.sortable) this.share(query ? passed : null);
    this.foldColumns();
    this.bar.hidden = !this.sortable || (every < 2 && !query);
    setText(this.count, `${query ? `${english(found)} of ` : ""}${english(every)} ${this.key}`);
    setText(this.note, !every ? this.empty : !found ? `No ${this.key} match '${query}'.` : "");
    this.note.hidden = !this.note.textContent;
    this.table.hidden = !every;
  }
  /* Tells the plot in the same card which curves the filter lets through, by their colours, even while the kernel is
   * busy. The kernel then draws the curves of these rows if it has not drawn those of all rows. */
  share(rows) {
    const colours = rows && rows.map((row) => described(row.cells[0]).colour ?? -1), keys = rows && rows.map((row) => row.key);
    if (JSON.stringify(colours) !== JSON.stringify(this.colours ?? null))
      this.root.dispatchEvent(new CustomEvent("na-filter", { bubbles: true, detail: { colours } }));
    this.colours = colours;
    if (JSON.stringify(keys) === JSON.stringify(this.model.get("filtered") ?? null)) return;
    clearTimeout(this.sharing);
    this.sharing = setTimeout(() => { this.model.set("filtered", keys); this.model.save_changes(); }, 400);
  }
  /* Shows how many columns are cut off on the right. */
  paintMore() {
    const edge = this.scroller.getBoundingClientRect().right + 4, heads = this.sortable ? [...this.heads.children] : [];
    const cut = heads.filter((node) => !node.hidden && node.getBoundingClientRect().right > edge).length;
    setText(this.more, `${cut} more column${cut === 1 ? "" : "s"} →`);
    this.more.hidden = !cut;
  }
  /* Hides the columns whose text is the same in all rows, until their button is clicked. */
  foldColumns() {
    const rows = this.sortable ? [...this.groups.values()].flatMap((group) => [...group.rows.values()]) : [];
    const text = (row, index) => described(row.cells[index]).text;
    const same = this.columns.map(([, kind], index) => rows.length > 1 && index > 0 && kind !== "state"
      && rows.every((row) => text(row, index) === text(rows[0], index)));
    const count = same.filter(Boolean).length, heads = [...this.heads.children].filter((node) => node.dataset.column !== "actions");
    for (const nodes of [heads, ...rows.map((row) => row.nodes)])
      nodes.forEach((node, index) => { node.hidden = same[index] && !this.showsSame; });
    this.same.hidden = !count;
    this.same.setAttribute("aria-pressed", String(Boolean(this.showsSame)));
    this.countCut();
    setText(this.same, `${this.showsSame ? "Hide" : "Show"} ${count} equal column${count === 1 ? "" : "s"}`);
  }
  matcher() {
    const query = this.search.value.trim(), texts = (row) => row.cells.map((cell) => described(cell).text);
    this.search.setAttribute("aria-invalid", "false");
    if (!query) return () => true;
    try {
      const expression = new RegExp(query, "i");
      return (row) => [...texts(row), `${this.columns[0][0]} ${texts(row)[0]}`].some((text) => expression.test(text));
    } catch {
      this.search.setAttribute("aria-invalid", "true");
      return (row) => texts(row).some((text) => text.toLowerCase().includes(query.toLowerCase()));
    }
  }
  /* Rows without a value come last in both directions. */
  sorted(rows) {
    const at = this.columns.findIndex(([title]) => title === this.sorting?.title);
    if (at < 0) return rows;
    const sign = this.sorting.down ? -1 : 1;
    const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true }));
    return [...rows].sort((a, b) => {
      const one = a.value(at), other = b.value(at);
      if (one == null || other == null) return (one == null) - (other == null);
      return sign * compare(one, other);
    });
  }
  paintHeads() {
    const old = new Map([...this.heads.children].map((node) => [node.dataset.column, node]));
    const nodes = this.columns.map((column) => old.get(JSON.stringify(column)) ?? this.head(...column));
    if (this.actions) nodes.splice(1, 0, old.get("actions") ?? make("th", { class: "na-actions", "data-column": "actions" }, make("span", { class: "na-hidden" }, "actions")));
    place(this.heads, nodes);
  }
  head(title, kind) {
    const node = make("th", { scope: "col", class: kind === "number" ? "na-num" : "", "data-column": JSON.stringify([title, kind]) }, title);
    if (this.sortable) node.replaceChildren(make("button", { type: "button", class: "na-sort", title: `Sort by ${title}`, onclick: () => this.sort(title, kind === "number") }, title, make("i", { "aria-hidden": "true" })));
    return node;
  }
  /* Numbers are sorted in descending order first, because users look for the highest. A third click restores the order. */
  sort(title, first) {
    const now = this.sorting?.title === title ? this.sorting : null;
    this.sorting = !now ? { title, down: first } : now.down === first ? { title, down: !first } : null;
    for (const node of this.heads.querySelectorAll(".na-sort")) {
      const { down } = node.firstChild.data === this.sorting?.title ? this.sorting : {}, head = node.parentNode;
      setText(node.lastChild, down === undefined ? "" : down ? "↓" : "↑");
      if (down === undefined) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", down ? "descending" : "ascending");
    }
    this.arrange();
  }
  toggle(group) {
    const on = !this.unfolded.has(group.key);
    on ? this.unfolded.add(group.key) : this.unfolded.delete(group.key);
    group.open(on);
    this.model.set("unfolded", [...this.unfolded]);
    this.model.save_changes();
  }
  /* Paints the dots of rows, whose colours depend on the theme of the page. */
  colour() {
    if (!this.root.isConnected) { this.schedule(); return; }
    const colours = PALETTE[isDark(this.root) ? "dark" : "light"];
    for (const dot of this.root.querySelectorAll("[data-colour]")) dot.style.background = dot.dataset.colour < 0 ? "transparent" : colours[dot.dataset.colour % colours.length];
  }
}

export default widgetOf(TableView);
