// Curves with uPlot: one chart per quantity, all runs in it, over a common axis.
"use strict";

// Every chart is at least twice as fine as the screen, so that it is sharp on paper.
const density = Math.max(2, window.devicePixelRatio);
Object.defineProperty(window, "devicePixelRatio", {get: () => density});
uPlot.pxRatio = density;

const AXES = ["steps", "tokens", "training time"];
const COLOURS = ["#4269d0", "#e0931f", "#e2574c", "#3ba58b", "#9c5fd6", "#d5629b", "#5d9bd5", "#7f8a2c", "#9c6b4e", "#858b96"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 5]];
const MARKS = {resume: "\u25b6", stop: "\u25a0", topology: "\u25c6", skipped: "\u00d7"};
const MAX_IN_TIP = 12;
const MAX_SORTED = 20000; // numbers that decide what is an outlier
const FONT = "12px system-ui, sans-serif";

const colour = arm => COLOURS[arm % COLOURS.length];
const dash = arm => DASHES[Math.floor(arm / COLOURS.length) % DASHES.length];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What the page shows now. `arms` are [{name, runs}], and `armOf` is the arm of each run. `hidden`
// arms are not drawn; of the arms in `lit`, where it is not null, the others are dimmed. `smoothing`
// is the half-life of smoothed lines, in steps; 0 for none.
const state = {axis: 0, zoom: null, smoothing: 0, raw: true, marks: true, seeds: false, outliers: false,
               hidden: new Set(), lit: null, names: [], arms: [], armOf: [], ready: false};

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function swatch(arm) {
  const svg = drawn("svg", {width: 26, height: 10, class: "sw", "aria-hidden": true});
  svg.append(drawn("line", {x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(arm), "stroke-width": 2.5, "stroke-dasharray": dash(arm).join(" ")}));
  return svg;
}

// A number of a file, to six significant digits.
const exact = value => String(Number(value.toPrecision(6)));

function short(value, digits) {
  const [power, unit] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([p]) => Math.abs(value) >= p) || [1, ""];
  return String(Number((value / power).toPrecision(digits))) + unit;
}

function duration(seconds, digits = 4) {
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([s]) => Math.abs(seconds) >= s) || [1, "s"];
  return `${Number((seconds / unit).toPrecision(digits))} ${name}`;
}

// The labels of ticks, with as many digits as it takes to place each within a hundredth of the
// smallest distance; null is a tick without a label.
function tickLabels(ticks, write) {
  const labelled = ticks.filter(tick => tick !== null);
  const apart = Math.min(...labelled.slice(1).map((tick, i) => tick - labelled[i]));
  const exact = digits => labelled.every(tick => Math.abs(Number(tick.toPrecision(digits)) - tick) <= apart / 100);
  let digits = 1;
  while (digits < 15 && !exact(digits)) digits++;
  return ticks.map(tick => tick === null ? "" : write(tick, digits));
}

const ruler = document.createElement("canvas").getContext("2d");
function widest(labels) {
  ruler.font = FONT;
  return Math.max(0, ...labels.map(label => ruler.measureText(label).width));
}

function onAxis(value) {
  if (state.axis === 2) return duration(value);
  const number = value.toLocaleString("en", {maximumFractionDigits: 0});
  return state.axis === 1 ? `${number} tokens` : `step ${number}`;
}

// The index of the number nearest to `x` in increasing numbers.
function nearest(numbers, x) {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < x) low = middle; else high = middle;
  }
  return x - numbers[low] <= numbers[high] - x ? low : high;
}

// The exponential moving average of lingua.tools.runs.records.smooth.
function smooth(values, steps, halfLife) {
  let total = 0, weight = 0;
  return values.map((value, i) => {
    const decay = i === 0 ? 1 : 0.5 ** ((steps[i] - steps[i - 1]) / halfLife);
    total *= decay;
    weight *= decay;
    if (value === null) return null;
    total += value;
    weight += 1;
    return total / weight;
  });
}

// `values` over increasing `steps` at `wanted` steps: between two in proportion, null beyond the ends
// and beside a null.
function interpolate(wanted, steps, values) {
  if (wanted === steps) return values;
  let i = 0;
  return wanted.map(step => {
    while (i < steps.length - 1 && steps[i + 1] <= step) i++;
    if (steps[i] === step) return values[i];
    if (step < steps[i] || i === steps.length - 1 || values[i] === null || values[i + 1] === null) return null;
    return values[i] + (values[i + 1] - values[i]) * (step - steps[i]) / (steps[i + 1] - steps[i]);
  });
}

