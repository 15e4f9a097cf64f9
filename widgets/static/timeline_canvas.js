/* Draws the visible part of a timeline.
 *
 * Events narrower than NARROW pixels are collected in rows of pixels. Each pixel has the colour of the event that covers
 * most of it, and its opacity is the share of it that is covered. Events narrower than a pixel are not examined one by
 * one: those that start in one pixel are found by binary search. A lane therefore costs as much as it has pixels.
 */
const LANE = 17, HEAD = 22, MARGIN = 5, NARROW = 4, FONT = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";
const SHADES = 5;  // per category, chosen by an event's name, so that neighbours differ

/* The shades of operations also differ in hue, because most events are operations. */
const OPERATIONS = { light: ["#b1c1d8", "#a9cfd0", "#c3bfe0", "#c9cfb0", "#d5bfc9"], dark: ["#43546d", "#3a6063", "#57507a", "#586040", "#6a4d5b"] };

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (from, to, share) => from.map((value, index) => Math.round(value + (to[index] - value) * share));

/* The properties that depend on the theme: the colours of text, lines and categories. */
class Look {
  constructor(root, { categories, looks }) {
    this.dark = isDark(root);
    this.ink = getComputedStyle(root).color;
    this.text = this.dark ? "#f1f4f8" : "#171b21";
    this.bad = this.dark ? "#ff7b72" : "#c62833";
    this.accent = this.dark ? "#6aa5f8" : "#2563c9";
    this.fills = [];
    this.words = [];  // the same colours as numbers without alpha, as in ImageData
    for (const [index, name] of categories.entries())
      for (let shade = 0; shade < SHADES; shade++) {
        const base = name === "op" ? OPERATIONS[this.dark ? "dark" : "light"][shade] : looks[index][this.dark ? 2 : 1];
        const [r, g, b] = mixed(channels(base), this.dark ? [255, 255, 255] : [0, 0, 0], name === "op" ? 0 : 0.03 * shade);
        this.fills.push(`rgb(${r},${g},${b})`);
        this.words.push(r | (g << 8) | (b << 16));
      }
  }
  category(index) { return this.fills[SHADES * index]; }
}

