/* The log card of a job. Merged: lines of all ranks in the order of their arrival, fetched by offset.
   A rank of its own: a terminal (ANSI, \r) fed by a stream that resumes by offset. Bytes are never trusted as markup. */
import { FitAddon } from "../vendor/xterm/addon-fit.mjs";
import { Terminal } from "../vendor/xterm/xterm.mjs";
import { css } from "./charts.js";

const BACKLOG_BYTES = 256 * 1024;   // of a rank's past, in its terminal
const MERGED_BACKLOG_BYTES = 16 * 1024;
const LINES_KEPT = 3000;
const LINE_LENGTH = 4000;
const POLL_MS = 2000;
const ANSI = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
const CONTROL = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;
const WORST = [[/\b(error|exception|traceback|fatal|failed)\b/i, "e"], [/\bwarn(ing)?\b/i, "w"]];

export class LogCard {
  constructor(root) {
    this.root = root;
    this.pullUrl = root.dataset.pull;
    this.liveUrl = root.dataset.streamUrl;
    this.ended = root.dataset.ended === "1";
    this.merged = new MergedView(root.querySelector("[data-merged]"), () => this.showFollowing());
    this.terminal = null;
    root.querySelector("[data-tabs]").addEventListener("click", (event) => this.choose(event.target.closest("button")));
    root.querySelector("[data-newest]").addEventListener("click", () => this.jump());
    this.choose(root.querySelector('[data-tabs] button[aria-pressed="true"]'));
    setInterval(() => document.hidden || this.pull(), POLL_MS);
    document.addEventListener("visibilitychange", () => document.hidden || this.pull());
  }

  get view() {
    return this.terminal ?? this.merged;
  }

  choose(button) {
    if (!button) return;
    for (const tab of this.root.querySelectorAll("[data-tabs] button")) tab.setAttribute("aria-pressed", tab === button);
    this.terminal?.close();
    this.terminal = null;
    const stream = button.dataset.stream;
    this.root.querySelector("[data-merged]").hidden = Boolean(stream);
    this.root.querySelector("[data-terminal]").hidden = !stream;
    this.root.querySelector("[data-download]").href = `${this.pullUrl}?raw=${encodeURIComponent(stream || button.dataset.first)}`;
    if (stream) this.terminal = new TerminalView(this.root.querySelector("[data-terminal]"), this, stream);
    else this.pull();
    this.showFollowing();
  }

  /* Everything that is new for the merged view, in one short request. */
  async pull() {
    if (this.terminal || this.merged.complete) return;
    if (this.pulling) { this.again = true; return; }
    this.pulling = true;
    try {
      do {
        this.again = false;
        const answer = await fetch(`${this.pullUrl}?at=${encodeURIComponent(this.merged.position())}`,
          { headers: { Accept: "application/json" } });
        if (!answer.ok) break;
        const parts = await answer.json();
        this.merged.add(parts.streams);
        this.merged.complete = parts.complete;
        this.again ||= parts.more;
        this.mark(parts.complete, parts.bytes);
      } while (this.again);
    } catch { /* The next poll tries again; the header says that contact is lost. */ } finally {
      this.pulling = false;
    }
  }

  jobEnded() {
    this.ended = true;
    this.pull();
  }

  jump() {
    this.view.toNewest();
    this.showFollowing();
  }

  showFollowing() {
    const following = this.view.following;
    this.root.querySelector("[data-newest]").hidden = following;
    this.root.querySelector("[data-following]").hidden = !following || this.root.dataset.whole === "1";
    this.root.querySelector("[data-unseen]").textContent = this.view.unseen ? this.view.unseen.toLocaleString("en") : "";
  }

  mark(complete, bytes) {
    this.root.dataset.whole = complete ? "1" : "0";
    this.root.querySelector("[data-complete]").hidden = !complete;
    if (bytes !== undefined) this.root.querySelector("[data-bytes]").textContent = size(bytes);
    this.showFollowing();
  }
}

class MergedView {
  constructor(element, changed) {
    this.element = element;
    this.changed = changed;
    this.following = true;
    this.unseen = 0;
    this.complete = false;
    this.streams = new Map(JSON.parse(element.dataset.streams).map((stream) => [stream.name, new LineReader(stream)]));
    this.first = true;
    element.addEventListener("scroll", () => this.scrolled());
  }

  position() {
    return [...this.streams.values()].map((reader) => `${reader.name}:${reader.offset}`).join(",");
  }

  add(parts) {
    const rows = [];
    const known = this.first && parts.some((part) => part.data);
    for (const part of parts) {
      const reader = this.streams.get(part.name) ?? this.addStream(part.name);
      for (const line of reader.read(part)) rows.push(rowOf(reader, line, this.first));
    }
    if (known) {
      this.first = false;
      if (rows.length && this.streams.size > 1) rows.push(divider("Above: what was there before, rank by rank. Below: lines as they arrive."));
    }
    if (!rows.length) return;
    this.element.querySelector("[data-empty]")?.remove();
    this.element.append(...rows);
    while (this.element.childElementCount > LINES_KEPT) this.element.firstElementChild.remove();
    if (this.following) this.toNewest();
    else this.unseen += rows.length;
    this.changed();
  }

  addStream(name) {
    const reader = new LineReader({ name, offset: 0 });
    this.streams.set(name, reader);
    return reader;
  }

  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    const atEnd = scrollTop + clientHeight >= scrollHeight - 24;
    if (atEnd === this.following) return;
    this.following = atEnd;
    if (atEnd) this.unseen = 0;
    this.changed();
  }

  toNewest() {
    this.following = true;
    this.unseen = 0;
    this.element.scrollTop = this.element.scrollHeight;
  }
}

