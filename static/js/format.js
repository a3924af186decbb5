/* Numbers as people read them. Unknown is null and reads n/a, never 0. The same words as the filters in templatetags/gy.py. */

export const NA = "n/a";

export function gigabytes(bytes, digits = 1) {
  return bytes == null ? NA : (bytes / 1e9).toFixed(digits);
}

export function percent(value) {
  return value == null ? NA : `${Math.round(value)}%`;
}

export function watts(milliwatts) {
  return milliwatts == null ? NA : `${Math.round(milliwatts / 1000)}`;
}

/* 97 -> "1 m 37 s", 5820 -> "1 h 37 m" */
export function duration(seconds) {
  if (seconds == null) return NA;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} m`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/* <time data-elapsed="ISO"> counts up, <time data-ago="ISO"> says how long ago; both without a request. */
export function tick(root = document) {
  const now = Date.now();
  for (const element of root.querySelectorAll("[data-elapsed]")) {
    set(element, duration((now - Date.parse(element.dataset.elapsed)) / 1000));
  }
  for (const element of root.querySelectorAll("[data-ago]")) {
    const seconds = (now - Date.parse(element.dataset.ago)) / 1000;
    if (seconds < 86_400) set(element, ago(seconds));
  }
}

function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s ago`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3600)} h ago`;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
