/* Live data: one EventSource wrapper with three states, the marker in the header, and fragments that fetch themselves anew.

   const channel = connect("/live/cluster/", {
     on: { cell: (data, id) => … },  // by event name; data is parsed JSON (the raw string if it is not JSON)
     staleAfterS: 15,                // no event for so long: "stale". null for a stream that may be silent (a log)
     freshOn: ["cell"],              // only these events count as data; every one does if this is left out
     parts: "[data-live]",           // these elements get data-live-state, and their .gy-age says "34 s old" when stale
     onState: (state, ageS) => …,    // "live" | "reconnecting" | "stale" | "ended"
   });
   channel.state; channel.close();
   The address may be a function of the last event id, for streams that resume: connect((id) => `/live/…?offset=${id ?? 0}`, …).

   The server's own events: `ended` (nothing more will come: closed, not stale), `revoked` (no access any more: closed),
   `lagged` (too slow: opened again), `ping` (proves the connection; counts as contact, not as data).

   A page in the background gives its streams back after 10 s (a browser opens only six connections to one server) and
   takes them up again when it is looked at.

   const refresh = refresher(element, url, { minGapMs: 2000 });  // call refresh() as often as you like
   Fetches `url` into `element` by htmx, at most once per gap, never while the pointer rests in it or the keyboard is inside.
   const refresh = partsRefresher("/?part=live", { grid: (fresh) => … });
   One fetch whose answer holds several <div data-part="NAME">: each replaces the content of the page's element of that name
   if it differs (not while the keyboard is inside), or is handed to the function given for it.
   refresher, declaratively: <div data-live-fetch="/jobs/?part=rows" data-live-on="job waiting">; bind(channel) wires them. */

import { tick } from "./format.js";

const HIDDEN_GRACE_MS = 10_000;
const POINTER_REST_MS = 2_000;
const channels = new Set();

export function connect(address, { on = {}, staleAfterS = 15, freshOn = null, parts = null, onState = () => {} } = {}) {
  const channel = {
    state: "reconnecting", since: Date.now(), heardAt: Date.now(), dataAt: Date.now(), lastId: null,
    source: null, retryMs: 1000, timer: 0, ended: false, staleAfterS, freshOn, parts, onState,
    close() { stop(channel); channels.delete(channel); showMarker(); },
  };
  channel.open = () => open(channel, address, on);
  channels.add(channel);
  channel.open();
  paint(channel);
  return channel;
}

function open(channel, address, on) {
  stop(channel);
  if (channel.ended) return;
  const source = new EventSource(typeof address === "function" ? address(channel.lastId) : address);
  channel.source = source;
  source.onopen = () => { channel.retryMs = 1000; heard(channel); };
  source.onerror = () => lost(channel);
  source.onmessage = (event) => received(channel, event, on.message);
  for (const [name, handler] of Object.entries(on)) {
    if (name !== "message") source.addEventListener(name, (event) => received(channel, event, handler));
  }
  source.addEventListener("ping", () => heard(channel));
  source.addEventListener("lagged", () => lost(channel, true));
  source.addEventListener("ended", () => end(channel));
  source.addEventListener("revoked", () => end(channel));
}

function received(channel, event, handler) {
  if (event.lastEventId) channel.lastId = event.lastEventId;
  if (!channel.freshOn || channel.freshOn.includes(event.type)) channel.dataAt = Date.now();
  heard(channel);
  if (handler) handler(parsed(event.data), event.lastEventId, event);
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return text; }
}

function heard(channel) {
  channel.heardAt = Date.now();
  setState(channel, staleAge(channel) === null ? "live" : "stale");
}

/* EventSource retries by itself after a broken connection, but gives up for good after an answer such as 503 or 429. */
function lost(channel, always = false) {
  if (channel.ended) return;
  setState(channel, staleAge(channel) === null ? "reconnecting" : "stale");
  if (!always && channel.source && channel.source.readyState !== EventSource.CLOSED) return;
  stop(channel);
  channel.timer = setTimeout(channel.open, channel.retryMs + Math.random() * 500);
  channel.retryMs = Math.min(channel.retryMs * 2, 15_000);
}

function end(channel) {
  channel.ended = true;
  stop(channel);
  setState(channel, "ended");
}

function stop(channel) {
  clearTimeout(channel.timer);
  if (channel.source) channel.source.close();
  channel.source = null;
}

/* Seconds since the last data if that is too long ago, else null. */
function staleAge(channel) {
  if (channel.staleAfterS === null || channel.ended) return null;
  const ageS = (Date.now() - channel.dataAt) / 1000;
  return ageS > channel.staleAfterS ? ageS : null;
}

function setState(channel, state) {
  if (channel.state !== state) { channel.state = state; channel.since = Date.now(); }
  paint(channel);
}