/* Bytes of one stream -> whole lines; a run of \r frames counts as its last one. */
class LineReader {
  constructor({ name, size = 0, offset }) {
    this.name = name;
    this.offset = offset ?? Math.max(0, size - MERGED_BACKLOG_BYTES);
    this.cut = this.offset > 0;
    this.decoder = new TextDecoder("utf-8");
    this.rest = "";
  }

  read(part) {
    if (part.offset > this.offset) this.decoder = new TextDecoder("utf-8");
    this.offset = part.next_offset;
    const pieces = (this.rest + this.decoder.decode(bytesOf(part.data), { stream: true })).split("\n");
    this.rest = pieces.pop().slice(-4 * LINE_LENGTH);
    if (part.complete && this.rest) { pieces.push(this.rest); this.rest = ""; }
    if (this.cut && pieces.length) { pieces.shift(); this.cut = false; }
    return pieces.map(lastFrame);
  }
}

class TerminalView {
  constructor(holder, card, stream) {
    this.card = card;
    this.unseen = 0;
    this.box = document.createElement("div");
    this.box.className = "gy-term";
    holder.replaceChildren(this.box);
    this.terminal = new Terminal({
      convertEol: true, disableStdin: true, cursorBlink: false, cursorInactiveStyle: "none", scrollback: 20_000,
      fontSize: 12, lineHeight: 1.3, fontFamily: '"JetBrains Mono Variable", monospace', theme: termTheme(),
      linkHandler: { activate() {} },   // a program's output opens nothing
    });
    this.fit = new FitAddon();
    this.terminal.loadAddon(this.fit);
    this.terminal.open(this.box);
    this.terminal.textarea?.setAttribute("aria-label", `Output of ${stream}, read only`);
    this.resizer = new ResizeObserver(() => this.fit.fit());
    this.resizer.observe(this.box);
    this.themer = new MutationObserver(() => { this.terminal.options.theme = termTheme(); });
    this.themer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-bs-theme"] });
    this.terminal.onScroll(() => card.showFollowing());
    this.box.addEventListener("wheel", () => requestAnimationFrame(() => card.showFollowing()), { passive: true });
    this.listen(stream);
  }

  listen(stream) {
    const size = Number(this.card.root.querySelector(`[data-stream="${CSS.escape(stream)}"]`).dataset.size || 0);
    const from = Math.max(0, size - BACKLOG_BYTES);
    if (from) this.terminal.writeln(`\x1b[90m… the first ${sizeText(from)} are not shown here; Download has them all\x1b[0m`);
    const rank = stream.replace(/^rank-/, "");
    this.source = new EventSource(`${this.card.liveUrl}?rank=${encodeURIComponent(rank)}&offset=${from}`);
    this.card.mark(false);
    const onLog = (event) => this.write(JSON.parse(event.data));
    this.source.addEventListener("log", onLog);
    this.source.addEventListener("gap", (event) => this.gap(JSON.parse(event.data)));
    this.source.addEventListener("complete", () => { this.source.close(); this.card.mark(true); });
    this.source.addEventListener("revoked", () => this.source.close());
  }

  write(chunk) {
    const follow = this.following;
    this.terminal.write(bytesOf(chunk.data), () => {
      if (follow) this.terminal.scrollToBottom();
      this.card.showFollowing();
    });
    if (!follow) this.unseen += 1;
    this.card.root.dataset.termBytes = String(Number(this.card.root.dataset.termBytes || 0) + chunk.data.length);
  }

  gap(hole) {
    this.terminal.writeln(`\r\n\x1b[33m… ${sizeText((hole.to ?? 0) - (hole.from ?? 0))} of output are missing here\x1b[0m`);
  }

  get following() {
    const buffer = this.terminal.buffer.active;
    return buffer.viewportY >= buffer.baseY;
  }

  toNewest() {
    this.unseen = 0;
    this.terminal.scrollToBottom();
  }

  close() {
    this.source?.close();
    this.resizer.disconnect();
    this.themer.disconnect();
    this.terminal.dispose();
  }
}

function rowOf(reader, line, past) {
  const row = document.createElement("div"), level = WORST.find(([pattern]) => pattern.test(line))?.[1] ?? "";
  row.className = `l ${level}`;
  row.append(cell("", past ? "" : new Date().toTimeString().slice(0, 8)), cell(`rk ${level === "e" ? "bad" : ""}`, chip(reader.name)), cell("x", line));
  return row;
}

function divider(text) {
  const row = document.createElement("div");
  row.className = "fold";
  row.textContent = text;
  return row;
}

function cell(name, text) {
  const span = document.createElement("span");
  span.className = name;
  span.textContent = text;
  return span;
}

const chip = (name) => (name.startsWith("rank-") ? `r${name.slice(5)}` : "run");
const sizeText = (bytes) => (bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
const size = sizeText;

function lastFrame(line) {
  const frames = line.replace(ANSI, "").split("\r").filter(Boolean);
  return (frames.at(-1) ?? "").replace(CONTROL, "").slice(0, LINE_LENGTH);
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function termTheme() {
  return {
    background: css("--log-bg"), foreground: css("--log-text"), cursor: css("--log-bg"),
    selectionBackground: css("--gy-accent-soft"), green: css("--st-free"), red: css("--st-fail"),
    yellow: css("--st-dirty"), blue: css("--st-mine"), cyan: css("--c5"), magenta: css("--c4"),
    brightBlack: css("--gy-text-3"), brightGreen: css("--st-free"), brightRed: css("--st-fail"),
    brightYellow: css("--st-dirty"), brightBlue: css("--st-mine"),
  };
}
