// A button that copies a text to the clipboard. Where the front end does not allow the clipboard API (an output frame
// without the permission), a selected text box and the copy command are used instead.
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

function render({ model, el }) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "lm-Widget jupyter-widgets jupyter-button widget-button na-copy";
  button.textContent = model.get("label");
  button.setAttribute("aria-label", `${model.get("label")} to the clipboard`);
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.className = "na-help";
  let timer;
  button.addEventListener("click", async () => {
    const done = await copy(model.get("text"));
    status.textContent = done ? " Copied" : " The browser does not allow copying here: select the text and copy it";
    clearTimeout(timer);
    timer = setTimeout(() => (status.textContent = ""), 4000);
  });
  el.append(button, status);
  return () => clearTimeout(timer);
}

export default { render };
