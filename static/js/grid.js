/* The node × GPU grid: values move in place, states are patched cell by cell, the keyboard walks it, a card says the rest. */
import { duration, gigabytes, percent, watts } from "./format.js";

const NUMBERED = new Set(["busy", "mine"]);
const WAIT_MS = 60;

export class Grid {
  constructor(root, words) {
    this.root = root;
    this.words = words;
    this.show = "use";
    this.filter = "";
    this.freeOnly = false;
    this.card = null;
    this.timer = 0;
    root.addEventListener("pointerover", (event) => this.point(event.target.closest(".gc")));
    root.addEventListener("pointerleave", () => this.point(null));
    root.addEventListener("focusin", (event) => this.focus(event.target.closest(".gc")));
    root.addEventListener("focusout", () => this.point(null));
    root.addEventListener("keydown", (event) => this.walk(event));
    this.rove();
  }

  get cells() { return [...this.root.querySelectorAll(".gc")]; }

  /* values: {uuid: [utilisation %, memory B, power mW, temperature °C]}, each null if it is not known. */
  update(values) {
    for (const [uuid, [use, memory, power, temperature]] of Object.entries(values)) {
      const cell = document.getElementById(`c-${uuid}`);
      if (!cell) continue;
      put(cell, "utilization", use);
      put(cell, "memory", memory);
      put(cell, "power", power);
      put(cell, "temperature", temperature);
      this.draw(cell);
    }
    if (this.card) this.fillCard();
  }

  draw(cell) {
    if (!NUMBERED.has(cell.dataset.state)) return;
    const { total, limit, initials } = cell.dataset;
    const memory = share(number(cell, "memory"), total), use = number(cell, "utilization");
    const body = { use, memory, owner: use, power: share(number(cell, "power"), limit) }[this.show];
    const text = this.show === "owner" ? initials || "" : body === null ? "" : String(Math.round(body));
    cell.style.setProperty("--u", body === null ? 0 : Math.round(body));
    cell.style.setProperty("--m", memory === null ? 0 : Math.round(memory));
    cell.classList.toggle("na-u", body === null);
    cell.classList.toggle("na-m", memory === null);
    const digits = cell.querySelector("b");
    if (digits && digits.textContent !== text) digits.textContent = text;
    const label = cell.getAttribute("aria-label").split(", ").slice(0, 2);
    cell.setAttribute("aria-label", use === null ? label.join(", ") : `${label.join(", ")}, ${Math.round(use)}%`);
  }

  drawAll() { for (const cell of this.cells) this.draw(cell); }

  choose(show) { this.show = show; this.drawAll(); }

  /* Takes over what the server drew anew without moving anything: same cells are patched, only another set is exchanged. */
  patch(fresh) {
    const ids = (root) => [...root.querySelectorAll(".gc")].map((cell) => cell.id).join();
    if (ids(fresh) !== ids(this.root)) {
      this.root.replaceChildren(...fresh.childNodes);
      this.rove();
    } else {
      for (const cell of fresh.querySelectorAll(".gc")) patchCell(document.getElementById(cell.id), cell);
      for (const note of fresh.querySelectorAll("[data-note]")) this.patchNote(note);
    }
    this.drawAll();
    this.apply();
  }

  patchNote(note) {
    const old = this.root.querySelector(`[data-note="${CSS.escape(note.dataset.note)}"]`);
    if (old && old.innerHTML !== note.innerHTML) old.innerHTML = note.innerHTML;
  }

