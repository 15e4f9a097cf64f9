/* The events of a timeline in columns, and functions that look them up.
 *
 * The events of one depth of a track are a lane. They are sorted by start, and contiguous in the columns.
 */
const FAN = 16;  // number of events, or of groups of them, in one entry of the next level

const bytesOf = (view) => (view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : new ArrayBuffer(0));

class TimelineData {
  constructor(raw) {
    this.names = raw.names;
    this.categories = raw.categories;
    this.looks = raw.looks;  // of each category: title, colour in a light theme, colour in a dark one
    this.details = new Map(raw.details);
    this.span = raw.span;
    this.shortest = raw.shortest;
    this.events = raw.events;
    const ticks = new Uint32Array(bytesOf(raw.start));
    this.count = ticks.length;
    this.start = new Float64Array(this.count);
    for (let i = 0; i < this.count; i++) this.start[i] = ticks[i] * raw.tick;
    this.duration = new Float32Array(bytesOf(raw.duration));
    const names = bytesOf(raw.name);
    this.name = names.byteLength === 2 * this.count ? new Uint16Array(names) : new Uint32Array(names);
    this.category = new Uint8Array(bytesOf(raw.category));
    this.readTracks(raw.tracks);
    this.readWaits(new Int32Array(bytesOf(raw.waits)));
    this.readSteps(new Float64Array(bytesOf(raw.steps)));
    this.ranks = [...new Set([...this.tracks.map((track) => track.rank), ...this.steps.keys()])].sort((a, b) => a - b);
    this.labels = this.names.map((name, index) => (this.details.has(index) ? `${name} · ${this.details.get(index).trim()}` : name));
    this.widths = new Float32Array(this.names.length);  // of the labels, measured on first use
    this.found = null;
  }
  readTracks(heads) {
    this.lanes = [];
    this.sums = new Float64Array(this.count + 1);
    this.until = new Float64Array(this.count);
    let first = 0;
    this.tracks = heads.map(({ rank, name, lanes }, index) => {
      const track = { index, rank, name, title: name.replace(/^rank \d+ · /, ""), lanes: [], waits: [] };
      lanes.forEach((count, depth) => {
        const lane = { track, depth, first, last: first + count, levels: this.levels(first, first + count) };
        this.lanes.push(lane);
        track.lanes.push(lane);
        first += count;
      });
      return track;
    });
    for (const lane of this.lanes) {
      let until = -Infinity;
      for (let i = lane.first; i < lane.last; i++) {
        this.sums[i + 1] = this.sums[i] + this.duration[i];
        until = Math.max(until, this.start[i] + this.duration[i]);
        this.until[i] = until;
      }
    }
  }
  /* The longest event of each FAN events, of each FAN of those, and so on. */
  levels(first, last) {
    const levels = [], duration = this.duration;
    let count = last - first, below = null;
    while (count > FAN) {
      const above = new Uint32Array(Math.ceil(count / FAN));
      for (let group = 0; group < above.length; group++) {
        let best = -1, longest = -1;
        for (let i = group * FAN, end = Math.min(count, i + FAN); i < end; i++) {
          const event = below ? below[i] : first + i;
          if (duration[event] > longest) { longest = duration[event]; best = event; }
        }
        above[group] = best;
      }
      levels.push(above);
      below = above;
      count = above.length;
    }
    return levels;
  }
  readWaits(pairs) {
    this.groups = new Map();  // the waiting events, by the event that they wait for
    this.waitsFor = new Map();
    for (let i = 0; i < pairs.length; i += 2) {
      const [from, to] = [pairs[i], pairs[i + 1]];
      this.waitsFor.set(from, to);
      if (!this.groups.has(to)) this.groups.set(to, []);
      this.groups.get(to).push(from);
      this.laneOf(from).track.waits.push(from);
    }
    for (const track of this.tracks) track.waits.sort((a, b) => this.start[a] - this.start[b]);
    this.meetings = [...this.groups.keys()].sort((a, b) => this.start[a] - this.start[b]);
  }
  readSteps(values) {
    this.steps = new Map();
    for (let i = 0; i < values.length; i += 4) {
      const rank = values[i];
      if (!this.steps.has(rank)) this.steps.set(rank, []);
      this.steps.get(rank).push({ start: values[i + 1], end: values[i + 2], number: values[i + 3] });
    }
    for (const steps of this.steps.values()) steps.sort((a, b) => a.start - b.start);
  }

