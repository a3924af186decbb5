/* The page of one node: meters and charts move each second, the rest comes anew when something changed. */
import { GpuCharts } from "./charts.js";
import { gigabytes, percent, watts } from "./format.js";
import { connect, partsRefresher, takeOver } from "./live.js";
import { MigPlanner } from "./mig.js";

const page = document.getElementById("node");
const data = document.getElementById("chart-data");
const charts = data ? new GpuCharts(document.getElementById("charts"), JSON.parse(data.textContent)) : null;
const migCard = document.getElementById("mig");
const planner = migCard ? new MigPlanner(migCard) : null;
const PROCESSES_EVERY_MS = 10_000; // they come with the readings, not with an event
const LIVE_WINDOW_S = 900;
const refresh = partsRefresher(page.dataset.url, { cards: takeCards, mig: (fresh) => planner?.take(fresh) });
let was = "live", window_s = LIVE_WINDOW_S;

charts?.show(LIVE_WINDOW_S);
connect(page.dataset.stream, {
  on: { cell: moved, job: refresh, node: refresh, gpu: refresh, health: refresh, order: refresh, changed: refresh },
  staleAfterS: Number(page.dataset.gpus) ? 15 : null,
  freshOn: ["cell"],
  parts: "[data-live]",
  onState: (state) => { if (state === "live" && was !== "live") refresh(); was = state; },
});
setInterval(refresh, PROCESSES_EVERY_MS);

/* Folds that a person opened stay open. */
function takeCards(fresh) {
  for (const fold of page.querySelectorAll("details.gmore[open]")) {
    const again = fresh.querySelector(`#${CSS.escape(fold.id)}`);
    if (again) again.open = true;
  }
  takeOver(fresh);
}

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
  if (window_s === LIVE_WINDOW_S) charts?.append(gpu, at, { utilization_percent: use, memory_used_bytes: memory, power_mw: power });
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

/* ── windows of the history: the last quarter of an hour moves by itself, the longer ones are fetched ── */
pressed("[data-windows]", async (value) => {
  window_s = Number(value);
  const answer = await fetch(`${page.dataset.chartsUrl}&window=${value}`, { credentials: "same-origin" }).catch(() => null);
  if (!answer?.ok || answer.redirected || window_s !== Number(value)) return;
  charts.load(await answer.json(), window_s);
});
pressed("[data-health-shows]", (value) => { document.getElementById("health").dataset.show = value; });

function pressed(selector, choose) {
  document.querySelector(selector)?.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const one of event.currentTarget.children) one.setAttribute("aria-pressed", String(one === button));
    choose(button.value);
  });
}

/* ── one dialog for everything an administrator does: it names what happens and asks once ── */
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  const dialog = document.getElementById("act-dialog");
  if (!button || !dialog) return;
  const { act, title, text, label, field, fieldLabel, hiddenGpu, hiddenWanted, hiddenPid } = button.dataset;
  const form = dialog.querySelector("form"), box = dialog.querySelector("[data-act-field]"), input = box.querySelector("input");
  form.action = act;
  dialog.querySelector("[data-act-title]").textContent = title;
  dialog.querySelector("[data-act-text]").textContent = text;
  dialog.querySelector("[data-act-submit]").textContent = label;
  box.hidden = !field;
  input.name = field ?? "";
  input.value = "";
  box.querySelector("label").textContent = fieldLabel ?? "";
  for (const old of form.querySelectorAll("[data-extra]")) old.remove();
  for (const [name, value] of [["gpu", hiddenGpu], ["wanted", hiddenWanted], ["pid", hiddenPid]]) {
    if (value !== undefined) form.append(hidden(name, value));
  }
  dialog.showModal();
});

function hidden(name, value) {
  const input = document.createElement("input");
  Object.assign(input, { type: "hidden", name, value });
  input.dataset.extra = "";
  return input;
}
