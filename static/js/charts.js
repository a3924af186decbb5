/* Charts of the GPUs that a job holds: one line per GPU, gaps where samples are missing, a dashed line at the limit.

   const charts = new GpuCharts(root, { gpus, at, series });
     root    holds one [data-chart="utilization_percent"] (…) per chart, each with a [data-plot] and a [data-value]
     gpus    [{uuid, label, color, memory_total_bytes, power_limit_mw}]
     at      [s], the time axis of the past;  series  {uuid: {utilization_percent: [..|null], memory_used_bytes: [..], power_mw: [..]}}
   charts.append(uuid, at, {utilization_percent, …})   one live reading
   charts.load({at, series}, seconds | null)           another stretch of the past
   charts.show(seconds | null)                         the last so many seconds, or the whole run
   charts.highlight(uuid | null)                       brings one line up                                            */
import uPlot from "../vendor/uplot/uPlot.esm.js";

const GAP_S = 5;              // readings come every second; a longer silence is drawn as a gap
const KEPT = 20_000;          // points per GPU kept in the page
const GB = 1e9;

const METRICS = {
  utilization_percent: {
    unit: "%", scale: 1, top: () => 100, limit: () => null,
    value: (now) => now.length ? `mean ${Math.round(mean(now))}%` : "n/a",
  },
  memory_used_bytes: {
    unit: "", scale: GB, top: (gpus) => greatest(gpus, "memory_total_bytes", GB) ?? null,
    limit: (gpus) => named(greatest(gpus, "memory_total_bytes", GB), (v) => `card ${v.toFixed(1)} GB`),
    value: (now) => now.length ? `most ${Math.max(...now).toFixed(1)} GB` : "n/a",
  },
  power_mw: {
    unit: "", scale: 1000, top: (gpus) => greatest(gpus, "power_limit_mw", 1000) ?? null,
    limit: (gpus) => named(greatest(gpus, "power_limit_mw", 1000), (v) => `limit ${Math.round(v)} W`),
    value: (now) => now.length ? `sum ${watts(sum(now))}` : "n/a",
  },
};

export class GpuCharts {
  constructor(root, { gpus, at, series }) {
    this.gpus = gpus;
    this.window_s = null;
    this.plots = new Map();
    this.columns = new Map(gpus.map((gpu) => [gpu.uuid, columnsOf(at, series[gpu.uuid])]));
    this.root = root;
    this.holders = [...root.querySelectorAll("[data-chart]")];
    this.dirty = true;
    document.fonts.load('11px "Inter Variable"').finally(() => this.build());
    new ResizeObserver(() => this.resize()).observe(root);
    new MutationObserver(() => this.build())
      .observe(document.documentElement, { attributes: true, attributeFilter: ["data-bs-theme"] });
  }

  append(uuid, at, reading) {
    const columns = this.columns.get(uuid);
    if (!columns || at <= (columns.at.at(-1) ?? 0)) return;
    columns.at.push(at);
    for (const key of Object.keys(METRICS)) columns[key].push(reading[key] ?? null);
    if (columns.at.length > KEPT) for (const column of Object.values(columns)) column.splice(0, column.length - KEPT);
    this.schedule();
  }

  /* Another stretch of the past in place of what is drawn. */
  load({ at, series }, seconds) {
    for (const gpu of this.gpus) this.columns.set(gpu.uuid, columnsOf(at, series[gpu.uuid]));
    this.show(seconds);
  }

  show(seconds) {
    this.window_s = seconds;
    this.schedule();
  }

  highlight(uuid) {
    for (const plot of this.plots.values()) {
      this.gpus.forEach((gpu, number) => {
        plot.series[number + 1].width = gpu.uuid === uuid ? 2.25 : 1.25;
        plot.series[number + 1].alpha = uuid && gpu.uuid !== uuid ? 0.3 : lineAlpha(this.gpus.length);
      });
      plot.redraw(false);
    }
  }

