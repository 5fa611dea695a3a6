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