class Painter {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    this.context = canvas.getContext("2d");
    this.scratch = document.createElement("canvas");
    this.strips = this.scratch.getContext("2d", { willReadFrequently: true });
  }
  resize(width, height) {
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    if (this.width === width && this.height === height && this.ratio === ratio) return;
    [this.width, this.height, this.ratio] = [width, height, ratio];
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.columns = this.canvas.width;
    this.covered = new Float32Array(this.columns);
    this.most = new Float32Array(this.columns);
    this.colours = new Uint32Array(this.columns);
  }
  /* Draws the visible rows of TimelineView's `rows`. `scene` holds the visible part and what is chosen. */
  draw(rows, scene, look) {
    const context = this.context, { ratio } = this;
    Object.assign(this, { scene, look, from: scene.from, perPixel: (scene.to - scene.from) / this.width });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const visible = rows.filter((row) => row.y + row.height > scene.top && row.y < scene.top + this.height);
    this.grid(visible);
    this.wide = [];
    this.lanes(visible);
    for (const row of visible) {
      if (row.kind === "rank") this.steps(row);
      for (const track of row.tracks) this.waits(row, track);
    }
    this.texts();
    this.meetings(rows);
    this.marks(rows);
  }
  x(time) { return (time - this.from) / this.perPixel; }

  grid(rows) {
    const { context, scene } = this;
    context.fillStyle = this.look.ink;
    context.globalAlpha = 0.07;
    for (const tick of scene.ticks) context.fillRect(Math.round(this.x(tick)), 0, 1, this.height);
    for (const row of rows) if (row.kind === "rank") context.fillRect(0, row.y - scene.top, this.width, 1);
    context.globalAlpha = 1;
  }
  /* Draws the lanes of these rows: strips of pixels for narrow events, and rectangles with text for wide ones. */
  lanes(rows) {
    const lanes = [];
    for (const row of rows)
      for (const lane of row.lanes) {
        const y = row.y + row.laneTop + (row.kind === "rank" ? 0 : LANE * lane.depth) - this.scene.top;
        if (y > -LANE && y < this.height) lanes.push({ lane, y });
      }
    if (!lanes.length) return;
    if (this.scratch.width !== this.columns || this.scratch.height < lanes.length) {
      this.scratch.width = this.columns;
      this.scratch.height = Math.max(lanes.length, 40);
    }
    const image = this.strips.createImageData(this.columns, lanes.length), words = new Uint32Array(image.data.buffer);
    lanes.forEach(({ lane, y }, row) => this.lane(lane, y, words.subarray(row * this.columns, (row + 1) * this.columns)));
    this.strips.putImageData(image, 0, 0);
    const { context } = this;
    context.imageSmoothingEnabled = false;
    lanes.forEach(({ y }, row) => context.drawImage(this.scratch, 0, row, this.columns, 1, 0, y, this.width, LANE - 1));
    this.rectangles();
  }
  shade(event) {
    return SHADES * this.data.category[event] + (this.data.name[event] % SHADES);
  }
  lane(lane, y, strip) {
    const { data, covered, most, colours, columns } = this, { start, duration, sums, found } = data;
    const from = this.from, scale = 1 / (this.perPixel / this.ratio), narrow = NARROW * this.ratio;
    covered.fill(0);
    most.fill(0);
    const until = from + columns / scale;
    const cover = (pixel, share, event, matches) => {
      if (pixel < 0 || pixel >= columns) return;
      const seen = matches ? share : share / 16;
      covered[pixel] += share;
      if (seen >= most[pixel]) { most[pixel] = seen; colours[pixel] = (this.shade(event) << 1) | matches; }
    };
    let i = data.firstUntil(lane, from);
    while (i < lane.last && start[i] < until) {
      const left = (start[i] - from) * scale, width = duration[i] * scale;
      if (width >= narrow) { this.wide.push(i, y); i++; continue; }
      if (width >= 1) {
        const matches = Number(data.isFound(i)), right = left + width;
        for (let pixel = Math.floor(left); pixel < right; pixel++) cover(pixel, Math.min(right, pixel + 1) - Math.max(left, pixel), i, matches);
        i++;
        continue;
      }
      const pixel = Math.max(0, Math.floor(left)), end = data.next(from + (pixel + 1) / scale, i, lane.last);
      let last = Math.max(end, i + 1), event = data.longest(lane, i, last);
      if (duration[event] * scale >= 1) { last = event; event = i; }  // first draw the events before it
      let matches = 1;
      if (found) {
        matches = Number(found.before[last] > found.before[i]);
        if (matches && !data.isFound(event)) for (event = i; !data.isFound(event);) event++;
      }
      cover(pixel, Math.min(1, Math.max(0.12, (sums[last] - sums[i]) * scale)), event, matches);
      i = last;
    }
    const { words } = this.look;
    for (let pixel = 0; pixel < columns; pixel++) {
      const share = covered[pixel];
      if (!share) continue;
      const alpha = (0.2 + 0.8 * Math.min(1, share)) * (colours[pixel] & 1 ? 1 : 0.22);
      strip[pixel] = (words[colours[pixel] >> 1] | (Math.round(255 * alpha) << 24)) >>> 0;
    }
  }
  rectangles() {
    const { context, data, look, wide } = this;
    const groups = new Map();
    for (let k = 0; k < wide.length; k += 2) {
      const shade = 2 * this.shade(wide[k]) + Number(data.isFound(wide[k]));
      if (!groups.has(shade)) groups.set(shade, []);
      groups.get(shade).push(k);
    }
    for (const [shade, places] of groups) {
      context.fillStyle = look.fills[shade >> 1];
      context.globalAlpha = shade & 1 ? 1 : 0.22;
      for (const k of places) {
        const left = Math.max(-2, this.x(data.start[wide[k]])), right = Math.min(this.width + 2, this.x(data.end(wide[k])));
        context.fillRect(left, wide[k + 1], right - left - 0.75, LANE - 1);
      }
    }
    context.globalAlpha = 1;
  }
  texts() {
    const { context, data, look, wide } = this;
    context.fillStyle = look.text;
    for (let k = 0; k < wide.length; k += 2) {
      const left = Math.max(0, this.x(data.start[wide[k]])), right = Math.min(this.width, this.x(data.end(wide[k])));
      if (right - left < 22) continue;
      context.globalAlpha = data.isFound(wide[k]) ? 1 : 0.35;
      const text = this.fitted(wide[k], right - left - 8);
      if (text) context.fillText(text, left + 4, wide[k + 1] + LANE / 2);
    }
    context.globalAlpha = 1;
  }
  /* Returns the name of an event, and its line, shortened to this many pixels. */
  fitted(event, room) {
    const { data } = this, name = data.name[event], text = data.labels[name];
    const width = (data.widths[name] ||= this.context.measureText(text).width);
    if (width <= room) return text;
    const letters = Math.floor((text.length * room) / width) - 2;
    return letters < 3 ? "" : `${text.slice(0, letters)}…`;
  }
  steps(row) {
    const { context, data, look, scene } = this, steps = data.steps.get(row.rank) || [];
    const y = row.y - scene.top + 4, height = HEAD - 8;
    let last = -10, count = 0;
    context.fillStyle = look.ink;
    for (const step of steps) {
      count++;
      if (step.end < scene.from || step.start > scene.to) continue;
      const left = Math.max(-2, this.x(step.start)), right = Math.min(this.width + 2, this.x(step.end));
      if (right - last < 1) continue;
      last = right;
      context.globalAlpha = count % 2 ? 0.16 : 0.1;
      context.fillRect(left, y, Math.max(1, right - left - 1), height);
      if (right - left < 50) continue;
      context.globalAlpha = 0.85;
      const name = `step ${step.number}`, whole = `${name} · ${microseconds(step.end - step.start)}`;
      context.fillText(right - left > 120 ? whole : name, Math.max(0, left) + 5, y + height / 2 + 0.5);
    }
    context.globalAlpha = 1;
  }
  pattern() {
    if (this.hatched === this.look) return this.hatch;
    const tile = document.createElement("canvas"), size = 6 * this.ratio;
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.strokeStyle = this.look.bad;
    pen.lineWidth = 1.6 * this.ratio;
    for (const shift of [-size, 0, size]) { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
    pen.stroke();
    this.hatched = this.look;
    this.hatch = this.context.createPattern(tile, "repeat");
    this.hatch.setTransform(new DOMMatrix().scale(1 / this.ratio));
    return this.hatch;
  }
  /* Hatches the part of each event in which its rank waits for the last one to enter the collective. */
  waits(row, track) {
    const { context, data, scene } = this;
    if (!track.waits.length) return;
    context.fillStyle = this.pattern();
    let last = -1;
    for (const event of track.waits) {
      const begin = data.start[event], end = begin + data.waited(event);
      if (begin > scene.to) break;
      if (end < scene.from) continue;
      const left = Math.max(-2, last, this.x(begin)), right = Math.min(this.width + 2, this.x(end));
      if (right - left < 0.5) continue;
      const y = this.laneY(row, data.laneOf(event));
      context.globalAlpha = data.isFound(event) ? 0.5 : 0.15;
      context.fillRect(left, y, right - left, LANE - 1);
      last = right;
    }
    context.globalAlpha = 1;
  }
  laneY(row, lane) { return row.y + row.laneTop + (row.kind === "rank" ? 0 : LANE * lane.depth) - this.scene.top; }
  rowOf(rows, lane) { return rows.find((row) => row.tracks.includes(lane.track)); }
  /* Draws a line through each visible collective where the last rank enters it. If there are many, only the hovered and
   * the chosen one have a line. */
  meetings(rows) {
    const { context, data, scene } = this;
    const low = data.meetings.findIndex((event) => data.start[event] >= scene.from);
    let shown = low < 0 ? [] : data.meetings.slice(low, low + 61).filter((event) => data.start[event] <= scene.to);
    if (shown.length > 60) shown = [];
    context.setLineDash([2, 3]);
    context.strokeStyle = this.look.bad;
    for (const last of shown) {
      context.globalAlpha = 0.55;
      context.lineWidth = 1;
      this.joined(rows, [last, ...data.groups.get(last)]);
    }
    context.setLineDash([]);
    for (const event of new Set([scene.hovered, scene.chosen])) {
      const events = event >= 0 ? data.collective(event) : [];
      if (!events.length) continue;
      context.globalAlpha = 1;
      context.lineWidth = 1.75;
      const ends = this.joined(rows, events);
      if (event === scene.chosen) this.named(events, ends);
    }
    context.globalAlpha = 1;
  }
  joined(rows, events) {
    const { context, data } = this, x = Math.round(this.x(data.start[events[0]])) + 0.5;
    const ends = events.map((event) => {
      const lane = data.laneOf(event), row = this.rowOf(rows, lane);
      return row ? this.laneY(row, lane) + LANE / 2 : null;
    });
    const seen = ends.filter((y) => y !== null);
    context.beginPath();
    context.moveTo(x, Math.max(-9, Math.min(...seen)));
    context.lineTo(x, Math.min(this.height + 9, Math.max(...seen)));
    context.stroke();
    return ends;
  }
  /* Names the last rank of a collective at its event, and shows at the other events how long their ranks wait. */
  named(events, ends) {
    const { context, data, look } = this, x = this.x(data.start[events[0]]);
    events.forEach((event, index) => {
      const y = ends[index];
      if (y === null || y < -LANE || y > this.height + LANE) return;
      context.fillStyle = look.bad;
      context.beginPath();
      context.arc(x, y, index ? 2.5 : 4.5, 0, 7);
      context.fill();
      const text = index ? `waits ${microseconds(data.waited(event))}` : `rank ${data.rankOf(event)} enters last`;
      const width = context.measureText(text).width + 10, before = index || x + 8 + width > this.width;
      const left = before && x > width + 10 ? x - width - 8 : x + 8;
      if (left > this.width || left + width < 0) return;
      context.beginPath();
      context.roundRect(left, y - 8, width, 16, 4);
      context.fill();
      context.fillStyle = look.dark ? "#14181e" : "#fff";
      context.fillText(text, left + 5, y + 0.5);
    });
  }
  /* Outlines the hovered and the chosen event, and shades the selected range. */
  marks(rows) {
    const { context, data, scene, look } = this;
    for (const [event, width, colour] of [[scene.hovered, 1, look.ink], [scene.chosen, 2, look.accent]]) {
      if (event < 0) continue;
      const lane = data.laneOf(event), row = this.rowOf(rows, lane);
      if (!row || (row.kind === "rank" && !row.lanes.includes(lane))) continue;
      const left = Math.max(-4, this.x(data.start[event])), right = Math.min(this.width + 4, this.x(data.end(event)));
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(left - 0.5, this.laneY(row, lane) - 0.5, Math.max(3, right - left), LANE);
    }
    if (!scene.range) return;
    const [left, right] = scene.range.map((time) => this.x(time));
    context.fillStyle = look.accent;
    context.globalAlpha = 0.14;
    context.fillRect(left, 0, right - left, this.height);
    context.globalAlpha = 0.9;
    for (const x of [left, right]) context.fillRect(Math.round(x), 0, 1, this.height);
    context.globalAlpha = 1;
  }
}

