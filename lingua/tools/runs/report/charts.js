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

const colour = run => COLOURS[run % COLOURS.length];
const dash = run => DASHES[Math.floor(run / COLOURS.length) % DASHES.length];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What the page shows now, and the names of the runs. `lit` is the run whose name is pointed at.
// `smoothing` is the half-life of smoothed lines, in steps; 0 for none.
const state = {axis: 0, zoom: null, smoothing: 0, raw: true, marks: true, hidden: new Set(), lit: null, names: []};

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function swatch(run) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({width: 26, height: 10, class: "sw"})) svg.setAttribute(name, value);
  const drawn = {x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(run), "stroke-width": 2.5, "stroke-dasharray": dash(run).join(" ")};
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

// A number of a file, to six significant digits.
const exact = value => String(Number(value.toPrecision(6)));

function short(value) {
  const [power, unit] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([p]) => Math.abs(value) >= p) || [1, ""];
  return String(Number((value / power).toPrecision(4))) + unit;
}

function duration(seconds) {
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([s]) => Math.abs(seconds) >= s) || [1, "s"];
  return `${Number((seconds / unit).toPrecision(4))} ${name}`;
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

// Whether another run is pointed at in the legend.
const dimmed = run => state.lit !== null && state.lit !== run && !state.hidden.has(state.lit);

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
  constructor({title, unit, lines, noisy}, marks, zoom) {
    Object.assign(this, {lines, noisy, marks, zoom, log: false});
    this.root = element("article", undefined, {class: "chart"});
    this.heading = element("h3", title);
    this.toggle = element("input", undefined, {type: "checkbox"});
    this.toggle.onchange = () => { this.log = this.toggle.checked; this.draw(); };
    const header = element("header"), label = element("label");
    label.append(this.toggle, " log");
    header.append(this.heading, element("span", unit, {class: "unit"}), label);
    this.tip = element("div", undefined, {class: "tip"});
    this.body = element("div");
    this.root.append(header, this.body, this.tip);
  }

  // Make the picture anew: for another axis, scale, or width.
  draw(width = this.root.clientWidth) {
    this.u?.destroy();
    this.u = null;
    this.tip.style.display = "none";
    this.smoothed = this.noisy && state.smoothing > 0;
    this.curves = (this.smoothed ? ["raw", "smooth"] : ["raw"]).flatMap(kind => this.lines
      .filter(line => line.x[state.axis] !== null)
      .map(line => ({line, kind, x: line.x[state.axis], y: kind === "raw" ? line.raw : smooth(line.raw, line.x[0], state.smoothing)})));
    if (this.curves.length === 0) {
      this.body.replaceChildren(element("p", `not recorded over ${AXES[state.axis]}`, {class: "key"}));
      return;
    }
    this.body.replaceChildren();
    const values = this.curves.map(({x, y}) => [x, this.log ? y.map(v => v > 0 ? v : null) : y]);
    const axis = {stroke: () => css("--faint"), grid: {stroke: () => css("--line"), width: 1}, ticks: {show: false},
                  font: "12px system-ui, sans-serif"};
    const onX = (u, splits) => splits.map(v => v === null ? "" : state.axis === 2 ? duration(v) : short(v));
    const onY = (u, splits) => splits.map(v => v === null ? "" : short(v));
    this.u = new uPlot({
      mode: 2, width, height: Math.round(Math.min(300, Math.max(210, width / 2))), legend: {show: false},
      series: [{}, ...this.curves.map((curve, i) => this.series(curve, values[i][1]))],
      scales: {
        x: {time: false, auto: true, range: () => state.zoom ?? this.span()},
        y: {auto: true, distr: this.log ? 3 : 1, range: () => this.height()},
      },
      axes: [{...axis, values: onX, space: state.axis === 2 ? 80 : 60, size: 28, label: AXES[state.axis], labelSize: 18, labelFont: axis.font}, {...axis, values: onY, size: 56}],
      cursor: {
        y: false, drag: {x: true, y: false, setScale: false},
        dataIdx: (u, i, _, x) => nearest(this.curves[i - 1].x, x),
        points: {size: 6, width: 0, fill: (u, i) => colour(this.curves[i - 1].line.run)},
        bind: {dblclick: () => () => this.zoom(null)},
      },
      hooks: {
        draw: [() => this.drawMarks()],
        setCursor: [() => this.point()],
        setSelect: [u => {
          const {left, width} = u.select;
          if (width > 4) this.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
          if (width > 0) u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        }],
      },
    }, [null, ...values], this.body);
    this.u.over.addEventListener("mouseleave", () => { this.tip.style.display = "none"; });
  }

  series({line, kind}, values) {
    const faded = kind === "raw" && this.smoothed;
    const alone = kind === "raw" ? dots(values) : [];
    const paint = () => {
      const alpha = (faded ? Math.max(.1, .6 / Math.sqrt(this.lines.length)) : 1) * (dimmed(line.run) ? .1 : 1);
      return colour(line.run) + Math.round(255 * alpha).toString(16).padStart(2, "0");
    };
    return {
      show: this.visible({line, kind}), stroke: paint, width: faded ? 1 : 1.8, dash: faded ? [] : dash(line.run),
      facets: [{scale: "x", auto: true, sorted: 1}, {scale: "y", auto: true}], paths: uPlot.paths.linear(),
      points: {show: alone.length > 0, filter: () => alone, size: 4, width: 0, fill: paint},
    };
  }

  visible({line, kind}) {
    return !state.hidden.has(line.run) && (kind === "smooth" || state.raw || !this.smoothed);
  }

  get seen() { return this.curves.filter(curve => this.visible(curve)); }

  // Show what `state` says now; the axis is the same.
  follow() {
    this.tip.style.display = "none";
    this.curves.forEach((curve, i) => {
      if (this.u && this.u.series[i + 1].show !== this.visible(curve)) this.u.setSeries(i + 1, {show: this.visible(curve)});
    });
    const [min, max] = state.zoom ?? this.span();
    this.u?.setScale("x", {min, max}); // and the range of y follows
  }

  span() {
    const low = Math.min(...this.seen.map(({x}) => x[0])), high = Math.max(...this.seen.map(({x}) => x[x.length - 1]));
    if (!(low < high)) return Number.isFinite(low) ? [low - 1, high + 1] : [0, 1];
    return [low, high];
  }

  // The range of what is visible, infinitely far values included; from 0 where that costs little.
  height() {
    const [left, right] = state.zoom ?? this.span();
    let low = Infinity, high = -Infinity;
    for (const {x, y} of this.seen)
      for (let i = 0; i < x.length; i++)
        if (y[i] !== null && x[i] >= left && x[i] <= right && (!this.log || y[i] > 0)) {
          low = Math.min(low, y[i]);
          high = Math.max(high, y[i]);
        }
    if (low > high) return this.log ? [1, 10] : [0, 1];
    if (this.log) return [low / 1.1, high * 1.1];
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
    return [low >= 0 && low < (high - low) / 4 ? 0 : low - (high - low) / 20, high + (high - low) / 20];
  }

  drawMarks() {
    const {ctx, bbox} = this.u, runs = new Set(this.seen.map(({line}) => line.run));
    if (!state.marks) return;
    ctx.save();
    ctx.font = `${11 * density}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    const taken = new Map(); // kinds at a place: each once, side by side
    for (const mark of this.marks) {
      const x = mark.x[state.axis];
      if (x === null || !runs.has(mark.run)) continue;
      const at = this.u.valToPos(x, "x", true);
      if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1) continue;
      ctx.fillStyle = ctx.strokeStyle = colour(mark.run) + (dimmed(mark.run) ? "22" : "cc");
      ctx.lineWidth = density;
      ctx.setLineDash([3 * density, 3 * density]);
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

  // The numbers under the pointer: of each visible line its point nearest to the pointer's place.
  point() {
    const {left, top} = this.u.cursor;
    if (!(left >= 0) || !this.u.over.matches(":hover")) { this.tip.style.display = "none"; return; }
    const at = this.u.posToVal(left, "x");
    const points = this.seen.map(({line, kind, x, y}) => {
      const i = nearest(x, at);
      return {run: line.run, kind, x: x[i], y: y[i], away: Math.abs(y[i] === null ? Infinity : this.u.valToPos(y[i], "y") - top)};
    }).sort((a, b) => a.away - b.away);
    if (points.length === 0) return;
    const here = points.reduce((best, p) => Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best).x;
    const table = element("table");
    for (const {run, kind, x, y} of points.slice(0, MAX_IN_TIP)) {
      const row = element("tr"), name = element("td");
      name.append(swatch(run), ` ${state.names[run]}${kind === "smooth" ? ", smoothed" : ""}`);
      row.append(name, element("td", y === null ? "no number" : exact(y)), element("td", x === here ? "" : onAxis(x)));
      table.append(row);
    }
    const near = !state.marks ? [] : this.marks.filter(mark => !state.hidden.has(mark.run) && mark.x[state.axis] !== null
      && Math.abs(this.u.valToPos(mark.x[state.axis], "x") - left) < 6);
    this.tip.replaceChildren(element("strong", onAxis(here)), table,
      ...points.length > MAX_IN_TIP ? [element("div", `and ${points.length - MAX_IN_TIP} more; these are nearest to the pointer`)] : [],
      ...near.slice(0, MAX_IN_TIP).map(mark => element("div", `${MARKS[mark.kind]} ${state.names[mark.run]}: ${mark.text}`)));
    this.tip.style.display = "block";
    const {offsetLeft, offsetWidth} = this.body, x = this.u.over.offsetLeft + left, {offsetWidth: wide} = this.tip;
    this.tip.style.left = `${Math.max(0, Math.min(offsetLeft + offsetWidth - wide, x > offsetWidth / 2 ? x - wide - 14 : x + 14))}px`;
    this.tip.style.top = `${this.body.offsetTop + 12}px`;
  }
}
