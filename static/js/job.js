/* The page of one job, live: its parts are fetched anew when its state moves, figures and charts follow each reading. */
import { GpuCharts } from "./charts.js";
import { gigabytes, percent, tick, watts } from "./format.js";
import { connect } from "./live.js";
import { LogCard } from "./log.js";

const page = document.getElementById("job");
const GAP_MS = 400;
const parts = ["job-head", "job-answer", "job-ranks", "job-allocation", "job-events", "stop-said"];
const log = new LogCard(document.getElementById("job-log"));
const charts = startCharts();
let timer = 0, last = 0;

const channel = connect(page.dataset.liveUrl, {
  on: { job: refresh, attempt: refresh, share: refresh, hold: refresh, changed: refresh, log: grown, metrics: readings },
  parts: "[data-live]",
  staleAfterS: ended() ? null : 15,
});

function startCharts() {
  const root = document.getElementById("job-charts");
  if (!root) return null;
  const made = new GpuCharts(root, JSON.parse(document.getElementById("chart-data").textContent));
  root.querySelector("[data-windows]").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of root.querySelectorAll("[data-windows] button")) other.setAttribute("aria-pressed", other === button);
    made.show(button.dataset.window ? Number(button.dataset.window) : null);
  });
  page.addEventListener("pointerover", (event) => made.highlight(event.target.closest("tr[data-gpu]")?.dataset.gpu ?? null));
  return made;
}

function ended() {
  return document.getElementById("job-head").dataset.ended === "1";
}

function refresh() {
  if (!timer) timer = setTimeout(fetchParts, Math.max(0, last + GAP_MS - Date.now()));
}

async function fetchParts() {
  timer = 0;
  last = Date.now();
  const answer = await fetch(page.dataset.partUrl).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const holder = document.createElement("template");
  holder.innerHTML = await answer.text();
  const attempt = document.getElementById("job-head").dataset.attempt;
  for (const id of parts) {
    const fresh = holder.content.getElementById(id), old = document.getElementById(id);
    if (fresh && old && !old.contains(document.activeElement)) old.replaceWith(fresh);
  }
  tick(page);
  // Another attempt has other GPUs and other logs: the page begins anew.
  if (document.getElementById("job-head").dataset.attempt !== attempt) beginAnew();
  else if (ended()) finish();
}

function beginAnew() {
  const dialog = document.getElementById("stop-dialog");
  if (dialog.open) dialog.addEventListener("close", () => location.reload(), { once: true });
  else location.reload();
}

function finish() {
  log.jobEnded();
  channel.staleAfterS = null;
  document.getElementById("stop-dialog")?.close();
}

function grown(news) {
  const field = page.querySelector(`[data-log-bytes="${CSS.escape(news.stream ?? "")}"]`);
  if (field && news.size !== undefined) field.textContent = spoken(news.size);
  const row = page.querySelector(`tr[data-rank="${CSS.escape((news.stream ?? "").replace("rank-", ""))}"]`);
  const said = row?.querySelector("[data-last-output]");
  if (said) said.replaceChildren(justNow());
  log.pull();
}

/* A time that the page's clock counts up from here. */
function justNow() {
  const time = document.createElement("time");
  time.dateTime = time.dataset.ago = new Date().toISOString();
  time.textContent = "0 s ago";
  return time;
}

/* {at, gpus: {uuid: {utilization_percent, memory_used_bytes, power_mw}}} */
function readings(news) {
  if (ended()) return;
  for (const [uuid, reading] of Object.entries(news.gpus ?? {})) {
    charts?.append(uuid, reading.at ?? news.at, reading);
    for (const row of page.querySelectorAll(`tr[data-gpu="${CSS.escape(uuid)}"]`)) showReading(row, reading);
  }
}

const SPOKEN = {
  utilization_percent: percent,
  memory_used_bytes: (value) => `${gigabytes(value)} GB`,
  power_mw: (value) => `${watts(value)} W`,
};

function showReading(row, reading) {
  for (const [key, say] of Object.entries(SPOKEN)) {
    const value = reading[key], field = row.querySelector(`[data-metric="${key}"]`), bar = row.querySelector(`[data-bar="${key}"]`);
    if (!field || value === undefined) continue;
    if (value === null) field.replaceChildren(unknown(reading.missing?.[key]));
    else field.textContent = say(value);
    const most = Number(bar?.dataset.max || 0);
    if (bar) bar.style.setProperty("--v", value !== null && most ? Math.min(100, (value / most) * 100).toFixed(1) : 0);
  }
}

function unknown(reason) {
  const mark = document.createElement("span");
  mark.className = "na";
  mark.textContent = "n/a";
  mark.title = (reason ?? "no reading").replaceAll("_", " ");
  return mark;
}

function spoken(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