/* Draws the whole span above the ruler, with a row per rank and the visible part lit. Below are that part's times. */
class Overview {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    this.context = canvas.getContext("2d");
    this.cache = document.createElement("canvas");
  }
  resize(width, ranks) {
    this.mapHeight = Math.max(18, Math.min(56, 7 * ranks));
    this.width = width;
    this.height = this.mapHeight + 22;
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    for (const [canvas, height] of [[this.canvas, this.height], [this.cache, this.mapHeight]]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.stale = true;
    this.marked = null;
  }
  /* Draws the tracks of the whole span, once for each size and theme. */
  fill(look) {
    const { data } = this, pen = this.cache.getContext("2d"), columns = this.cache.width, height = this.cache.height / Math.max(1, data.ranks.length);
    pen.clearRect(0, 0, columns, this.cache.height);
    data.ranks.forEach((rank, index) => {
      const tracks = data.tracks.filter((track) => track.rank === rank), lane = data.summary(tracks);
      const y = Math.floor(index * height), thick = Math.max(1, Math.floor((index + 1) * height) - y - (height > 5 ? this.ratio : 0));
      if (lane) this.strip(pen, lane, columns, y, thick, look);
      pen.fillStyle = look.bad;
      for (const track of tracks)
        for (const event of track.waits) {
          const width = (data.waited(event) / data.span) * columns;
          if (width >= 0.5) pen.fillRect((data.start[event] / data.span) * columns, y + thick / 2, width, Math.max(1, thick / 2));
        }
    });
    this.stale = false;
  }
  strip(pen, lane, columns, y, thick, look) {
    const { data } = this, scale = columns / data.span;
    for (let i = lane.first; i < lane.last;) {
      const x = Math.floor(data.start[i] * scale), next = Math.max(i + 1, data.next((x + 1) / scale, i, lane.last)), event = data.longest(lane, i, next);
      pen.fillStyle = look.category(data.category[event]);
      pen.fillRect(x, y, Math.max(1, data.duration[event] * scale), thick);
      i = next;
    }
  }
  draw(scene, look) {
    if (this.stale) this.fill(look);
    const { context, width, ratio } = this, scale = width / this.data.span;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.globalAlpha = 0.4;
    context.drawImage(this.cache, 0, 0, width, this.mapHeight);
    context.globalAlpha = 1;
    const left = scene.from * scale, right = Math.max(left + 2, scene.to * scale);
    context.save();
    context.beginPath();
    context.rect(left, 0, right - left, this.mapHeight);
    context.clip();
    context.clearRect(left, 0, right - left, this.mapHeight);
    context.drawImage(this.cache, 0, 0, width, this.mapHeight);
    context.restore();
    this.matches(look);
    context.strokeStyle = look.accent;
    context.lineWidth = 1.5;
    context.strokeRect(Math.max(0.75, left), 0.75, Math.min(width - 0.75, right) - Math.max(0.75, left), this.mapHeight - 1.5);
    this.ruler(scene, look);
  }
  /* Marks where the found events are. */
  matches(look) {
    const { data, context, width } = this, { found } = data;
    if (!found) return;
    if (this.marked !== found) {
      this.marked = found;
      this.marks = new Uint8Array(width + 1);
      for (const { first, last } of data.lanes)
        for (let i = first; i < last && found.before[i] < found.before[last];) {
          const x = Math.floor((data.start[i] / data.span) * width), next = Math.max(i + 1, data.next(((x + 1) / width) * data.span, i, last));
          if (found.before[next] > found.before[i]) this.marks[x] = 1;
          i = next;
        }
    }
    context.fillStyle = look.accent;
    for (let x = 0; x < width; x++) if (this.marks[x]) context.fillRect(x, this.mapHeight + 1, 1.5, 3);
  }
  ruler(scene, look) {
    const { context, width } = this, perPixel = (scene.to - scene.from) / width;
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = look.ink;
    for (const tick of scene.ticks) {
      const x = Math.round((tick - scene.from) / perPixel);
      context.globalAlpha = 0.35;
      context.fillRect(x, this.mapHeight + 4, 1, 18);
      context.globalAlpha = 0.8;
      if (x < width - 44) context.fillText(tickText(tick, scene.step), x + 4, this.mapHeight + 12);
    }
    context.globalAlpha = 1;
  }
}

/* Returns the times of a ruler, which are round and about `room` pixels apart. */
function rulerTicks(from, to, width, room = 96) {
  const raw = ((to - from) / Math.max(1, width)) * room, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999) || 10 * power;
  const ticks = [];
  for (let index = Math.ceil(from / step); index * step <= to; index++) ticks.push(index * step);
  return { ticks, step };
}
/* Returns a time of the ruler as text, in a unit of its size and with as many digits as the step needs. */
function tickText(time, step) {
  const [unit, factor] = time >= 1e6 ? ["s", 1e6] : time >= 1e3 ? ["ms", 1e3] : step >= 1 ? ["µs", 1] : ["ns", 1e-3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9));
  return `${(time / factor).toFixed(Math.min(9, digits))} ${unit}`;
}
