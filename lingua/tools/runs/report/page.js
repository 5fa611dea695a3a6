// The page: unpack the content, then legend, switches, charts, tables and samples. Whatever a run
// has written is inserted as text.
"use strict";

const MAX_OPEN_COMPARISONS = 5, MAX_OPEN_ROWS = 200, MAX_UNWRAPPED = 40;

const find = id => document.getElementById(id);

async function unpack() {
  const packed = Uint8Array.from(atob(find("payload").textContent), c => c.charCodeAt(0));
  find("payload").remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const content = await new Response(stream).json();
  const arrays = content.arrays.map(text => JSON.parse(text));
  for (const {lines} of content.charts)
    for (const line of lines) {
      line.x = line.x.map(i => arrays[i].includes(null) ? null : arrays[i]);
      line.raw = arrays[line.raw];
    }
  delete content.arrays;
  return content;
}

function section(title, ...children) {
  const made = element("section", undefined, {"data-place": title});
  made.append(element("h2", title), ...children);
  find("rest").append(made);
}

const collator = new Intl.Collator("en", {numeric: true});

// What a cell is sorted by: [kind, number or text]; a cell without a value is behind all others.
function sortKey(cell) {
  const number = /^[+-]?[\d,]*\.?\d+(e[+-]?\d+)?(?=$|[ %])/i.exec(cell);
  return number ? [0, Number(number[0].replaceAll(",", ""))] : cell === "" || cell === "?" ? [2, ""] : [1, cell];
}

// A part that the reader opens and closes.
function folded(keep, title, ...children) {
  const made = element("details", undefined, {"data-keep": keep});
  made.append(element("summary", title), ...children);
  return made;
}

// A table that a click on a column's title sorts, and another click reverses; a long one is closed.
function table([header, ...rows], title) {
  const made = element("table", undefined, {"aria-label": title}), wide = element("div", undefined, {class: "wide"}), body = element("tbody");
  const turns = {}; // rows of a name: later ones are below it
  const lines = rows.map(cells => {
    const turn = turns[cells[0]] = (turns[cells[0]] ?? 0) + 1, line = element("tr", undefined, {"data-place": `${title} ${cells[0]} ${turn}`});
    line.append(...cells.map(cell => element("td", cell, cell.length > MAX_UNWRAPPED ? {class: "long"} : {})));
    return [cells, line];
  });
  const sort = (column, descending) => {
    const way = descending ? -1 : 1;
    const compare = ([a], [b]) => {
      const [[kind, x], [other, y]] = [sortKey(a[column]), sortKey(b[column])];
      return kind - other || way * (kind ? collator.compare(x, y) : x - y);
    };
    body.append(...[...lines].sort(compare).map(([, line]) => line));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : descending ? "descending" : "ascending"));
    wide.dataset.sorted = JSON.stringify([column, descending]);
  };
  const heads = header.map((name, column) => {
    const head = element("th", undefined, {"aria-sort": "none"}), button = element("button", name);
    button.onclick = () => sort(column, head.getAttribute("aria-sort") === "ascending");
    head.append(button);
    return head;
  });
  const first = element("tr"), top = element("thead");
  first.append(...heads);
  top.append(first);
  body.append(...lines.map(([, line]) => line));
  made.append(top, body);
  wide.append(made);
  wide.dataset.table = title;
  wide.sort = sort;
  return rows.length <= MAX_OPEN_ROWS ? wide : folded(`rows of ${title}`, `${rows.length.toLocaleString("en")} rows`, wide);
}

function showHeader(content) {
  document.title = find("title").textContent = content.title;
  find("made").textContent = `lingua ${content.version}, ${content.made}`;
  if (content.refresh_s) find("made").textContent += `; this page is loaded again every ${content.refresh_s} s`;
  const problems = content.problems.length > 20 ? [...content.problems.slice(0, 20), `... and ${content.problems.length - 20} more`] : content.problems;
  find("notes").append(...[...content.notes, ...problems].map(text => element("li", text)));
}

// Each arm against one: its interval as a picture, all on one scale with zero in it, and in words.
// The first few stay open, in the order of the arms.
function showVerdict({heading = [], rows = []}) {
  if (heading.length === 0) return;
  const [first, ...more] = heading, made = find("verdict");
  made.append(element("h2", "Verdict"), element("p", first), ...more.map(text => element("p", text, {class: "key"})));
  const ends = rows.flatMap(row => row.interval ? row.interval.slice(1) : []);
  const low = Math.min(0, ...ends), high = Math.max(0, ...ends), width = 220;
  const at = value => 8 + (width - 16) * (value - low) / (high - low);
  const n = MAX_OPEN_COMPARISONS, closed = folded("comparisons", `${rows.length - n} more comparisons`);
  for (const [i, {text, notes, interval}] of rows.entries()) {
    const row = element("div", undefined, {class: "comparison"}), words = element("div"), svg = drawn("svg", {width: interval ? width : 0, height: 24, role: interval ? "img" : "none"});
    if (interval) {
      const [mean, from, to] = interval.map(at);
      svg.append(drawn("line", {x1: at(0), x2: at(0), y1: 0, y2: 24, class: "zero"}),
                 drawn("line", {x1: from, x2: to, y1: 12, y2: 12, class: "interval"}),
                 drawn("circle", {cx: mean, cy: 12, r: 4, class: "mean"}), drawn("title", {}));
      svg.lastChild.textContent = `difference ${exact(interval[0])}, interval ${exact(interval[1])} to ${exact(interval[2])}; the line is no difference`;
    }
    words.append(element("p", text), ...notes.map(note => element("p", note, {class: "key"})));
    row.append(svg, words);
    (i < n ? made : closed).append(row);
  }
  if (rows.length > n) made.append(closed);
  if (ends.length) made.append(element("p", "Bars are intervals of the difference, left of the line is better.", {class: "key"}));
}

