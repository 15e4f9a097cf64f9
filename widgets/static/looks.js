/* Colours, and numbers as text, for curves and for tables of the runs that they belong to.
 *
 * Images in reports have the same hues in mid-tones (COLOURS in svg_curves.py), because they cannot follow the theme.
 */
const PALETTE = {
  light: ["#2563c9", "#c9541a", "#1c8558", "#8f47bd", "#9a6a06", "#0f7f8d", "#c23a73", "#5f6672"],
  dark: ["#6aa5f8", "#f29560", "#5cc795", "#c796ea", "#dbb04f", "#52c3d1", "#f083ad", "#a7aebb"],
};

function isDark(node) {
  for (let at = node; at; at = at.parentElement) {
    const parts = getComputedStyle(at).backgroundColor.match(/[\d.]+/g);
    if (parts && (parts.length < 4 || Number(parts[3]) > 0.5))
      return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/* Calls `changed` when the theme of the page changes. Returns a function that stops this. */
function watchTheme(changed) {
  const themes = new MutationObserver(changed), media = matchMedia("(prefers-color-scheme: dark)");
  const attributeFilter = ["class", "style", "theme", "data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind"];
  for (const node of [document.documentElement, document.body]) themes.observe(node, { attributes: true, attributeFilter });
  media.addEventListener("change", changed);
  return () => { themes.disconnect(); media.removeEventListener("change", changed); };
}

/* Possible steps between the ticks of an axis. uPlot's own steps end at 5e31, beyond which an axis has no ticks. */
const INCREMENTS = [];
for (let exponent = -32; exponent <= 307; exponent++)
  for (const factor of [1, 2, 2.5, 5]) INCREMENTS.push(Number(`${factor}e${exponent}`));

/* The same for steps, which have no fractions, and for seconds, up to days. */
const STEPS = INCREMENTS.filter(Number.isInteger);
const DURATIONS = [...INCREMENTS.filter((step) => step < 1 && step >= 1e-6 && !/25/.test(step)), 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, ...STEPS.map((days) => 86400 * days)];

const AXIS_FONT = "11px system-ui, sans-serif";

/* Returns the width of the longest text in the font of the axes, in pixels. */
function widest(u, texts) {
  u.ctx.save();
  u.ctx.font = AXIS_FONT;
  const widths = texts.map((text) => u.ctx.measureText(text ?? "").width);
  u.ctx.restore();
  return Math.ceil(Math.max(0, ...widths));
}

function format(value) {
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size && (size >= 1e6 || size < 1e-3)) return Number(value.toExponential(2)).toExponential().replace("e+", "e");
  return size >= 1e3 ? english(Math.round(value)) : String(Number(value.toPrecision(4)));
}

/* Returns the labels of an axis, with enough digits to distinguish neighbours. */
function ticks(splits) {
  const found = splits.filter((value) => value != null);
  const largest = Math.max(...found.map(Math.abs)), step = Math.abs(found[1] - found[0]) || largest || 1;
  const digits = Math.min(15, Math.max(2, 1 + Math.ceil(Math.log10(largest / step + 1e-12))));
  const small = largest && (largest >= 1e6 || largest < 1e-3);
  return splits.map((value) => {
    if (value == null) return "";
    if (!value) return "0";
    return small ? Number(value.toExponential(digits - 1)).toExponential().replace("e+", "e") : Number(value.toPrecision(digits + 1)).toLocaleString("en", { maximumFractionDigits: 20 });
  });
}

const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

/* Returns the size in bytes and the name of the unit that suits a number of bytes. */
const unitOf = (bytes) => SIZES.find(([size]) => Math.abs(bytes) >= 0.9995 * size) ?? SIZES.at(-1);

/* Returns a number of bytes as text, as size_text in config/plain_values.py does. */
function sizeText(bytes) {
  if (bytes == null || !Number.isFinite(bytes)) return format(bytes);
  const [size, unit] = unitOf(bytes), value = bytes / size, rest = Math.abs(value);
  const digits = unit === "B" || rest >= 99.95 ? 0 : rest < 9.995 ? 2 : 1;
  return `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

/* Returns numbers of bytes as the labels of an axis, all in the unit of the largest one. */
function sizes(splits) {
  const [size, unit] = unitOf(Math.max(...splits.map(Math.abs)));
  return ticks(splits.map((bytes) => (bytes == null ? null : bytes / size))).map((text) => text && `${text} ${unit}`);
}

/* Returns durations as the labels of an axis, with enough digits to distinguish neighbours. */
function durations(splits) {
  const step = Math.abs(splits[1] - splits[0]) || 1, digits = step < 1 ? Math.ceil(-Math.log10(step) - 1e-9) : 0;
  return splits.map((seconds) => {
    if (!digits) return duration(seconds);
    if (seconds < 60) return `${seconds.toFixed(digits)} s`;
    return duration(Math.floor(seconds)) + (seconds % 1).toFixed(digits).slice(1);
  });
}

function duration(seconds) {
  const whole = Math.round(Math.abs(seconds));
  const two = (n) => String(n).padStart(2, "0");
  if (Math.abs(seconds) < 10 && seconds % 1) return `${Number(seconds.toFixed(2))} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)}`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
