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
    this.table = make("table", { class: "na-table na-runs-table" });
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
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    this.table.replaceChildren(this.head(columns), make("tbody", {}, ...shown.map((row) => this.row(columns, row))));
    if (focused) [...this.table.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focused)?.focus();
  }
  head(columns) {
    const cells = columns.map(([title, kind]) => {
      const on = this.sorting?.title === title, mark = on ? (this.sorting.down ? "↓" : "↑") : "";
      const button = make("button", { type: "button", class: "na-sort", title: `Sort by ${title}`, "data-focus": `sort ${title}`, onclick: () => this.sort(title, kind) }, title, make("i", { "aria-hidden": "true" }, mark));
      return make("th", { scope: "col", class: kind === "number" ? "na-num" : "", ...(on ? { "aria-sort": this.sorting.down ? "descending" : "ascending" } : {}) }, button);
    });
    cells.splice(1, 0, make("th", { class: "na-actions" }, make("span", { class: "na-hidden" }, "actions")));
    return make("thead", {}, make("tr", {}, ...cells));
  }
  /* Numbers the other way round first: the highest is what is looked for. A third click restores the order. */
  sort(title, kind) {
    const first = kind === "number", now = this.sorting?.title === title ? this.sorting : null;
    this.sorting = !now ? { title, down: first } : now.down === first ? { title, down: !first } : null;
    this.paint();
  }
  row(columns, row) {
    const cells = columns.map(([, kind], index) => this.cell(kind, row.cells[index], row));
    cells.splice(1, 0, make("td", { class: "na-actions" }, ...this.actions(row)));
    return make("tr", { "data-key": String(row.key), class: row.opened ? "na-opened" : "" }, ...cells);
  }
  cell(kind, text, row) {
    if (kind === "run") {
      const colours = PALETTE[this.dark ? "dark" : "light"];
      const colour = row.colour < 0 ? "transparent" : colours[row.colour % colours.length];  // dashed after the eighth
      const swatch = make("i", { class: "na-run-colour", style: row.colour < colours.length ? `background:${colour}` : `box-sizing:border-box;border:2px solid ${colour}` });
      return make("th", { scope: "row" }, swatch, text);
    }
    if (kind === "state") return make("td", {}, make("span", { class: `na-state na-state-${text}` }, capitalized(text)));
    return make("td", { class: kind === "number" ? "na-num" : "", title: text }, text);
  }
  actions(row) {
    const button = (kind, text, label) => make("button", { type: "button", class: `na-row-tool na-row-${kind}`, "aria-label": `${label} run ${row.cells[0]}`, "data-focus": `${kind} ${row.key}`, onclick: () => this.model.send({ kind, key: row.key }) }, text);
    const open = row.opened ? button("open", "Close", "Close the panel of") : button("open", "Open", "Open the panel of");
    return row.stops ? [open, button("stop", "Stop", "Stop")] : [open];
  }
}

export default widgetOf(RunsView);