// An arm that the search does not match is dimmed, in the legend and in the charts; none is hidden.
function showLegend(charts) {
  const follow = () => charts.forEach(chart => chart.follow());
  let matches = null; // of the search
  const light = lit => { state.lit = lit; charts.forEach(chart => chart.u?.redraw(false)); };
  const entries = state.arms.map(({name, runs}, arm) => {
    const label = element("label"), box = element("input", undefined, {type: "checkbox", "data-keep": `arm of ${state.names[runs[0]]}`});
    box.checked = true;
    box.onchange = () => {
      box.checked ? state.hidden.delete(arm) : state.hidden.add(arm);
      if (!box.checked) state.lit = matches; // no longer that which the pointer is at
      follow();
    };
    label.onmouseenter = () => light(state.hidden.has(arm) ? matches : new Set([arm]));
    label.onmouseleave = () => light(matches);
    label.append(box, swatch(arm), element("span", name));
    label.title = runs.map(run => state.names[run]).join("\n");
    find("legend").append(label);
    return {label, box, text: `${name}\n${label.title}`.toLowerCase()};
  });
  const search = find("search");
  search.oninput = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const having = entries.map(({text}) => words.every(word => text.includes(word)));
    matches = words.length ? new Set(having.flatMap((has, arm) => has ? [arm] : [])) : null;
    entries.forEach(({label}, arm) => label.classList.toggle("other", words.length > 0 && !having[arm]));
    find("matches").textContent = matches ? `${matches.size} of ${entries.length}` : "";
    find("only").disabled = !matches?.size;
    light(matches);
  };
  const show = chosen => () => {
    entries.forEach(({box}, arm) => { box.checked = chosen(arm); box.checked ? state.hidden.delete(arm) : state.hidden.add(arm); });
    follow();
  };
  find("all").onclick = show(() => true);
  find("none").onclick = show(() => false);
  find("only").onclick = show(arm => matches.has(arm));
  for (const name of ["raw", "marks", "seeds", "outliers"])
    find(name).onchange = () => { state[name] = find(name).checked; charts.forEach(chart => chart.draw()); };
  find("smoothing").onchange = () => { chooseSmoothing(); charts.forEach(chart => chart.draw()); };
  find("axis").onchange = () => {
    state.axis = Number(find("axis").value);
    state.zoom = null;
    charts.forEach(chart => chart.draw());
  };
  find("seeds").parentElement.hidden = !state.arms.some(({runs}) => runs.length > 1);
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
    const choice = element("select", undefined, {"aria-label": group, "data-keep": group});
    choice.append(...chart.choices.map(({title}) => element("option", title, {value: title})));
    choice.onchange = () => Object.assign(chart, chart.choices.find(({title}) => title === choice.value)).draw();
    chart.heading.textContent = `${group}: `;
    chart.heading.append(choice);
  }
  return charts;
}

function showKey(content) {
  const marks = [["resume", "resumed"], ["stop", "stopped"], ["topology", "another mesh"], ["skipped", "skipped steps"]];
  const used = marks.filter(([kind]) => content.marks.some(mark => mark.kind === kind)).map(([kind, text]) => `${MARKS[kind]} ${text}`);
  find("key").textContent = [
    "Faint lines are what was logged; gaps are numbers that are not finite.",
    state.arms.some(({runs}) => runs.length > 1) ? "A line of several seeds is their mean, its band is from the lowest to the highest; where one has no number, each is drawn by itself." : "",
    "An outlier is further from the middle 96 % of the numbers than twice their range.",
    used.length ? `Marks: ${used.join(", ")}.` : "",
    content.missing.length ? `No run has logged: ${content.missing.join(", ")}.` : "",
    "Drag to zoom, double-click for all.",
  ].join(" ");
}

