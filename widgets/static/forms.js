/* Forms, texts and buttons, drawn from the parts of a model.
 *
 * Whatever the user types is sent to the kernel as a path and a value, and stored in the browser's own model, which
 * updates its other views. The kernel sends entries only if they were changed elsewhere. They never replace the text of
 * an input that has the focus. That text is compared again when the input loses the focus.
 */
let count = 0;

/* Returns an element with these properties (or attributes if it has no such property) and children. */
function make(tag, settings = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/* Returns the nodes of some text, with names in backquotes as code elements. */
function withCode(text) {
  return text.split(/``?([^`]+)``?/).map((part, index) => (index % 2 ? make("code", { textContent: part }) : part));
}

class FormView {
  constructor(model, el) {
    this.model = model;
    this.stops = [];
    el.append(...this.draw(model.get("parts")));
  }
  stop() {
    for (const stop of this.stops) stop();
  }
  /* Updates what depends on these traits, now and whenever one of them changes. */
  watch(names, update) {
    for (const name of names) {
      this.model.on(`change:${name}`, update);
      this.stops.push(() => this.model.off(`change:${name}`, update));
    }
    update();
  }
  draw(parts) {
    return parts.map((part) => this[part.kind](part));
  }

  // ---- parts

  box({ style, parts }) {
    return make("div", { className: style }, ...this.draw(parts));
  }
  text({ id, style }) {
    const node = make("div", { className: style });
    let shown = "";
    this.watch(["texts"], () => {
      const html = this.model.get("texts")[id] || "";
      if (html === shown) return;
      node.innerHTML = shown = html;
    });
    return node;
  }
  button({ id, title, hint, style }) {
    const button = make("button", { type: "button", className: `na-button ${style}`, textContent: title, title: hint });
    button.addEventListener("click", () => this.model.send({ kind: "click", id }));
    this.watch(["disabled"], () => { button.disabled = this.model.get("disabled").includes(id); });
    return button;
  }
  copy({ id, title }) {
    const box = make("div");
    this.stops.push(addCopyButtons(box, title, true, () => this.model.get("code")));
    this.watch(["disabled"], () => {
      for (const button of box.querySelectorAll("button")) button.disabled = this.model.get("disabled").includes(id);
    });
    return box;
  }
  tabs({ parts }) {
    const names = parts.map(() => `na-tab-${++count}`);
    const pages = parts.map((part, index) =>
      make("div", { role: "tabpanel", id: names[index], "aria-label": part.title }, ...this.draw(part.parts)));
    const tabs = parts.map((part, index) =>
      make("button", { type: "button", role: "tab", textContent: part.title, "aria-controls": names[index] }));
    const open = (chosen) => tabs.forEach((tab, index) => {
      tab.setAttribute("aria-selected", index === chosen);
      tab.tabIndex = index === chosen ? 0 : -1;
      pages[index].hidden = index !== chosen;
    });
    tabs.forEach((tab, index) => {
      tab.addEventListener("click", () => open(index));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        const next = (index + step + tabs.length) % tabs.length;
        open(next);
        tabs[next].focus();
      });
    });
    open(0);
    return make("div", { className: "na-tabs" }, make("div", { role: "tablist" }, ...tabs), ...pages);
  }

  // ---- fields

  fields({ id, title, names }) {
    const fields = new Map(this.model.get("tables")[id].map((field) => [field.name, field]));
    const rows = this.rows(id, names.map((name) => fields.get(name)));
    if (!title) return rows;
    const heading = make("summary");
    this.watch(["errors"], () => {
      const wrong = Object.keys(this.model.get("errors")).map((path) => path.slice(id.length + 1).split(".")[0]);
      const errors = names.filter((name) => wrong.includes(name)).length;
      heading.textContent = errors ? `${title} (${errors} to correct)` : title;
    });
    return make("details", {}, heading, rows);
  }
  rows(path, fields) {
    return make("div", { className: "na-fields" }, ...fields.flatMap((field) => this.field(field, `${path}.${field.name}`)));
  }
  field(field, path) {
    const input = this.input(field);
    const id = input.id = `na-input-${++count}`;
    const aside = make("div", { className: "na-aside", id: `${id}-aside` });
    if (field.help) aside.append(make("span", { className: "na-help" }, ...withCode(field.help)));
    input.setAttribute("aria-describedby", aside.id);
    this.bind(input, path);
    const alert = make("span", { className: "na-error", role: "alert" });
    this.watch(["errors"], () => {
      const error = this.model.get("errors")[path] || "";
      if (alert.textContent === error) return;
      alert.textContent = error;
      input.setAttribute("aria-invalid", Boolean(error));
      if (error) aside.append(alert);
      else alert.remove();
    });
    // The words of a box are next to it. The name in code is a tooltip, because the cell below has it.
    const isBox = input.type === "checkbox", words = make("label", { htmlFor: id, textContent: field.label, title: field.name });
    const row = isBox ? make("div", { className: "na-field na-box" }, make("div", {}, input, words), aside)
      : make("div", { className: "na-field" }, words, input, aside);
    if (input.type === "text") this.suggest(input, path, row);
    return field.kind === "nested" ? [row, this.nested(path)] : [row];
  }
  input({ kind, placeholder, choices, optional }) {
    if (kind === "flag") return make("input", { type: "checkbox" });
    if (kind === "nested") return make("input", { type: "checkbox", disabled: !optional });
    if (kind === "choice") {
      const options = choices.map((label) => new Option(label, label));
      return make("select", {}, ...(optional ? [new Option(placeholder, "")] : []), ...options);
    }
    const settings = { placeholder, spellcheck: false, autocomplete: "off", autocapitalize: "off" };
    if (kind === "area") return make("textarea", { rows: 2, ...settings });
    return make("input", { type: "text", disabled: kind === "code", ...settings });
  }
  suggest(input, path, row) {
    const list = make("datalist", { id: `${input.id}-list` });
    this.watch(["suggestions"], () => {
      const values = this.model.get("suggestions")[path];
      if (!values) return;
      list.replaceChildren(...values.map((value) => make("option", { value })));
      input.setAttribute("list", list.id);
      row.append(list);
    });
  }
  /* Shows the entry of a path in an input, and sends what the user changes. */
  bind(input, path) {
    const value = input.type === "checkbox" ? "checked" : "value";
    const show = () => {
      const entry = this.model.get("entries")[path];
      const typing = input.matches("textarea, [type=text]") && input.getRootNode().activeElement === input;
      if (input[value] === entry || typing) return;
      if (input.options && ![...input.options].some((option) => option.value === entry)) input.add(new Option(entry, entry));
      input[value] = entry;
    };
    input.addEventListener("blur", show);
    input.addEventListener("input", () => {
      this.model.set("entries", { ...this.model.get("entries"), [path]: input[value] });
      this.model.send({ kind: "enter", path, value: input[value], version: this.model.get("version") });
    });
    this.watch(["entries"], show);
  }
  /* Draws the fields of a nested dataclass when its box is first ticked. */
  nested(path) {
    const below = make("div", { className: "na-nested" });
    this.watch(["tables", "entries"], () => {
      const open = this.model.get("entries")[path], fields = this.model.get("tables")[path];
      if (open && fields && !below.hasChildNodes()) below.append(this.rows(path, fields));
      below.hidden = !open;
    });
    return below;
  }
}

export default {
  render({ model, el }) {
    const view = new FormView(model, el);
    return () => view.stop();
  },
};