// The mean of the seeds of an arm, with the lowest and the highest, at every step of any of them
// that all reach; null where one has no number. `seeds` are [{steps, x, y}].
function average(seeds) {
  const first = Math.max(...seeds.map(({steps}) => steps[0])), last = Math.min(...seeds.map(({steps}) => steps.at(-1)));
  let steps = seeds[0].steps;
  if (seeds.some(seed => seed.steps !== steps))
    steps = [...new Set(seeds.flatMap(seed => seed.steps))].filter(s => s >= first && s <= last).sort((a, b) => a - b);
  const xs = seeds.map(seed => interpolate(steps, seed.steps, seed.x));
  const ys = seeds.map(seed => interpolate(steps, seed.steps, seed.y));
  const over = (columns, reduce) => steps.map((_, i) => {
    const numbers = columns.map(column => column[i]);
    return numbers.includes(null) ? null : reduce(numbers);
  });
  const mean = numbers => numbers.reduce((a, b) => a + b) / numbers.length;
  return {steps, x: over(xs, mean), y: over(ys, mean), low: over(ys, n => Math.min(...n)), high: over(ys, n => Math.max(...n))};
}

// The part of a seed's `y` where `mean` has no number, with the neighbours that a line needs.
function outside(mean, {steps, y}) {
  const at = interpolate(steps, mean.steps, mean.y);
  return y.map((value, i) => at[i] === null || at[i - 1] === null || at[i + 1] === null ? value : null);
}

// [low, high] of what is no outlier: at most twice the distance of the 2nd and 98th percentiles away
// from them.
function usual(values) {
  const each = Math.ceil(values.length / MAX_SORTED);
  const sorted = Float64Array.from(values.filter((_, i) => i % each === 0)).sort();
  const at = part => sorted[Math.round(part * (sorted.length - 1))];
  const [low, high] = [at(.02), at(.98)];
  return [low - 2 * (high - low), high + 2 * (high - low)];
}

// Whether the reader points at another arm, or searches for one.
const dimmed = arm => state.lit !== null && !state.lit.has(arm);

