/* A table of runs: the model's trait `table` holds columns [[title, kind], ...] and rows {key, cells, order, colour,
 * stops, opened}. Sorting and filtering work while the kernel is busy; all text is set as text, never as markup.
 */
class RunsView {
  constructor(model, el) {
    this.model = model;
    this.sorting = null;  // {title, down}
    this.filter = "";
    this.root = make("div", { class: "na-runs" });
    this.search = make("input", { type: "search", placeholder: "Filter, e.g. failed|baseline", "aria-label": "Filter runs by any text in their row",
      oninput: () => { this.filter = this.search.value.trim(); this.paint(); } });
    this.count = make("span", { class: "na-count" });
    this.thead = make("thead");
    this.body = make("tbody");
    this.table = make("table", { class: "na-table na-runs-table" }, this.thead, this.body);
    this.rows = new Map();  // by key, what is shown
    this.note = make("p", { class: "na-empty" });
    this.bar = make("div", { class: "na-tools" }, this.search, this.count);
    this.root.append(this.bar, make("div", { class: "na-scroll" }, this.table), this.note);
    el.append(this.root);
    this.schedule = oncePerFrame(() => this.paint());
    model.on("change:table", this.schedule);
    const media = matchMedia("(prefers-color-scheme: dark)");
    const themes = new MutationObserver(this.schedule);
    for (const node of [document.documentElement, document.body])
      themes.observe(node, { attributes: true, attributeFilter: ["class", "theme", "data-jp-theme-light", "data-vscode-theme-kind"] });
    media.addEventListener("change", this.schedule);
    this.stop = () => { model.off("change:table", this.schedule); themes.disconnect(); media.removeEventListener("change", this.schedule); };
    this.schedule();
  }
  matcher() {
    this.search.setAttribute("aria-invalid", "false");
    const { filter } = this;
    try {
      const expression = new RegExp(filter, "i");
      return (row) => row.cells.some((cell) => expression.test(cell)) || expression.test(`run ${row.cells[0]}`);
    } catch {
      this.search.setAttribute("aria-invalid", "true");
      return (row) => row.cells.some((cell) => cell.toLowerCase().includes(filter.toLowerCase()));
    }
  }
  /* Rows without a value come last in both directions. */
  sorted(columns, rows) {
    const at = columns.findIndex(([title]) => title === this.sorting?.title);
    if (at < 0) return rows;
    const sign = this.sorting.down ? -1 : 1;
    const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true }));
    return [...rows].sort((a, b) => {
      const one = a.order[at], other = b.order[at];
      if (one == null || other == null) return (one == null) - (other == null);
      return sign * compare(one, other);
    });
  }
  paint() {
    if (!this.root.isConnected) { requestAnimationFrame(this.schedule); return; }
    const { columns = [], rows = [] } = this.model.get("table") ?? {};
    this.dark = isDark(this.root);
    const shown = this.sorted(columns, rows.filter(this.matcher()));
    this.bar.hidden = rows.length < 2 && !this.filter;
    this.count.textContent = this.filter ? `${english(shown.length)} of ${english(rows.length)} runs` : `${english(rows.length)} runs`;
    this.note.textContent = !rows.length ? "No run has been launched from this kernel yet." : !shown.length ? `No runs match '${this.filter}'.` : "";
    this.note.hidden = !this.note.textContent;
    this.table.hidden = !rows.length;
    this.fillHead(columns);
    this.fillBody(columns, shown);
  }
  /* What is there stays: a click takes longer than the time between two updates may be. */
  fillHead(columns) {
    const key = JSON.stringify([columns, this.sorting]);
    if (key === this.headKey) return;
    const focused = this.thead.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    if (this.titles !== JSON.stringify(columns)) this.rows.clear();
    [this.headKey, this.titles] = [key, JSON.stringify(columns)];
    this.thead.replaceChildren(this.head(columns));
    if (focused) [...this.thead.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focused)?.focus();
  }
  fillBody(columns, shown) {
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const nodes = shown.map((row) => {
      const key = JSON.stringify([row, this.dark]), known = this.rows.get(row.key) ?? { node: this.row(columns, row) };
      if (known.key !== key) this.fill(known.node, columns, row);
      known.key = key;
      this.rows.set(row.key, known);
      return known.node;
    });
    nodes.forEach((node, index) => {
      if (this.body.children[index] !== node) this.body.insertBefore(node, this.body.children[index] ?? null);
    });
    while (this.body.children.length > nodes.length) this.body.lastChild.remove();
    if (focused && focused !== document.activeElement) focused.focus();  // its row was moved
  }
  head(columns) {
    const cells = columns.map(([title, kind]) => {
      const on = this.sorting?.title === title, mark = on ? (this.sorting.down ? "↓" : "↑") : "";
      const button = make("button", { type: "button", class: "na-sort", title: `Sort by ${title}`, "data-focus": `sort ${title}`, onclick: () => this.sort(title, kind) }, title, make("i", { "aria-hidden": "true" }, mark));
      return make("th", { scope: "col", class: kind === "number" ? "na-num" : "", ...(on ? { "aria-sort": this.sorting.down ? "descending" : "ascending" } : {}) }, button);
    });
    cells.splice(1, 0, make("th", { class: "na-actions" }, make("span", { class: "na-hidden" }, "actions")));
    return make("tr", {}, ...cells);
  }
  /* Numbers the other way round first: the highest is what is looked for. A third click restores the order. */
  sort(title, kind) {
    const first = kind === "number", now = this.sorting?.title === title ? this.sorting : null;
    this.sorting = !now ? { title, down: first } : now.down === first ? { title, down: !first } : null;
    this.paint();
  }
  row(columns, row) {
    const cells = columns.map(([, kind]) => this.cell(kind));
    cells.splice(1, 0, make("td", { class: "na-actions" }));
    return make("tr", { "data-key": String(row.key) }, ...cells);
  }
  cell(kind) {
    if (kind === "run") return make("th", { scope: "row" }, make("i", { class: "na-run-colour" }), "");
    return kind === "state" ? make("td", {}, make("span")) : make("td", { class: kind === "number" ? "na-num" : "" });
  }
  fill(node, columns, row) {
    const [first, actions, ...rest] = node.children;
    node.className = row.opened ? "na-opened" : "";
    [first, ...rest].forEach((cell, index) => this.fillCell(cell, columns[index][1], row.cells[index], row));
    const old = [...actions.children], wanted = this.actions(row);
    wanted.forEach(([kind, text, label], index) => {
      const button = old[index] ?? actions.appendChild(this.button(kind, row));
      setText(button, text);
      button.setAttribute("aria-label", `${label} run ${row.cells[0]}`);
    });
    old.slice(wanted.length).forEach((button) => button.remove());
  }
  fillCell(cell, kind, text, row) {
    if (kind === "run") {
      const colours = PALETTE[this.dark ? "dark" : "light"];
      cell.firstChild.style.background = row.colour < 0 ? "transparent" : colours[row.colour % colours.length];
      setText(cell.lastChild, text);
    } else if (kind === "state") {
      cell.firstChild.className = `na-state na-state-${text.replaceAll(" ", "-")}`;
      setText(cell.firstChild, capitalized(text));
    } else {
      cell.title = text;
      setText(cell, text);
    }
  }
  /* Open comes first: its button stays where Stop goes. */
  actions(row) {
    const open = row.opened ? ["open", "Close", "Close the panel of"] : ["open", "Open", "Open the panel of"];
    return row.stops ? [open, ["stop", "Stop", "Stop"]] : [open];
  }
  button(kind, row) {
    return make("button", { type: "button", class: `na-row-tool na-row-${kind}`, onclick: () => this.model.send({ kind, key: row.key }) });
  }
}

export default widgetOf(RunsView);
