/* The list of jobs, live: rows change in place, never under the pointer; new rows wait behind a button. */
import { connect } from "./live.js";
import { tick } from "./format.js";

const GAP_MS = 1000;
const POINTER_REST_MS = 2000;
const rows = () => document.getElementById("job-rows");
const fresh = document.getElementById("fresh");
let timer = 0, last = 0, movedAt = 0;

document.querySelector("#who").addEventListener("change", (event) => event.target.form.requestSubmit());
rows().addEventListener("pointermove", () => { movedAt = Date.now(); });
fresh.addEventListener("click", () => location.reload());
connect("/live/cluster/", { on: { job: changed, hold: changed, changed, cell: () => {} }, parts: "[data-live]" });

function changed() {
  if (!timer) timer = setTimeout(refresh, Math.max(0, last + GAP_MS - Date.now()));
}

async function refresh() {
  timer = 0;
  last = Date.now();
  const url = new URL(location.href);
  url.searchParams.set("part", "rows");
  const answer = await fetch(url).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const holder = document.createElement("template");
  holder.innerHTML = await answer.text();
  patch(holder.content);
}

function patch(content) {
  let held = false, unseen = 0;
  for (const row of content.querySelectorAll("tr[id]")) {
    const old = document.getElementById(row.id);
    if (!old) unseen += 1;
    else if (!sameText(old, row)) {
      if (resting(old)) held = true;
      else old.replaceWith(row);
    }
  }
  tick(rows());
  if (unseen && !rows().querySelector("tr[id]")) location.reload();
  announce(unseen);
  if (held) timer ||= setTimeout(refresh, POINTER_REST_MS);
}

/* Counting times differ all the time; they tick by themselves. */
function sameText(a, b) {
  const plain = (row) => row.innerHTML.replace(/(<time[^>]*>)[^<]*(<\/time>)/g, "$1$2");
  return plain(a) === plain(b);
}

function resting(row) {
  return row.contains(document.activeElement) || (row.matches(":hover") && Date.now() - movedAt < POINTER_REST_MS);
}

function announce(count) {
  fresh.hidden = count === 0;
  const label = fresh.querySelector("span");
  label.textContent = count === 1 ? label.dataset.one : label.dataset.many.replace("%s", count);
}