  /* ── filter ── */
  apply() {
    let shown = 0;
    for (const row of this.root.querySelectorAll(".gy-node")) {
      const fits = row.dataset.node.includes(this.filter) && (!this.freeOnly || row.querySelector(".gc.free, .gc.mig>.f"));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    for (const group of this.root.querySelectorAll(".gy-group")) {
      group.hidden = !group.querySelector(".gy-node:not([hidden])");
    }
    this.root.classList.toggle("free-only", this.freeOnly);
    const none = this.root.querySelector(".no-match");
    if (none) none.hidden = shown > 0 || !this.root.querySelector(".gy-node");
    this.rove();
  }

  /* ── keyboard: one tab stop, arrows walk ── */
  rove(cell = null) {
    const visible = this.cells.filter((one) => !one.closest("[hidden]"));
    const keep = cell || visible.find((one) => one.tabIndex === 0) || visible[0];
    for (const one of this.cells) one.tabIndex = one === keep ? 0 : -1;
  }

  walk(event) {
    const cell = event.target.closest(".gc");
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") this.point(null);
    if (!cell || !step) return;
    event.preventDefault();
    const rows = [...this.root.querySelectorAll(".gy-node:not([hidden])")].filter((row) => !row.closest(".gy-group[hidden]"));
    const row = rows.indexOf(cell.closest(".gy-node"));
    const inRow = (number) => [...(rows[number]?.querySelectorAll(".gc") || [])];
    const column = inRow(row).indexOf(cell);
    const target = step[1] ? inRow(row + step[1])[Math.min(column, inRow(row + step[1]).length - 1)] : inRow(row)[column + step[0]];
    if (target) target.focus();
  }

  focus(cell) {
    if (!cell) return;
    this.rove(cell);
    this.point(cell);
  }

  /* ── hover card, and the ring around all cells of the same job ── */
  point(cell) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.showCard(cell), cell ? WAIT_MS : WAIT_MS * 2);
  }

  showCard(cell) {
    const job = cell?.dataset.jobid;
    for (const one of this.cells) one.classList.toggle("same", Boolean(job) && one !== cell && one.dataset.jobid === job);
    this.card?.remove();
    this.card = null;
    if (!cell || !cell.isConnected) return;
    this.cell = cell;
    this.card = document.createElement("div");
    this.card.className = "tip";
    this.card.setAttribute("role", "tooltip");
    const frame = this.root.closest(".gridcard") || this.root;
    frame.append(this.card);
    this.fillCard();
    this.place(frame, cell);
  }

  place(frame, cell) {
    const outer = frame.getBoundingClientRect(), inner = cell.getBoundingClientRect();
    const left = Math.min(Math.max(8, inner.left - outer.left - 40), outer.width - this.card.offsetWidth - 8);
    const below = inner.bottom - outer.top + 9, above = inner.top - outer.top - this.card.offsetHeight - 9;
    const fitsBelow = inner.bottom + this.card.offsetHeight + 20 < window.innerHeight;
    this.card.style.left = `${left}px`;
    this.card.style.top = `${fitsBelow || above + outer.top < 60 ? below : above}px`;
  }

  fillCard() {
    const { dataset } = this.cell, { words } = this;
    const rows = [
      [words.job, dataset.job ? `${dataset.job}${dataset.rank ? `, rank ${dataset.rank}` : ""}` : null],
      [words.owner, dataset.owner],
      [words.use, percent(number(this.cell, "utilization"))],
      [words.memory, `${gigabytes(number(this.cell, "memory"))} / ${gigabytes(dataset.total)} GB`],
      [words.power, `${watts(number(this.cell, "power"))} / ${watts(dataset.limit)} W`],
      [words.held, dataset.since ? duration((Date.now() - Date.parse(dataset.since)) / 1000) : null],
      [words.slices, dataset.slices],
      [words.why, dataset.why],
      ["UUID", dataset.uuid],
    ];
    const list = document.createElement("dl");
    list.className = "kv";
    for (const [name, value] of rows) if (value) {
      list.append(element("dt", name), element("dd", value, name === "UUID" ? "mono" : ""));
    }
    const head = document.createElement("div");
    head.className = "row-n";
    const state = element("span", words.states[dataset.state] || dataset.state, `st ${KINDS[dataset.state] || "k-lost"}`);
    head.append(element("b", dataset.title, "mono"), state);
    this.card.replaceChildren(head, list);
  }
}

const KINDS = {
  free: "k-free", busy: "k-busy", mine: "k-mine", dirty: "k-dirty", suspect: "k-suspect", quarantined: "k-quar", mig: "k-busy",
};

function patchCell(old, fresh) {
  if (!old) return;
  const tab = old.tabIndex, focused = document.activeElement === old, changed = old.dataset.state !== fresh.dataset.state;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.innerHTML !== fresh.innerHTML) old.innerHTML = fresh.innerHTML;
  old.tabIndex = tab;
  if (changed) {
    old.classList.add("changed");
    setTimeout(() => old.classList.remove("changed"), 700);
  }
  if (focused) old.focus({ preventScroll: true });
}

function put(cell, name, value) {
  if (value === null || value === undefined) delete cell.dataset[name];
  else cell.dataset[name] = value;
}

function number(cell, name) {
  const text = cell.dataset[name];
  return text === undefined ? null : Number(text);
}

function share(value, whole) {
  return value === null || !whole ? null : Math.min(100, (value / whole) * 100);
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/* A sparkline of values 0…100 (null is a gap) as an SVG element. */
export function spark(values, width = 92, height = 26) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("preserveAspectRatio", "none");
  let path = "", down = false;
  values.forEach((value, index) => {
    if (value === null) { down = false; return; }
    const x = (index / Math.max(1, values.length - 1)) * width, y = height - 1.5 - (value / 100) * (height - 3);
    path += `${down ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
    down = true;
  });
  svg.innerHTML = `<line x1="0" x2="${width}" y1="${height - 0.5}" y2="${height - 0.5}"/><path d="${path}"/>`;
  return svg;
}

