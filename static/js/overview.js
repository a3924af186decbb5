/* The overview: one stream moves the cells each second; when something changed, one fetch brings every part anew. */
import { Grid, spark } from "./grid.js";
import { connect, partsRefresher } from "./live.js";

const page = document.getElementById("overview");
const grid = new Grid(document.querySelector("[data-grid]"), JSON.parse(document.getElementById("grid-words").textContent));
const SPARK_POINTS = 60;
let was = "live";
const POINT_MS = 30_000;
const curves = new Map(); // job id -> the mean use of its GPUs over the last half hour

const refresh = partsRefresher(page.dataset.url, { grid: (fresh) => grid.patch(fresh) }, drawSparks);
connect(page.dataset.stream, {
  on: { cell: moved, job: refresh, node: refresh, gpu: refresh, hold: refresh, changed: refresh },
  staleAfterS: grid.cells.length ? 15 : null,
  freshOn: ["cell"],
  parts: "[data-live]",
  onState: noteReconnect,
});

loadHistory();

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

/* A point of the curve is half a minute: the newest one is the mean of what came since the last. */
function remember(id, mean) {
  const curve = curves.get(id) || { points: [], sum: 0, count: 0, since: Date.now() };
  curve.sum += mean;
  curve.count += 1;
  if (Date.now() - curve.since > POINT_MS) {
    curve.points = [...curve.points, curve.sum / curve.count].slice(1 - SPARK_POINTS);
    Object.assign(curve, { sum: 0, count: 0, since: Date.now() });
  }
  curves.set(id, curve);
}

async function loadHistory() {
  try {
    const answer = await fetch(page.dataset.history, { credentials: "same-origin" });
    if (!answer.ok || answer.redirected) return;
    for (const [id, points] of Object.entries(await answer.json())) {
      curves.set(id, { points: points.slice(1 - SPARK_POINTS), sum: 0, count: 0, since: Date.now() });
    }
    drawSparks();
  } catch { /* the curve begins now instead */ }
}

function drawSparks() {
  for (const box of document.querySelectorAll("[data-spark]")) {
    const curve = curves.get(box.dataset.spark);
    if (!curve) continue;
    const points = [...curve.points, ...(curve.count ? [curve.sum / curve.count] : [])];
    if (points.length < 2) continue;
    box.replaceChildren(spark([...Array(Math.max(0, SPARK_POINTS - points.length)).fill(null), ...points], box.clientWidth || 92));
  }
}

/* After a break nobody knows what was missed. */
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