// Points that no line reaches, and all of a short line.
function dots(values) {
  const alone = [];
  for (let i = 0; i < values.length; i++)
    if (values[i] !== null && (values.length <= 60 || ((values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null)))
      alone.push(i);
  return alone;
}

class Chart {
  // `lines`: [{run, x: [steps, tokens, seconds], raw}], arrays with null for what is missing.
  // `zoom(span)` is called with the part of the axis that the reader has chosen, or null for all.
  constructor({title, unit, group, lines, noisy}, marks, zoom) {
    Object.assign(this, {title, unit, lines, noisy, marks, zoom, log: false});
    this.root = element("article", undefined, {class: "chart", "data-place": group || title});
    this.heading = element("h3", title);
    this.toggle = element("input", undefined, {type: "checkbox", "data-keep": `log ${group || title}`, "aria-label": `log axis of ${group || title}`});
    this.toggle.onchange = () => { this.log = this.toggle.checked; this.draw(); };
    this.left = element("span", undefined, {class: "unit"});
    const header = element("header"), label = element("label");
    label.append(this.toggle, " log");
    header.append(this.heading, element("span", unit, {class: "unit"}), this.left, label);
    this.tip = element("div", undefined, {class: "tip", "aria-hidden": true});
    this.body = element("div", undefined, {role: "img"});
    this.root.append(header, this.body, this.tip);
  }

  // Make the picture anew: for another axis, scale, or width.
  draw(width = this.root.clientWidth) {
    if (!state.ready) return;
    this.u?.destroy();
    this.u = null;
    this.tip.style.display = "none";
    this.smoothed = this.noisy && state.smoothing > 0;
    this.curves = state.arms.flatMap((_, arm) => this.curvesOf(arm));
    this.left.textContent = "";
    this.describe();
    if (this.curves.length === 0) {
      this.body.replaceChildren(element("p", `not recorded over ${AXES[state.axis]}`, {class: "key"}));
      return;
    }
    this.body.replaceChildren();
    const values = this.curves.map(({x, y}) => [x, this.log ? y.map(v => v > 0 ? v : null) : y]);
    const axis = {stroke: () => css("--faint"), grid: {stroke: () => css("--line"), width: 1}, ticks: {show: false}, font: FONT};
    const onX = (u, ticks) => tickLabels(ticks, state.axis === 2 ? duration : short);
    const onY = (u, ticks) => tickLabels(ticks, short);
    const wide = (u, labels) => Math.ceil(Math.max(30, widest(labels ?? []))) + 12;
    this.u = new uPlot({
      mode: 2, width, height: Math.round(Math.min(300, Math.max(210, width / 2))), legend: {show: false},
      series: [{}, ...this.curves.map((curve, i) => this.series(curve, values[i][1]))],
      scales: {
        x: {time: false, auto: true, range: () => state.zoom ?? this.span()},
        y: {auto: true, distr: this.log ? 3 : 1, range: () => this.height()},
      },
      axes: [{...axis, values: onX, space: 80, size: 28, label: AXES[state.axis], labelSize: 18, labelFont: FONT}, {...axis, values: onY, size: wide}],
      padding: [null, 30, null, null],
      cursor: {
        y: false, drag: {x: true, y: false, setScale: false}, points: {show: false},
        bind: {dblclick: () => () => this.zoom(null)},
      },
      hooks: {
        drawAxes: [() => this.drawBands()],
        draw: [() => this.drawMarks()],
        setCursor: [() => this.point()],
        setSelect: [u => {
          const {left, width} = u.select;
          if (width > 4) this.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
          if (width > 0) u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        }],
      },
    }, [null, ...values], this.body);
    this.dots = element("div");
    this.u.over.append(this.dots);
    this.u.over.addEventListener("mouseleave", () => this.leave());
  }

  // [{arm, kind, x, y, name}, ...]: of one run its lines. Of several their mean, which has a band
  // from `low` to `high`, and `thin` lines of single seeds: all of them, or where there is no mean.
  curvesOf(arm) {
    const {name, runs} = state.arms[arm];
    const lines = this.lines.filter(line => runs.includes(line.run) && line.x[state.axis] !== null);
    if (lines.length === 0) return [];
    const line = ({run, x, raw}, kind) => ({run, arm, kind, name: state.names[run], steps: x[0], x: x[state.axis],
                                            y: kind === "raw" ? raw : smooth(raw, x[0], state.smoothing)});
    const kinds = this.smoothed ? ["raw", "smooth"] : ["raw"];
    if (runs.length === 1) return kinds.map(kind => line(lines[0], kind));
    const curves = [];
    for (const kind of kinds) {
      const seeds = lines.map(each => line(each, kind)), all = lines.length === runs.length;
      const mean = all ? average(seeds) : {steps: [], x: [], y: []};
      if (mean.y.some(y => y !== null)) {
        const behind = kind === "raw" && this.smoothed;
        curves.push({arm, kind, name: `${name}, mean`, ...mean, ...behind ? {low: null, high: null} : {}});
      }
      if (kind === kinds.at(-1))
        for (const seed of seeds) {
          const y = state.seeds || !mean.steps.length ? seed.y : outside(mean, seed);
          if (y.some(value => value !== null)) curves.push({...seed, y, thin: true});
        }
    }
    return curves;
  }

  series({arm, kind, thin}, values) {
    const faded = kind === "raw" && this.smoothed;
    const alone = kind === "raw" ? dots(values) : [];
    const paint = () => {
      const alpha = (faded ? Math.max(.1, .6 / Math.sqrt(this.lines.length)) : 1) * (dimmed(arm) ? .1 : 1);
      return colour(arm) + Math.round(255 * alpha).toString(16).padStart(2, "0");
    };
    return {
      show: this.visible({arm, kind}), stroke: paint, width: faded ? 1 : thin ? .9 : 1.8, dash: faded ? [] : dash(arm),
      facets: [{scale: "x", auto: true, sorted: 1}, {scale: "y", auto: true}], paths: uPlot.paths.linear(),
      points: {show: alone.length > 0, filter: () => alone, size: 4, width: 0, fill: paint},
    };
  }

  visible({arm, kind}) {
    return !state.hidden.has(arm) && (kind === "smooth" || state.raw || !this.smoothed);
  }

  get seen() { return this.curves.filter(curve => this.visible(curve)); }

  // What a screen reader says of the picture: what each visible run has logged.
  describe() {
    const lines = this.lines.filter(({run, x}) => x[state.axis] !== null && !state.hidden.has(state.armOf[run])).map(({run, x, raw}) => {
      const logged = [...raw.keys()].filter(i => raw[i] !== null), lowest = logged.reduce((a, b) => raw[b] < raw[a] ? b : a);
      const [first, last, low] = [logged[0], logged.at(-1), lowest].map(i => `${exact(raw[i])} at ${onAxis(x[state.axis][i])}`);
      return `${state.names[run]} from ${first} to ${last}, lowest ${low}`;
    });
    if (lines.length > MAX_IN_TIP) lines.splice(MAX_IN_TIP, Infinity, `and ${lines.length - MAX_IN_TIP} more`);
    const title = [this.title, this.unit].filter(Boolean).join(", "), text = lines.join("; ") || "no line";
    this.body.setAttribute("aria-label", `${title}, over ${AXES[state.axis]}: ${text}`);
  }

  // Show what `state` says now; the axis is the same.
  follow() {
    if (!this.u) return;
    this.leave();
    this.describe();
    this.curves.forEach((curve, i) => {
      if (this.u.series[i + 1].show !== this.visible(curve)) this.u.setSeries(i + 1, {show: this.visible(curve)});
    });
    const [min, max] = state.zoom ?? this.span();
    this.u.setScale("x", {min, max}); // and the range of y follows
  }

  span() {
    const low = Math.min(...this.seen.map(({x}) => x[0])), high = Math.max(...this.seen.map(({x}) => x[x.length - 1]));
    if (!(low < high)) return Number.isFinite(low) ? [low - 1, high + 1] : [0, 1];
    return [low, high];
  }

  // The range of what is visible, without outliers, whose number is shown beside the title; from 0
  // where that costs little. What is usual follows from what was logged, not from smoothed lines.
  height() {
    const [left, right] = state.zoom ?? this.span(), logged = [], smoothed = [];
    const add = (values, value) => { if (!this.log || value > 0) values.push(this.log ? Math.log(value) : value); };
    for (const {kind, x, y, low, high} of this.curves.filter(({arm}) => !state.hidden.has(arm)))
      for (let i = 0; i < x.length; i++)
        if (y[i] !== null && (x[i + 1] ?? x[i]) >= left && (x[i - 1] ?? x[i]) <= right) // its line is in the picture
          for (const value of low ? [y[i], low[i], high[i]] : [y[i]]) add(kind === "raw" ? logged : smoothed, value);
    const [least, most] = state.outliers || logged.length === 0 ? [-Infinity, Infinity] : usual(logged);
    let low = Infinity, high = -Infinity, n_outside = 0;
    const fit = value => { low = Math.min(low, value); high = Math.max(high, value); };
    for (const value of state.raw || !this.smoothed ? logged : []) value < least || value > most ? n_outside++ : fit(value);
    for (const value of smoothed) if (value >= least && value <= most) fit(value);
    this.left.textContent = n_outside ? `${n_outside.toLocaleString("en")} outlier${n_outside > 1 ? "s" : ""} not in the picture` : "";
    if (low > high) return this.log ? [1, 10] : [0, 1];
    if (this.log) return [Math.exp(low) / 1.1, Math.exp(high) * 1.1];
    // The file has six digits.
    if (high - low <= 1e-7 * Math.max(Math.abs(low), Math.abs(high))) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
    return [low >= 0 && low < (high - low) / 4 ? 0 : low - (high - low) / 20, high + (high - low) / 20];
  }

  // From the lowest to the highest seed of each arm, gaps left out.
  drawBands() {
    const {ctx, bbox} = this.u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const {arm, x, low, high} of this.seen.filter(curve => curve.low)) {
      ctx.fillStyle = colour(arm) + (dimmed(arm) ? "08" : "30");
      const at = (i, y) => [this.u.valToPos(x[i], "x", true), this.u.valToPos(this.log ? Math.max(y[i], 1e-300) : y[i], "y", true)];
      for (let i = 0; i < x.length; i++) {
        const first = i;
        while (i < x.length && low[i] !== null) i++;
        if (i - first < 2) continue;
        ctx.beginPath();
        for (let j = first; j < i; j++) ctx.lineTo(...at(j, high));
        for (let j = i - 1; j >= first; j--) ctx.lineTo(...at(j, low));
        ctx.fill();
      }
    }
    ctx.restore();
  }

  drawMarks() {
    const {ctx, bbox} = this.u, arms = new Set(this.seen.map(({arm}) => arm));
    if (!state.marks) return;
    ctx.save();
    ctx.font = `${11 * density}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.lineWidth = density;
    ctx.setLineDash([3 * density, 3 * density]);
    const taken = new Map(), lines = new Set(); // kinds at a place: each once, side by side
    for (const mark of this.marks) {
      const x = mark.x[state.axis], arm = state.armOf[mark.run];
      if (x === null || !arms.has(arm)) continue;
      const at = this.u.valToPos(x, "x", true), line = `${Math.round(at / density)} ${arm} ${mark.kind === "skipped"}`;
      if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1 || lines.has(line)) continue;
      lines.add(line);
      ctx.fillStyle = ctx.strokeStyle = colour(arm) + (dimmed(arm) ? "22" : "cc");
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + (mark.kind === "skipped" ? 14 * density : bbox.height));
      ctx.stroke();
      const place = Math.round(at / (30 * density)), kinds = taken.get(place) ?? [];
      taken.set(place, kinds);
      if (!kinds.includes(mark.kind)) ctx.fillText(MARKS[mark.kind], at + 11 * density * kinds.length, bbox.top - 3 * density);
      kinds.push(mark.kind);
    }
    ctx.restore();
  }

  leave() {
    this.tip.style.display = "none";
    this.dots.replaceChildren();
  }

  // The numbers under the pointer: of each visible line its point nearest to the pointer's place,
  // that nearest to the pointer first, where the crosshair stands.
  point() {
    const {left, top} = this.u.cursor;
    if (!(left >= 0) || !this.u.over.matches(":hover")) { this.leave(); return; }
    const at = this.u.posToVal(left, "x");
    const points = this.seen.flatMap(({arm, run, kind, name, x, y, low, high}) => {
      const i = nearest(x, at), joined = state.arms[arm].runs.length > 1;
      const ended = (at < x[0] || at > x.at(-1)) && Math.abs(this.u.valToPos(x[i], "x") - left) > 30;
      if (joined && (y[i] === null || ended)) return []; // the arm has another line there
      const beside = this.u.valToPos(x[i], "x"), down = y[i] === null ? Infinity : this.u.valToPos(y[i], "y");
      const band = low ? ` (${exact(low[i])} to ${exact(high[i])})` : "";
      return [{arm, name, kind, x: x[i], y: y[i], band, beside, down, away: Math.hypot(beside - left, down - top)}];
    }).sort((a, b) => a.away - b.away);
    if (points.length === 0) { this.leave(); return; }
    const here = points[0].x;
    this.u.root.querySelector(".u-cursor-x").style.transform = `translate(${points[0].beside}px)`;
    const shown = points.slice(0, MAX_IN_TIP), table = element("table");
    for (const {arm, name, kind, x, y, band} of shown) {
      const row = element("tr"), cell = element("td");
      cell.append(swatch(arm), ` ${name}${kind === "smooth" ? ", smoothed" : ""}`);
      row.append(cell, element("td", y === null ? "no number" : exact(y) + band), element("td", x === here ? "" : onAxis(x)));
      table.append(row);
    }
    this.dots.replaceChildren(...shown.filter(({y}) => y !== null).map(({arm, beside, down}) => {
      const dot = element("i", undefined, {class: "dot"});
      Object.assign(dot.style, {left: `${beside}px`, top: `${down}px`, background: colour(arm)});
      return dot;
    }));
    const near = !state.marks ? [] : this.marks.filter(mark => !state.hidden.has(state.armOf[mark.run]) && mark.x[state.axis] !== null
      && Math.abs(this.u.valToPos(mark.x[state.axis], "x") - left) < 6);
    this.tip.replaceChildren(element("strong", onAxis(here)), table,
      ...points.length > MAX_IN_TIP ? [element("div", `and ${points.length - MAX_IN_TIP} more; these are nearest to the pointer`)] : [],
      ...near.slice(0, MAX_IN_TIP).map(mark => element("div", `${MARKS[mark.kind]} ${state.names[mark.run]}: ${mark.text}`)),
      ...near.length > MAX_IN_TIP ? [element("div", `and ${near.length - MAX_IN_TIP} more events here`)] : []);
    this.tip.style.display = "block";
    // Beside the pointer, or below the chart where it would cover it.
    const {offsetTop, offsetWidth, offsetHeight} = this.body, x = this.u.over.offsetLeft + left, wide = this.tip.offsetWidth + 14;
    const beside = x > offsetWidth / 2 ? x - wide : x + 14, fits = beside >= 0 && beside + wide - 14 <= offsetWidth;
    this.tip.style.left = `${fits ? beside : 0}px`;
    this.tip.style.top = `${fits ? offsetTop + 12 : offsetTop + offsetHeight}px`;
  }
}
