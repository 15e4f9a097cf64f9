// A button that puts a text on the clipboard. Front ends that forbid the clipboard API to widgets (an output frame
// without the permission) get the older way: a selected text box and the copy command.
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
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  said.className = "na-help";
  let timer;
  button.addEventListener("click", async () => {
    const done = await copy(model.get("text"));
    said.textContent = done ? " Copied" : " The browser forbids copying here: select the text and copy it";
    clearTimeout(timer);
    timer = setTimeout(() => (said.textContent = ""), 4000);
  });
  el.append(button, said);
  return () => clearTimeout(timer);
}

export default { render };
