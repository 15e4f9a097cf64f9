/* Helpers for all views of growing data. This file comes before that of the view. */

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/* Sets the text of a node if it differs, because setting the same text again would repeat the layout. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/* Makes these nodes the children of a node. Nodes that stay are not moved, so they keep the focus. */
function place(parent, nodes) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null, wanted = new Set(nodes);
  for (const node of [...parent.childNodes]) if (!wanted.has(node)) node.remove();
  let at = parent.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
  if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
}

const ASKING_MS = 4000;

/* Shows actions {id, label, hint, tone, enabled, question} as buttons. A click calls `clicked(id, button)`. A button with
 * a question shows it first, and calls `clicked` only at the second click. A button that stays keeps its node, because a
 * click may last longer than the time between two updates. */
function showButtons(parent, actions, clicked) {
  const old = new Map([...parent.children].map((button) => [button.dataset.action, button]));
  place(parent, actions.map(({ id, label, hint, tone, enabled = true, question }) => {
    const button = old.get(id) ?? make("button", { type: "button", "data-action": id, onclick: ({ currentTarget: node }) => {
      clearTimeout(node.asking);
      const asks = node.question && !node.asking;
      node.asking = asks && setTimeout(() => { node.asking = 0; node.paint(); }, ASKING_MS);
      if (asks) node.paint();
      else clicked(id, node);
    } });
    button.question = question;
    button.paint = () => {
      const asks = Boolean(button.question && button.asking);
      setText(button, asks ? button.question : label);
      button.className = `na-action na-tone-${tone || "plain"}${asks ? " na-asks" : ""}`;
    };
    button.paint();
    button.title = hint;
    button.disabled = !enabled;
    return button;
  }));
}

/* Receives the messages of a model. Its traits `full` and `delta` hold {seq, prev, ...}. A delta continues the message
 * `prev`. A view that has missed a message sends "hello" and waits for the next full one.
 *
 * Each message with the key `key` is passed to `onFull(message)` or `onDelta(message)`, existing ones immediately.
 */
class Feed {
  constructor(model, key, onFull, onDelta) {
    this.model = model;
    this.key = key;
    this.seq = -1;
    const readFull = () => this.readFull(onFull), readDelta = () => this.readDelta(onDelta);
    model.on("change:full", readFull);
    model.on("change:delta", readDelta);
    this.stop = () => { model.off("change:full", readFull); model.off("change:delta", readDelta); };
    readFull();
    readDelta();
  }
  readFull(handler) {
    const message = this.model.get("full");
    if (!message || !message[this.key] || message.seq < this.seq) return;
    this.seq = message.seq;
    handler(message);
  }
  readDelta(handler) {
    const message = this.model.get("delta");
    if (!message || !message[this.key] || message.seq <= this.seq) return;
    if (message.prev !== this.seq) { this.requestFull(); return; }
    this.seq = message.seq;
    handler(message);
  }
  requestFull() {
    if (performance.now() - (this.requested || -1e9) <= 2000) return;
    this.requested = performance.now();
    this.model.send({ kind: "hello" });
  }
}

/* Returns a function that runs `paint` once in the next animation frame, however often it is called before then. */
function oncePerFrame(paint) {
  let frame = 0;
  return () => {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); });
  };
}

const randomId = () => `na-${Math.random().toString(36).slice(2)}`;

const english = (count) => count.toLocaleString("en");

const capitalized = (text) => text[0].toUpperCase() + text.slice(1);

/* Returns the anywidget module of a view, which is a class with a method `stop`. "drawn" reports a view to the kernel. */
const widgetOf = (View) => ({
  render({ model, el }) {
    const view = new View(model, el);
    model.send({ kind: "drawn" });
    return () => view.stop();
  },
});
