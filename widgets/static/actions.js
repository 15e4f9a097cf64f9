/* Rows of text with buttons.
 *
 * While a cell blocks the kernel, messages of widgets have to wait. An action with `interrupts` therefore asks the
 * notebook's own server to interrupt the kernel, as the toolbar's button ■ does. If the page has no such server (an
 * output frame of another origin, or a kernel that the server does not list), the button is disabled.
 */
const FOLDED = 200;  // characters of text that are shown without a click
const PRESS = "Press ■ in the toolbar";

function serverOfPage() {
  try {
    const config = JSON.parse(document.getElementById("jupyter-config-data").textContent);
    const base = new URL(config.baseUrl || "/", location.origin);
    return base.origin === location.origin ? { base, token: config.token || "" } : null;
  } catch {
    return null;
  }
}

function request(server, path, method) {
  const headers = {};
  const cookie = document.cookie.split("; ").find((each) => each.startsWith("_xsrf="));
  if (cookie) headers["X-XSRFToken"] = cookie.slice("_xsrf=".length);
  if (server.token) headers.Authorization = `token ${server.token}`;
  return fetch(new URL(path, server.base), { method, headers, credentials: "same-origin", cache: "no-store" });
}

const known = new Map();

/* Returns whether the page's server lists the kernel. */
function reaches(kernel) {
  if (!known.has(kernel)) known.set(kernel, listsKernel(kernel));
  return known.get(kernel);
}

async function listsKernel(kernel) {
  const server = kernel ? serverOfPage() : null;
  if (!server) return false;
  try {
    const reply = await request(server, "api/kernels", "GET");
    return reply.ok && (await reply.json()).some((each) => each.id === kernel);
  } catch {
    return false;
  }
}

async function interrupt(kernel) {
  const reply = await request(serverOfPage(), `api/kernels/${kernel}/interrupt`, "POST");
  if (!reply.ok) throw new Error(`the server replied ${reply.status}`);
}

class Rows {
  constructor(model, el) {
    this.model = model;
    this.reachable = false;
    this.box = make("div", { class: "na-rows" });
    this.note = make("p", { class: "na-hint" });
    this.nodes = new Map();  // by key
    el.append(this.box);
    this.draw = () => this.paint();
    for (const name of ["rows", "note"]) model.on(`change:${name}`, this.draw);
    this.ask = () => reaches(model.get("kernel")).then((found) => { this.reachable = found; this.paint(); });
    model.on("change:kernel", this.ask);
    this.paint();
    this.ask();
  }
  stop() {
    for (const name of ["rows", "note"]) this.model.off(`change:${name}`, this.draw);
    this.model.off("change:kernel", this.ask);
  }
  paint() {
    const rows = this.model.get("rows"), label = this.model.get("label");
    if (label) { this.box.setAttribute("role", "status"); this.box.setAttribute("aria-label", label); }
    this.nodes = new Map(rows.map((row) => [row.key, this.nodes.get(row.key) ?? this.row()]));
    for (const row of rows) this.fill(this.nodes.get(row.key), row);
    place(this.box, [...this.nodes.values()]);
    this.box.hidden = !rows.length;
    const note = this.model.get("note"), text = (!this.reachable && note.unreachable) || note.text || "";
    setText(this.note, text);
    if (!text) this.note.remove();
    else if (!this.note.isConnected) this.box.after(this.note);
  }
  row() {
    const text = make("span"), more = make("button", { type: "button", class: "na-more" });
    const node = make("div", {}, make("span", { class: "na-row-text" }, text, more), make("span", { class: "na-row-actions" }));
    more.addEventListener("click", () => { node.open = !node.open; this.fold(node); });
    return node;
  }
  /* Shows the start of a long text until its button is clicked. */
  fold(node) {
    const [text, more] = node.firstChild.children, long = node.text.length > FOLDED;
    setText(text, long && !node.open ? `${node.text.slice(0, FOLDED).replace(/\s+\S*$/, "")} … ` : `${node.text} `);
    setText(more, node.open ? "Show less" : "Show all");
    more.setAttribute("aria-expanded", String(Boolean(node.open)));
    more.hidden = !long;
  }
  fill(node, row) {
    const [text, buttons] = node.children;
    node.className = `na-row na-tone-${row.tone || "plain"}`;
    node.text = row.text;
    this.fold(node);
    text.hidden = !row.text;
    const possible = (action) => (action.interrupts && !this.reachable ? { ...action, hint: PRESS, enabled: false } : action);
    showButtons(buttons, row.actions.map(possible), (id, button) => this.click(id, button));
  }
  async click(id, button) {
    const action = this.model.get("rows").flatMap((row) => row.actions).find((each) => each.id === id);
    if (!action?.interrupts) {
      if (action) this.model.send({ kind: "click", action: id });
      return;
    }
    button.disabled = true;
    try {
      await interrupt(this.model.get("kernel"));
    } catch {
      this.reachable = false;
    }
    this.paint();
  }
}

export default widgetOf(Rows);