  /* Returns the most informative lane of a rank: in its first track, the one below the events that are whole steps. */
  summary(tracks) {
    const lanes = tracks.find((track) => track.lanes.length)?.lanes || [], step = this.categories.indexOf("step");
    return lanes.find((lane) => this.category[lane.first] !== step || lane === lanes.at(-1));
  }
  end(event) { return this.start[event] + this.duration[event]; }
  text(event) { return this.names[this.name[event]]; }
  detail(event) { return this.details.get(this.name[event]) || ""; }
  kind(event) { return this.looks[this.category[event]][0]; }
  rankOf(event) { return this.laneOf(event).track.rank; }
  laneOf(event) {
    let low = 0, high = this.lanes.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.lanes[middle].first <= event) low = middle; else high = middle - 1;
    }
    return this.lanes[low];
  }
  /* Returns the first event of [low, high) that starts at `time` or later. */
  startingAt(time, low, high) {
    const start = this.start;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (start[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }
  /* Does the same from `low` on, faster if the event is near. */
  next(time, low, high) {
    let reach = 1;
    while (low + reach < high && this.start[low + reach] < time) reach *= 2;
    return this.startingAt(time, low + (reach >> 1), Math.min(high, low + reach + 1));
  }
  /* Returns the first event of a lane that ends after `time`. */
  firstUntil(lane, time) {
    let low = lane.first, high = lane.last;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.until[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  /* Returns the longest event of [low, high) of a lane. */
  longest(lane, low, high) {
    const duration = this.duration;
    let best = low, a = low - lane.first, b = high - lane.first, below = null;
    const consider = (event) => { if (duration[event] > duration[best]) best = event; };
    for (const level of lane.levels) {
      if (b - a <= FAN) break;
      for (; a % FAN && a < b; a++) consider(below ? below[a] : lane.first + a);
      for (; b % FAN && b > a; b--) consider(below ? below[b - 1] : lane.first + b - 1);
      a /= FAN; b /= FAN; below = level;
    }
    for (; a < b; a++) consider(below ? below[a] : lane.first + a);
    return best;
  }
  /* Returns the event of a lane at a time, or the longest one near it if no event is wide enough to be hit. */
  at(lane, time, near) {
    for (let i = this.startingAt(time, lane.first, lane.last) - 1, tries = 0; i >= lane.first && tries < 8; i--, tries++)
      if (this.end(i) >= time && this.duration[i] > 2 * near) return i;
    const low = this.firstUntil(lane, time - near), high = this.startingAt(time + near, low, lane.last);
    return low < high ? this.longest(lane, low, high) : -1;
  }
  /* Returns how long an event waits for the last rank of its collective, in microseconds. */
  waited(event) {
    const last = this.waitsFor.get(event);
    return last === undefined ? 0 : Math.max(0, Math.min(this.start[last] - this.start[event], this.duration[event]));
  }
  /* Returns the events of an event's collective, starting with the last rank's, or none if it is in no collective. */
  collective(event) {
    const last = this.waitsFor.get(event) ?? event, others = this.groups.get(last);
    return others ? [last, ...others] : [];
  }
  stepAt(rank, time) { return (this.steps.get(rank) || []).find((step) => step.start <= time && time < step.end); }

  /* Finds the events whose name, or whose line of a cell, contains the text. */
  search(text) {
    this.found = null;
    const words = text.trim().toLowerCase();
    if (!words) return;
    const wanted = new Uint8Array(this.names.length);
    this.names.forEach((name, index) => {
      wanted[index] = Number(name.toLowerCase().includes(words) || (this.details.get(index) || "").toLowerCase().includes(words));
    });
    const before = new Uint32Array(this.count + 1);  // the number of found events before each event
    for (let i = 0; i < this.count; i++) before[i + 1] = before[i] + wanted[this.name[i]];
    this.found = { wanted, before, total: before[this.count] };
  }
  isFound(event) { return !this.found || this.found.wanted[this.name[event]] === 1; }
  /* Returns the found event after (step 1) or before (step -1) a time. Equal starts are in the order of events. */
  neighbour(time, event, step) {
    const { wanted } = this.found;
    let best = -1;
    for (let i = 0; i < this.count; i++) {
      if (!wanted[this.name[i]]) continue;
      const order = (this.start[i] - time || i - event) * step;
      if (order <= 0) continue;
      if (best < 0 || (this.start[i] - this.start[best] || i - best) * step < 0) best = i;
    }
    return best;
  }
  /* Returns how many found events are before an event, in the order of `neighbour`. */
  place(event) {
    const { wanted } = this.found, time = this.start[event];
    let place = 0;
    for (let i = 0; i < this.count; i++)
      if (wanted[this.name[i]] && (this.start[i] < time || (this.start[i] === time && i < event))) place++;
    return place;
  }
  /* Returns the names with the most own time between two times, as [name, category, seconds, count]. */
  totals(from, to, limit) {
    const times = new Float64Array(this.names.length), counts = new Uint32Array(this.names.length), kinds = new Uint8Array(this.names.length);
    const add = (lane) => {
      for (let i = this.firstUntil(lane, from); i < lane.last && this.start[i] < to; i++) {
        const part = Math.min(this.end(i), to) - Math.max(this.start[i], from);
        if (part <= 0) continue;
        times[this.name[i]] += part;
        counts[this.name[i]]++;
        kinds[this.name[i]] = this.category[i];
        if (lane.depth) {  // subtract it from the own time of the event that contains it
          const above = lane.track.lanes[lane.depth - 1], parent = this.startingAt(this.start[i] + 1e-9, above.first, above.last) - 1;
          if (parent >= above.first) times[this.name[parent]] -= part;
        }
      }
    };
    for (const lane of this.lanes) add(lane);
    return [...times.keys()].filter((name) => counts[name]).sort((a, b) => times[b] - times[a]).slice(0, limit)
      .map((name) => ({ name: this.names[name], category: this.looks[kinds[name]][0], time: times[name], count: counts[name] }));
  }
}

/* Returns microseconds as text. */
function microseconds(value, digits = 3) {
  const size = Math.abs(value);
  const [unit, factor] = size >= 1e6 ? ["s", 1e6] : size >= 1e3 ? ["ms", 1e3] : size >= 1 || !size ? ["µs", 1] : ["ns", 1e-3];
  return `${Number((value / factor).toPrecision(digits))} ${unit}`;
}