function paint(channel) {
  const ageS = (Date.now() - channel.dataAt) / 1000;
  channel.onState(channel.state, ageS);
  if (channel.parts) for (const part of document.querySelectorAll(channel.parts)) {
    part.dataset.liveState = channel.state;
    const age = part.querySelector(".gy-age");
    if (age) age.textContent = channel.state === "stale" ? age.dataset.old.replace("%s", spoken(ageS)) : "";
  }
  showMarker();
}

/* ── the marker in the header: the worst of all streams of the page ── */
function showMarker() {
  const marker = document.getElementById("gy-live");
  if (!marker) return;
  if (!channels.size) { marker.dataset.s = "off"; return; }
  const open = [...channels].filter((channel) => !channel.ended);
  const stale = open.filter((channel) => channel.state === "stale");
  const state = stale.length ? "stale" : open.some((channel) => channel.state === "reconnecting") ? "re" : "live";
  const oldest = Math.max(0, ...stale.map((channel) => Date.now() - channel.dataAt));
  const word = state === "stale" ? `${marker.dataset.stale} ${spoken(oldest / 1000)}` : marker.dataset[state];
  if (marker.dataset.s !== state) marker.dataset.s = state;
  const label = marker.querySelector("span");
  if (label.textContent !== word) label.textContent = word;
}

function spoken(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

setInterval(() => {
  for (const channel of channels) {
    if (channel.ended) continue;
    if (staleAge(channel) !== null) setState(channel, "stale");
  }
}, 1000);

/* ── a page nobody looks at gives its connections back ── */
let hiddenTimer = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(() => channels.forEach(stop), HIDDEN_GRACE_MS);
  else for (const channel of channels) if (!channel.source && !channel.ended) channel.open();
});

/* ── fragments ── */
export function refresher(element, url, { minGapMs = 2000, swap = "innerHTML" } = {}) {
  let last = 0, timer = 0, running = false, movedAt = 0;
  element.addEventListener("pointermove", () => { movedAt = Date.now(); });
  const wait = () => {
    const busy = element.contains(document.activeElement) && document.activeElement !== document.body;
    const rest = element.matches(":hover") ? movedAt + POINTER_REST_MS - Date.now() : 0;
    return Math.max(last + minGapMs - Date.now(), rest, busy ? 1000 : 0, running ? 200 : 0);
  };
  const run = () => {
    timer = 0;
    const ms = wait();
    if (ms > 0) { timer = setTimeout(run, ms); return; }
    if (!element.isConnected || document.hidden) return;
    last = Date.now();
    running = true;
    window.htmx.ajax("GET", typeof url === "function" ? url() : url, { target: element, swap })
      .catch(() => {}).finally(() => { running = false; });
  };
  return () => { if (!timer) timer = setTimeout(run, Math.max(0, wait())); };
}

/* Wires every [data-live-fetch] of the page: -> a function(kind) to be called with each kind of change. */
export function bind(root = document) {
  const watched = [...root.querySelectorAll("[data-live-fetch]")].map((element) => ({
    kinds: (element.dataset.liveOn || "").split(/\s+/).filter(Boolean),
    refresh: refresher(element, element.dataset.liveFetch, { minGapMs: Number(element.dataset.liveGap || 2000) }),
  }));
  return (kind) => { for (const { kinds, refresh } of watched) if (!kinds.length || kinds.includes(kind)) refresh(); };
}

export function partsRefresher(url, patchers = {}, done = () => {}, minGapMs = 2000) {
  let last = 0, timer = 0;
  const run = async () => {
    timer = 0;
    if (document.hidden) return;
    last = Date.now();
    let html;
    try {
      const answer = await fetch(url, { headers: { "HX-Request": "true" }, credentials: "same-origin" });
      if (!answer.ok || answer.redirected) return;
      html = await answer.text();
    } catch {
      return; // the stream says that the connection is away, and asks again when it is back
    }
    const made = document.createElement("template");
    made.innerHTML = html;
    for (const fresh of made.content.querySelectorAll("[data-part]")) patchPart(fresh, patchers[fresh.dataset.part]);
    done();
  };
  return () => { if (!timer) timer = setTimeout(run, Math.max(50, last + minGapMs - Date.now())); };
}

function patchPart(fresh, patcher) {
  const old = document.querySelector(`[data-part="${fresh.dataset.part}"]`);
  if (!old) return;
  if (patcher) patcher(fresh);
  else exchange(old, fresh);
}

/* For a patcher that only has something to put right in the fresh part before it is taken. */
export function takeOver(fresh) {
  const old = document.querySelector(`[data-part="${fresh.dataset.part}"]`);
  if (old) exchange(old, fresh);
}

function exchange(old, fresh) {
  if (old.innerHTML === fresh.innerHTML || old.contains(document.activeElement)) return;
  old.replaceChildren(...fresh.childNodes);
  tick(old);
}
