/* The points of curves in the browser: series of ranks or runs, their envelope, and tables for uPlot. */
const MAX_POINTS = 6000;

/* Exponential moving average without the bias of its first value (Kingma and Ba, 2015, section 3). */
function smooth(values, weight) {
  let sum = 0, scale = 0;
  return values.map((value) => {
    if (value == null || !Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

class Series {
  constructor() { this.step = []; this.time = []; this.value = []; }
  add(data, at, count) {
    for (let i = 0; i < count; i++) {
      this.step.push(data[at + i]);
      this.time.push(data[at + count + i]);
      this.value.push(data[at + 2 * count + i]);
    }
    if (this.value.length > MAX_POINTS) this.downsample();
  }
  /* M4 over groups of eight: first, last, smallest, largest, and the first NaN. */
  downsample() {
    const keep = [], { value } = this;
    for (let i = 0; i < value.length; i += 8) {
      const end = Math.min(i + 8, value.length);
      let low = i, high = i, missing = i;
      for (let j = end - 1; j >= i; j--) {
        if (value[j] !== value[j]) { missing = j; continue; }
        if (!(value[j] > value[low])) low = j;
        if (!(value[j] < value[high])) high = j;
      }
      keep.push(...[...new Set([i, low, high, missing, end - 1])].sort((a, b) => a - b));
    }
    for (const name of ["step", "time", "value"]) this[name] = keep.map((i) => this[name][i]);
  }
}

/* The mean of many ranks, with their minimum and maximum. */
class Envelope {
  constructor() { this.step = []; this.time = []; this.value = []; this.low = []; this.high = []; }
  columns() { return [this.step, this.time, this.value, this.low, this.high]; }
  replace(data, at, count, from) {
    let kept = from == null ? 0 : this.step.length;
    while (kept && this.step[kept - 1] >= from) kept--;
    this.columns().forEach((column, c) => {
      column.length = kept;
      for (let i = 0; i < count; i++) column.push(data[at + c * count + i]);
    });
  }
}

/* Whether each value is greater than the one before it. */
function increasing(xs) {
  for (let i = 1; i < xs.length; i++) if (!(xs[i] > xs[i - 1])) return false;
  return true;
}

/* Merges tables [x, column, ...] into one x and all columns; `undefined` where a table has no point at an x.
 *
 * uPlot.join sorts the values of all tables, which takes several times as long; it remains for what is not increasing.
 */
function merge(tables) {
  if (!tables.every(([x]) => increasing(x)))
    return uPlot.join(tables, tables.map((table) => table.map((_, i) => (i ? 1 : 0))));
  const xs = [], merged = [xs], next = tables.map(() => 0);
  const columns = tables.map((table) => table.slice(1).map(() => { const column = []; merged.push(column); return column; }));
  for (;;) {
    let x = Infinity;
    tables.forEach(([known], t) => { if (known[next[t]] < x) x = known[next[t]]; });
    if (x === Infinity) return merged;
    xs.push(x);
    tables.forEach((table, t) => {
      const here = table[0][next[t]] === x;
      columns[t].forEach((column, c) => column.push(here ? table[c + 1][next[t]] : undefined));
      if (here) next[t]++;
    });
  }
}

class Metrics {
  constructor() { this.metrics = new Map(); this.labels = []; }
  append(message) {
    const view = message.data;
    const data = new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    const changed = new Set();
    let at = 0;
    for (const [metric, label, count, from] of message.series) {
      if (!this.metrics.has(metric)) this.metrics.set(metric, new Map());
      const curves = this.metrics.get(metric), isEnvelope = from !== undefined;
      if (!curves.has(label)) curves.set(label, isEnvelope ? new Envelope() : new Series());
      if (!this.labels.includes(label)) this.labels.push(label);
      if (isEnvelope) curves.get(label).replace(data, at, count, from);
      else curves.get(label).add(data, at, count);
      at += (isEnvelope ? 5 : 3) * count;
      changed.add(metric);
    }
    // Sorted by name, so that colours and chips do not depend on the order of arrival.
    this.labels.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    return changed;
  }
  replace(message) {
    this.metrics = new Map();
    this.labels = [];
    return this.append(message);
  }
}

/* Points in the order of x, one for each x: the last one that is drawn. */
function sorted(x, values, drawn) {
  const xs = [], ys = [];
  for (const i of [...x.keys()].sort((a, b) => x[a] - x[b])) {
    const shown = drawn(values[i]);
    if (xs.length && xs[xs.length - 1] === x[i]) { if (shown != null) ys[ys.length - 1] = shown; }
    else { xs.push(x[i]); ys.push(shown); }
  }
  return [xs, ys];
}

/* Whether two series have the same values at the steps that both have: ranks report at different moments, and their
 * points are downsampled at different lengths. Most steps must be in both.
 */
function identical(one, other) {
  if (!increasing(one.step) || !increasing(other.step)) return false;
  let common = 0;
  for (let i = 0, j = 0; i < one.step.length && j < other.step.length;) {
    if (one.step[i] < other.step[j]) i++;
    else if (one.step[i] > other.step[j]) j++;
    else {
      if (!Object.is(one.value[i], other.value[j])) return false;
      common++; i++; j++;
    }
  }
  return common > 0 && 2 * common >= Math.min(one.step.length, other.step.length);
}

/* The mean of several tables [x, values], with the smallest and the largest value at each x. */
function meanOf(tables) {
  const [xs, ...columns] = merge(tables.map(([x, values]) => [x, values]));
  const mean = [], low = [], high = [];
  for (let i = 0; i < xs.length; i++) {
    let sum = 0, count = 0, least = Infinity, most = -Infinity;
    for (const column of columns) {
      const value = column[i];
      if (value == null) continue;
      sum += value; count++;
      if (value < least) least = value;
      if (value > most) most = value;
    }
    mean.push(count ? sum / count : null);
    low.push(count ? least : null);
    high.push(count ? most : null);
  }
  return [xs, mean, low, high];
}

/* The values that no axis can show: [{x, until, value, label, last}, ...], neighbours of one kind together; `last` where
 * the series ends with them.
 */
const MAX_MARKS = 200;

function notFinite(x, values, label) {
  const marks = [];
  let mark = null;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) { mark = null; continue; }
    if (mark && Object.is(mark.value, values[i])) mark.until = x[i];
    else if (marks.length === MAX_MARKS) return marks;
    else marks.push(mark = { x: x[i], until: x[i], value: values[i], label, last: false });
  }
  if (mark) mark.last = true;
  return marks;
}
