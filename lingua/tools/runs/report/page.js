// The page: unpack the content, then legend, switches, charts, tables and samples. Whatever a run
// has written is inserted as text.
"use strict";

const find = id => document.getElementById(id);

async function unpack() {
  const packed = Uint8Array.from(atob(find("payload").textContent), c => c.charCodeAt(0));
  find("payload").remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  return [JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))), bytes.subarray(4 + length)];
}

// As Arrays in page.py packs them: first the first byte of every number, then the second, ...
function numbers(bytes, {at, n, type, exponent}) {
  const width = type === "f8" ? 8 : 4, whole = new Uint8Array(n * width);
  for (let byte = 0; byte < width; byte++)
    for (let i = 0; i < n; i++) whole[i * width + byte] = bytes[at + byte * n + i];
  const found = new Array(n), view = new DataView(whole.buffer), half = new DataView(new ArrayBuffer(8));
  let multiple = 0;
  for (let i = 0; i < n; i++) {
    let value;
    if (type === "i4") {
      const step = view.getInt32(4 * i, true);
      if (step !== -(2 ** 31)) multiple += step;
      value = step === -(2 ** 31) ? NaN : exponent < 0 ? multiple / 10 ** -exponent : multiple * 10 ** exponent;
    } else if (type === "u4") {
      half.setUint32(0, view.getUint32(4 * i, true));
      value = half.getFloat64(0);
    } else value = view.getFloat64(8 * i, true);
    found[i] = Number.isNaN(value) ? null : value;
  }
  return found;
}

function unpackLines(content, bytes) {
  const known = new Map(); // equal arrays are stored once
  const array = place => {
    if (!known.has(place.at)) known.set(place.at, numbers(bytes, place));
    return known.get(place.at);
  };
  for (const chart of content.charts)
    for (const line of chart.lines) {
      line.x = line.x.map(place => { const x = array(place); return x.includes(null) ? null : x; });
      line.raw = array(line.raw);
    }
}

function section(title, ...children) {
  const made = element("section");
  made.append(element("h2", title), ...children);
  find("rest").append(made);
}

function table([header, ...rows]) {
  const made = element("table"), wide = element("div", undefined, {class: "wide"});
  const row = (cells, tag) => { const r = element("tr"); r.append(...cells.map(cell => element(tag, cell))); return r; };
  made.append(row(header, "th"), ...rows.map(cells => row(cells, "td")));
  wide.append(made);
  return wide;
}

function showHeader(content) {
  const n = content.n_runs;
  document.title = find("title").textContent = n === 1 ? content.names[0] : `${n.toLocaleString("en")} runs`;
  find("made").textContent = `lingua ${content.version}, ${content.made}`;
  const problems = content.problems.length > 20 ? [...content.problems.slice(0, 20), `... and ${content.problems.length - 20} more`] : content.problems;
  find("notes").append(...[...content.notes, ...problems].map(text => element("li", text)));
}

function showLegend(charts) {
  const follow = () => charts.forEach(chart => chart.follow());
  const boxes = state.names.map((name, run) => {
    const label = element("label"), box = element("input", undefined, {type: "checkbox"});
    box.checked = true;
    box.onchange = () => { box.checked ? state.hidden.delete(run) : state.hidden.add(run); follow(); };
    const light = lit => () => { state.lit = lit; charts.forEach(chart => chart.u?.redraw(false)); };
    label.onmouseenter = light(run);
    label.onmouseleave = light(null);
    label.append(box, swatch(run), element("span", name));
    find("legend").append(label);
    return box;
  });
  const set = checked => () => {
    boxes.forEach((box, run) => { box.checked = checked; checked ? state.hidden.delete(run) : state.hidden.add(run); });
    follow();
  };
  find("all").onclick = set(true);
  find("none").onclick = set(false);
  for (const name of ["raw", "marks"])
    find(name).onchange = () => { state[name] = find(name).checked; charts.forEach(chart => chart.draw()); };
  find("smoothing").onchange = () => { chooseSmoothing(); charts.forEach(chart => chart.draw()); };
  find("axis").onchange = () => {
    state.axis = Number(find("axis").value);
    state.zoom = null;
    charts.forEach(chart => chart.draw());
  };
}

// A part of the longest run, in steps.
function chooseSmoothing() {
  const part = Number(find("smoothing").value);
  state.smoothing = part && Math.max(1, Math.round(state.longest / part));
  find("smoothed").textContent = part ? `Smoothed lines are averages with a half-life of ${state.smoothing.toLocaleString("en")} steps.` : "";
}

