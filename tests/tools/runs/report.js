// What tests/tools/runs/test_report.py asks of a page. Selectors are of a chart.
window.ask = {
  // Where the pointer is, and of each line its name, its number and, where it differs, its own place.
  tip(chart) {
    const tip = document.querySelector(`${chart} .tip`);
    const rows = [...tip.querySelectorAll("tr")];
    return [
      tip.querySelector("strong").innerText,
      rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim())),
    ];
  },
  // Where the vertical line of a chart is, and the first point.
  crosshair(chart) {
    const [line, dot] = ["u-cursor-x", "dot"].map((name) => document.querySelector(`${chart} .${name}`).getBoundingClientRect());
    return [line.left, dot.left + dot.width / 2];
  },
  // The tables that are wider than their place, and the cells with a short text on several lines.
  tables() {
    const broken = [...document.querySelectorAll("td:not(.tip td, :first-child)")].filter((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return cell.innerText.length < 30 && new Set([...range.getClientRects()].map(({ top }) => top)).size > 1;
    });
    const wide = [...document.querySelectorAll(".wide")].filter((place) => place.scrollWidth > place.clientWidth);
    return [wide.map((place) => place.dataset.table), broken.map((cell) => cell.innerText)];
  },
  // Choose something of everything, and look at the row of the run c.
  async use() {
    this.choose("axis", 1);
    document.querySelectorAll("#legend input")[1].click();
    for (const _ of "ab") document.querySelector("[data-table=Runs] th button").click();
    const samples = document.querySelector("[data-keep=samples]");
    samples.selectedIndex = 1;
    samples.onchange();
    document.querySelectorAll("details")[1].open = false;
    document.querySelector("#search").focus();
    await null; // charts are drawn anew
    scrollTo(0, document.body.scrollHeight / 2);
    return this.used();
  },
  used() {
    const top = document.querySelectorAll("#rest tr")[1].getBoundingClientRect().top;
    const chosen = {
      axis: state.axis,
      hidden: [...state.hidden].map((arm) => state.arms[arm].name),
      sorted: document.querySelector("[data-table=Runs] th").ariaSort,
      samples: document.querySelector("[data-keep=samples]").value,
      open: [...document.querySelectorAll("details")].map(({ open }) => open),
      focus: document.activeElement.id,
    };
    return [chosen, top];
  },
  choose(name, value) {
    const select = document.getElementById(name);
    select.value = value;
    select.onchange();
  },
  // How many pixels of a chart have a colour.
  pixels(chart, [r, g, b]) {
    const drawn = document.querySelector(`${chart} canvas`);
    const canvas = new OffscreenCanvas(drawn.width, drawn.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(drawn, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    let n = 0;
    for (let i = 0; i < data.length; i += 4)
      n += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] > 200;
    return n;
  },
};
