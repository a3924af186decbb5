/* The page of one node: meters and charts move each second, the rest comes anew when something changed. */
import { GpuCharts } from "./charts.js";
import { gigabytes, percent, watts } from "./format.js";
import { connect, partsRefresher } from "./live.js";

const page = document.getElementById("node");
const data = document.getElementById("chart-data");
const charts = data ? new GpuCharts(document.getElementById("charts"), JSON.parse(data.textContent)) : null;
const PROCESSES_EVERY_MS = 10_000; // they come with the readings, not with an event
const refresh = partsRefresher(page.dataset.url);
let was = "live";

charts?.show(900);
connect(page.dataset.stream, {
  on: { cell: moved, job: refresh, node: refresh, gpu: refresh, changed: refresh },
  staleAfterS: Number(page.dataset.gpus) ? 15 : null,
  freshOn: ["cell"],
  parts: "[data-live]",
  onState: (state) => { if (state === "live" && was !== "live") refresh(); was = state; },
});
setInterval(refresh, PROCESSES_EVERY_MS);

function moved({ at, gpus }) {
  for (const card of document.querySelectorAll("[data-gpu]")) {
    const values = gpus[card.dataset.gpu];
    if (values) show(card, at, values);
  }
}

function show(card, at, [use, memory, power, temperature]) {
  const { gpu, total, limit } = card.dataset;
  meter(card, "utilization_percent", use, 100, percent(use));
  meter(card, "memory_used_bytes", memory, total, `${gigabytes(memory)} / ${total ? gigabytes(total) : "n/a"} GB`);
  meter(card, "power_mw", power, limit, `${watts(power)} / ${limit ? watts(limit) : "n/a"} W`);
  meter(card, "temperature_c", temperature, 100, `${Math.round(temperature ?? 0)} °C`);
  charts?.append(gpu, at, { utilization_percent: use, memory_used_bytes: memory, power_mw: power });
}

function meter(card, name, value, whole, text) {
  const row = card.querySelector(`[data-meter=${name}]`);
  if (!row) return;
  const [, bar, shown] = row.children;
  bar.classList.toggle("unknown", value === null);
  bar.style.setProperty("--v", value === null || !whole ? 0 : Math.min(100, (value / whole) * 100).toFixed(1));
  if (value !== null && shown.textContent !== text) shown.textContent = text;
  else if (value === null && !shown.querySelector(".na")) shown.innerHTML = '<span class="na">n/a</span>';
}