// One chart each; of a group of them, one that the reader chooses.
function makeCharts(content) {
  const charts = [], groups = new Map();
  const zoom = span => { state.zoom = span; charts.forEach(chart => chart.follow()); };
  for (const described of content.charts) {
    const former = groups.get(described.group);
    if (former) { former.choices.push(described); continue; }
    const chart = new Chart(described, content.marks, zoom);
    find("charts").append(chart.root);
    charts.push(chart);
    if (described.group) groups.set(described.group, Object.assign(chart, {choices: [described]}));
  }
  for (const [group, chart] of groups) {
    const choice = element("select", undefined, {"aria-label": group});
    choice.append(...chart.choices.map((described, i) => element("option", described.title, {value: i})));
    choice.onchange = () => { chart.lines = chart.choices[choice.value].lines; chart.draw(); };
    chart.heading.textContent = `${group}: `;
    chart.heading.append(choice);
  }
  return charts;
}

function showKey(content) {
  const marks = [["resume", "resumed"], ["stop", "stopped"], ["topology", "another mesh"], ["skipped", "skipped steps"]];
  const used = marks.filter(([kind]) => content.marks.some(mark => mark.kind === kind)).map(([kind, text]) => `${MARKS[kind]} ${text}`);
  find("key").textContent = [
    "Thin lines are what was logged; gaps are numbers that are not finite.",
    used.length ? `Marks: ${used.join(", ")}.` : "",
    content.missing.length ? `No run has logged: ${content.missing.join(", ")}.` : "",
    "Drag to zoom, double-click for all.",
  ].join(" ");
}

function showSamples(content) {
  const having = content.names.map((_, run) => run).filter(run => content.samples[run].length);
  if (having.length === 0) return;
  const choice = element("select", undefined, {"aria-label": "run"}), place = element("div");
  choice.append(...having.map(run => element("option", content.names[run], {value: run})));
  choice.onchange = () => place.replaceChildren(...content.samples[choice.value].map(({source, prompt, texts}) => {
    const made = element("details"), body = element("div", undefined, {class: "sample"});
    made.open = true;
    for (const [step, text] of texts) body.append(element("b", `step ${step.toLocaleString("en")}`), element("pre", text));
    made.append(element("summary", `held-out text of ${source}, and how the model continues it`), element("pre", prompt, {class: "prompt"}), body);
    return made;
  }));
  choice.onchange();
  section("Samples", choice, place);
}

function showCode(content) {
  if (content.code.length === 0) return;
  const rows = content.code.map(({commit, changes, runs}) => [commit, changes ? `${changes.toLocaleString("en")} lines of uncommitted differences` : "", runs.join(", ")]);
  const parts = content.code.filter(({difference}) => difference).map(({commit, runs, difference}) => {
    const made = element("details");
    made.append(element("summary", `how ${commit.slice(0, 12)} of ${runs[0]} differs from the first`), element("pre", difference));
    return made;
  });
  section("Code", table([["commit", "changes", "runs"], ...rows]), ...parts);
}

function showTables(content) {
  section("Runs", table(content.overview));
  if (content.configs.length) section("What differs in their configs", table(content.configs));
  if (content.scores.length) section("Benchmarks, newest scores", table(content.scores));
  const marks = content.marks.map(mark => [content.names[mark.run], mark.x[0].toLocaleString("en"), mark.text]);
  if (marks.length) section("Stops, resumes and skipped steps", table([["run", "step", "what"], ...marks.slice(0, 200)]));
  if (content.machines.length) section("Machines and versions, at every start", table(content.machines));
  showCode(content);
  showSamples(content);
}

// Charts follow the width of the page, the colours of the system, and paper.
function followPage(charts) {
  const draw = width => charts.forEach(chart => chart.draw(width));
  let wide = find("charts").clientWidth;
  new ResizeObserver(() => {
    if (find("charts").clientWidth !== wide) { wide = find("charts").clientWidth; draw(); }
  }).observe(find("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => draw(340));
  addEventListener("afterprint", () => draw());
}

async function main() {
  const [content, bytes] = await unpack();
  unpackLines(content, bytes);
  state.names = content.names;
  state.longest = content.longest;
  chooseSmoothing();
  showHeader(content);
  const charts = makeCharts(content);
  showLegend(charts);
  showKey(content);
  showTables(content);
  charts.forEach(chart => chart.draw());
  followPage(charts);
  document.documentElement.dataset.ready = "true";
}

main();