function showSamples(content) {
  const having = content.names.map((_, run) => run).filter(run => content.samples[run].length);
  if (having.length === 0) return;
  const choice = element("select", undefined, {"aria-label": "run", "data-keep": "samples"}), place = element("div");
  choice.append(...having.map(run => element("option", content.names[run], {value: content.names[run]})));
  choice.onchange = () => place.replaceChildren(...content.samples[content.names.indexOf(choice.value)].map(({source, prompt, texts}, i) => {
    const body = element("div", undefined, {class: "sample"}), title = `held-out text of ${source}, and how the model continues it`;
    for (const [step, text] of texts) body.append(element("b", `step ${step.toLocaleString("en")}`), element("pre", text));
    const made = folded(`sample ${i} of ${choice.value}`, title, element("pre", prompt, {class: "prompt"}), body);
    made.open = true;
    return made;
  }));
  choice.onchange();
  section("Samples", choice, place);
}

function showCode(content) {
  if (content.code.length === 0) return;
  const rows = content.code.map(({commit, changes, runs}) => [commit, changes ? `${changes.toLocaleString("en")} lines of uncommitted differences` : "", runs.join(", ")]);
  const parts = content.code.filter(({difference}) => difference).map(({commit, runs, difference}) =>
    folded(`code of ${runs[0]}`, `how ${commit.slice(0, 12)} of ${runs[0]} differs from the first`, element("pre", difference)));
  section("Code", table([["commit", "changes", "runs"], ...rows], "Code"), ...parts);
}

function showTables(content) {
  const show = (title, rows) => { if (rows.length) section(title, table(rows, title)); };
  for (const [title, rows] of content.studies ?? []) show(title, rows);
  show("Runs", content.overview);
  show("What differs in their configs", content.configs);
  show("Benchmarks, newest scores", content.scores);
  const marks = content.marks.map(mark => [content.names[mark.run], mark.x[0].toLocaleString("en"), mark.text]);
  show("Stops, resumes and skipped steps", marks.length ? [["run", "step", "what"], ...marks] : []);
  show("Machines and versions, at every start", content.machines);
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

// A page that is written again and again is loaded again and again; what the reader has chosen and
// opened, and what stands at the top of the window, stays. Without storage it starts anew.
function refresh(seconds) {
  const key = `lingua ${location.pathname}`, all = selector => [...document.querySelectorAll(selector)];
  const top = element => element.getBoundingClientRect().top, placeOf = ({dataset}) => dataset.place ?? dataset.keep;
  const property = control => control.matches("details") ? "open" : control.type === "checkbox" ? "checked" : "value";
  const places = () => all("[data-place], details").filter(element => element.checkVisibility());
  const remember = () => {
    const values = Object.fromEntries(all("[data-keep]").map(c => [c.dataset.keep, c[property(c)]]));
    const tables = Object.fromEntries(all("[data-table]").map(t => [t.dataset.table, [t.dataset.sorted, t.scrollLeft]]));
    const nearest = places().reduce((a, b) => Math.abs(top(b)) < Math.abs(top(a)) ? b : a);
    const focus = document.activeElement.closest("[data-keep]")?.dataset.keep;
    sessionStorage.setItem(key, JSON.stringify({values, tables, zoom: state.zoom, place: placeOf(nearest), top: top(nearest), focus}));
  };
  const {values = {}, tables = {}, zoom = null, ...was} = JSON.parse(sessionStorage.getItem(key) ?? "{}");
  for (const kind of ["select", "input", "details"]) // what a choice shows is opened or closed after it
    for (const control of all(`${kind}[data-keep]`)) {
      const value = values[control.dataset.keep], name = property(control), before = control[name];
      if (value === undefined || value === before) continue;
      control[name] = value;
      if (control[name] !== value) control[name] = before; // it is no longer a choice
      else control.dispatchEvent(new Event(control.type === "search" ? "input" : "change"));
    }
  for (const each of all("[data-table]")) {
    const [sorted, left] = tables[each.dataset.table] ?? [];
    if (sorted) each.sort(...JSON.parse(sorted));
    each.scrollLeft = left ?? 0;
  }
  state.zoom = zoom; // after the axis, which forgets it
  history.scrollRestoration = "manual";
  addEventListener("pagehide", remember);
  setInterval(() => { if (!document.hidden && !document.querySelector(".chart:hover")) location.reload(); }, 1000 * seconds);
  return () => {
    const focused = all("[data-keep]").find(control => control.dataset.keep === was.focus);
    (focused?.querySelector("summary") ?? focused)?.focus({preventScroll: true});
    const there = places().find(element => placeOf(element) === was.place);
    if (there) scrollBy(0, top(there) - was.top);
  };
}

async function main() {
  const content = await unpack();
  Object.assign(state, {names: content.names, longest: content.longest, arms: content.arms});
  content.arms.forEach(({runs}, arm) => runs.forEach(run => { state.armOf[run] = arm; }));
  chooseSmoothing();
  showHeader(content);
  showVerdict(content.verdict);
  const charts = state.charts = makeCharts(content);
  showLegend(charts);
  showKey(content);
  showTables(content);
  const scroll = content.refresh_s ? refresh(content.refresh_s) : () => {};
  state.ready = true;
  charts.forEach(chart => chart.draw());
  await null; // charts have their heights in a microtask
  scroll();
  followPage(charts);
  document.documentElement.dataset.ready = "true";
}

main();