  schedule() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => this.draw());
  }

  build() {
    for (const holder of this.holders) {
      const key = holder.dataset.chart;
      this.plots.get(key)?.destroy();
      const place = holder.querySelector("[data-plot]");
      this.plots.set(key, new uPlot(options(key, this.gpus, place), this.data(key), place));
    }
    this.draw();
  }

  draw() {
    this.dirty = false;
    for (const holder of this.holders) {
      const key = holder.dataset.chart, data = this.data(key);
      this.plots.get(key)?.setData(data);
      holder.dataset.points = String(data[0].length);
      holder.querySelector("[data-value]").textContent = METRICS[key].value(this.newest(key));
    }
    const known = this.lastTime() > 0;
    this.root.querySelector("[data-some]").hidden = !known;
    this.root.querySelector("[data-none]").hidden = known;
    this.root.classList.toggle("unread", !known);
  }

  resize() {
    for (const holder of this.holders) {
      const place = holder.querySelector("[data-plot]");
      const plot = this.plots.get(holder.dataset.chart);
      if (plot && place.clientWidth && place.clientWidth !== plot.width)
        plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    }
  }

  data(key) {
    const from = this.window_s === null ? -Infinity : this.lastTime() - this.window_s;
    const tables = this.gpus.map((gpu) => windowed(this.columns.get(gpu.uuid), key, from));
    return tables.length ? uPlot.join(tables) : [[]];
  }

  newest(key) {
    const last = this.lastTime(), scale = METRICS[key].scale, values = [];
    for (const columns of this.columns.values()) {
      const value = columns[key].at(-1);
      if (value !== null && value !== undefined && last - columns.at.at(-1) < GAP_S) values.push(value / scale);
    }
    return values;
  }

  lastTime() {
    return Math.max(0, ...[...this.columns.values()].map((columns) => columns.at.at(-1) ?? 0));
  }
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function columnsOf(at, series) {
  const columns = { at: [...at] };
  for (const key of Object.keys(METRICS)) columns[key] = [...(series?.[key] ?? at.map(() => null))];
  return columns;
}

/* [times, values] from a moment on, with a null where nothing was read for a while. */
function windowed(columns, key, from) {
  const times = [], values = [], scale = METRICS[key].scale;
  const step = typicalStep(columns.at);
  for (let i = 0; i < columns.at.length; i++) {
    const at = columns.at[i], value = columns[key][i];
    if (at < from) continue;
    if (times.length && at - times.at(-1) > Math.max(GAP_S, 3 * step)) {
      times.push(times.at(-1) + step);
      values.push(null);
    }
    times.push(at);
    values.push(value === null || value === undefined ? null : value / scale);
  }
  return [times, values];
}

function typicalStep(at) {
  if (at.length < 3) return 1;
  const steps = at.slice(1, 200).map((time, i) => time - at[i]).sort((a, b) => a - b);
  return steps[Math.floor(steps.length / 2)] || 1;
}

function options(key, gpus, place) {
  const metric = METRICS[key], top = metric.top(gpus), limit = metric.limit(gpus);
  const axis = {
    stroke: css("--c-axis"), grid: { stroke: css("--c-grid"), width: 1 }, ticks: { show: false },
    font: '11px "Inter Variable", sans-serif',
  };
  return {
    width: place.clientWidth || 300, height: place.clientHeight || 132, padding: [8, 10, 0, 0],
    legend: { show: false }, cursor: { sync: { key: "gpus" }, points: { size: 6 } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, (top ?? Math.max(high ?? 1, 1)) * 1.04] } },
    axes: [
      { ...axis, size: 26, gap: 8, space: 70, values: (_, ticks, __, ___, step) => ticks.map((t) => clock(t, step)) },
      { ...axis, size: 44, gap: 4, space: 30, values: (_, ticks) => ticks.map((t) => `${t}${metric.unit}`) },
    ],
    series: [{}, ...gpus.map((gpu) => ({
      label: gpu.label, stroke: css(`--c${gpu.color}`), width: 1.25, alpha: lineAlpha(gpus.length),
      spanGaps: false, points: { show: false },
    }))],
    hooks: { draw: [(plot) => limit && drawLimit(plot, limit)] },
  };
}

function drawLimit(plot, { value, text }) {
  const { ctx, bbox } = plot, y = plot.valToPos(value, "y", true), px = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--c-axis");
  ctx.lineWidth = px;
  ctx.setLineDash([4 * px, 3 * px]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `500 ${11 * px}px "Inter Variable", sans-serif`;
  ctx.textAlign = "right";
  ctx.fillText(text, bbox.left + bbox.width - 4 * px, y + 13 * px);
  ctx.restore();
}

function clock(seconds, step) {
  const at = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
  const minutes = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return step < 60 ? `${minutes}:${two(at.getSeconds())}` : minutes;
}

const lineAlpha = (count) => (count > 4 ? 0.6 : 0.9);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const watts = (value) => (value >= 10_000 ? `${(value / 1000).toFixed(1)} kW` : `${Math.round(value)} W`);
const named = (value, text) => (value === null ? null : { value, text: text(value) });

function greatest(gpus, key, scale) {
  const known = gpus.map((gpu) => gpu[key]).filter((value) => value !== null && value !== undefined);
  return known.length ? Math.max(...known) / scale : null;
}
