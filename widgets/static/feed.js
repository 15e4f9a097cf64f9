/* What views of growing data share; stands before a view's own code. */

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

/* The messages of a model: its traits `full` and `delta` hold {seq, prev, ...}. A delta continues the message `prev`; a
 * view that missed one says "hello" and waits for the next full.
 *
 * Each message with the part `part` goes to `full(message)` or `delta(message)`, those that are there already at once.
 */
class Feed {
  constructor(model, part, full, delta) {
    this.model = model;
    this.part = part;
    this.seq = -1;
    const takeFull = () => this.full(full), takeDelta = () => this.delta(delta);
    model.on("change:full", takeFull);
    model.on("change:delta", takeDelta);
    this.stop = () => { model.off("change:full", takeFull); model.off("change:delta", takeDelta); };
    takeFull();
    takeDelta();
  }
  full(take) {
    const message = this.model.get("full");
    if (!message || !message[this.part] || message.seq < this.seq) return;
    this.seq = message.seq;
    take(message);
  }
  delta(take) {
    const message = this.model.get("delta");
    if (!message || !message[this.part] || message.seq <= this.seq) return;
    if (message.prev !== this.seq) { this.hello(); return; }
    this.seq = message.seq;
    take(message);
  }
  hello() {
    if (performance.now() - (this.asked || -1e9) <= 2000) return;
    this.asked = performance.now();
    this.model.send({ kind: "hello" });
  }
}
