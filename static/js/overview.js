/* The overview: one stream moves the cells each second; when something changed, one fetch brings every part anew. */
import { Grid, spark } from "./grid.js";
import { connect, partsRefresher } from "./live.js";

const page = document.getElementById("overview");
const grid = new Grid(document.querySelector("[data-grid]"), JSON.parse(document.getElementById("grid-words").textContent));
const SPARK_POINTS = 60;
const history = new Map(); // job id -> the mean use of its GPUs, one a second, as far as this page has seen it

const refresh = partsRefresher(page.dataset.url, { grid: (fresh) => grid.patch(fresh) }, drawSparks);
connect(page.dataset.stream, {
  on: { cell: moved, job: refresh, node: refresh, gpu: refresh, hold: refresh, changed: refresh },
  staleAfterS: grid.cells.length ? 15 : null,
  parts: "[data-live]",
  onState: noteReconnect,
});

function moved({ gpus }) {
  grid.update(gpus);
  for (const element of document.querySelectorAll("[data-job-use]")) {
    const id = element.dataset.jobUse;
    const uses = grid.cells.filter((cell) => cell.dataset.jobid === id && cell.dataset.utilization !== undefined);
    if (!uses.length) continue;
    const mean = uses.reduce((sum, cell) => sum + Number(cell.dataset.utilization), 0) / uses.length;
    element.textContent = `${Math.round(mean)}%`;
    remember(id, mean);
  }
  drawSparks();
}

function remember(id, mean) {
  const points = history.get(id) || [];
  points.push(mean);
  history.set(id, points.slice(-SPARK_POINTS));
}

function drawSparks() {
  for (const box of document.querySelectorAll("[data-spark]")) {
    const points = history.get(box.dataset.spark.replace("job-", ""));
    if (!points || points.length < 2) continue;
    const gap = Array(SPARK_POINTS - points.length).fill(null);
    box.replaceChildren(spark([...gap, ...points], box.clientWidth || 92));
  }
}

/* After a break nobody knows what was missed. */
let was = "live";
function noteReconnect(state) {
  if (state === "live" && was !== "live") refresh();
  was = state;
}

document.querySelector("[data-cell-shows]")?.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  for (const one of event.currentTarget.children) one.setAttribute("aria-pressed", String(one === button));
  grid.choose(button.value);
});
document.querySelector("[data-grid-filter]")?.addEventListener("input", (event) => {
  grid.filter = event.target.value.trim().toLowerCase();
  grid.apply();
});
document.querySelector("[data-free-only]")?.addEventListener("click", (event) => {
  grid.freeOnly = !grid.freeOnly;
  event.currentTarget.setAttribute("aria-pressed", String(grid.freeOnly));
  grid.apply();
});
