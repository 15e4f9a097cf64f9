// Buttons that copy text to the clipboard, or insert it as a cell below. If the front end does not allow the
// clipboard API (an output frame without the permission), a selected text box and the copy command are used instead.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = document.createElement("textarea");
    box.value = text;
    box.setAttribute("aria-hidden", "true");
    box.style.position = "fixed";
    box.style.opacity = "0";
    document.body.append(box);
    box.select();
    try {
      return document.execCommand("copy");
    } finally {
      box.remove();
    }
  }
}

// In JupyterLab and Notebook, the notebook's own button inserts an empty cell below the active one.
const INSERT = '[data-command="notebook:insert-cell-below"], [data-jp-item-name="insert"] :is(jp-button, button)';

function insertButton(el) {
  const panel = el.closest(".jp-NotebookPanel"), cell = el.closest(".jp-Cell");
  return panel && cell ? cell.querySelector(INSERT) || panel.querySelector(INSERT) : null;
}

async function insertBelow(el, text) {
  const panel = el.closest(".jp-NotebookPanel"), cell = el.closest(".jp-Cell");
  if (!cell.classList.contains("jp-mod-active")) {
    const press = new MouseEvent("mousedown", { bubbles: true, cancelable: true, button: 0 });
    (cell.querySelector(".jp-InputPrompt") || cell).dispatchEvent(press);
  }
  const count = panel.querySelectorAll(".jp-Cell").length;
  insertButton(el).click();
  for (let tries = 0; tries < 60; tries++) {
    await new Promise((resume) => setTimeout(resume, 50));
    const active = panel.querySelector(".jp-Cell.jp-mod-active"), editor = active?.querySelector(".cm-content");
    if (panel.querySelectorAll(".jp-Cell").length > count && editor && active !== cell) {
      write(editor, text);
      return;
    }
  }
  throw new Error("no cell appeared");
}

function write(editor, text) {
  const view = editor.cmView?.view ?? editor.cmTile?.view;
  if (view) {
    view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
    view.focus();
    return;
  }
  const clipboardData = new DataTransfer();
  clipboardData.setData("text/plain", text);
  editor.focus();
  editor.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}

function makeButton(name, aria) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "lm-Widget jupyter-widgets jupyter-button widget-button na-copy";
  button.textContent = name;
  button.setAttribute("aria-label", aria);
  return button;
}

/* Adds the buttons to an element, and returns a function that removes their observers.
 *
 * `label` says what is copied, `insertable` whether the text is the code of a cell, and `text()` returns it.
 */
function addCopyButtons(el, label, insertable, text) {
  const button = makeButton("Copy", `${label} to the clipboard`);
  const insert = makeButton("Insert cell below", "Insert a cell below with this code");
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.className = "na-hidden";
  const timers = new Map();
  const say = (target, name, done, success, problem) => {
    status.textContent = done ? success : problem;
    status.className = done ? "na-hidden" : "na-help";
    target.textContent = done ? `${success} ✓` : name;
    target.classList.toggle("na-done", done);
    clearTimeout(timers.get(target));
    timers.set(target, setTimeout(() => {
      status.textContent = "";
      target.textContent = name;
      target.classList.remove("na-done");
    }, 4000));
  };
  button.addEventListener("click", async () => {
    say(button, "Copy", await copy(text()), "Copied", "The browser does not allow copying here: select the text and copy it");
  });
  insert.addEventListener("click", async () => {
    const done = await insertBelow(el, text()).then(() => true, () => false);
    say(insert, "Insert cell below", done, "Inserted", "The cell could not be inserted here: copy the code");
  });
  el.classList.add("na-copies");
  insert.hidden = true;
  el.append(button, insert, status);
  // The element is attached later, and so may be the toolbar.
  const shown = new IntersectionObserver(() => { insert.hidden = !(insertable && insertButton(el)); });
  shown.observe(el);
  return () => {
    shown.disconnect();
    timers.forEach(clearTimeout);
  };
}

/* Draws a CopyButton. */
function showCopyButtons({ model, el }) {
  return addCopyButtons(el, model.get("label"), model.get("insertable"), () => model.get("text"));
}
