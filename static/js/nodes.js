/* The list of nodes: cells move each second, rows come anew when a state changed. */
import { Grid } from "./grid.js";
import { connect, partsRefresher } from "./live.js";

const page = document.getElementById("nodes");
const rows = page.querySelector("[data-part=rows]");
const grid = new Grid(rows, JSON.parse(document.getElementById("grid-words").textContent));
const refresh = partsRefresher(page.dataset.url, {}, () => grid.rove());
let was = "live";

connect(page.dataset.stream, {
  on: { cell: ({ gpus }) => grid.update(gpus), job: refresh, node: refresh, gpu: refresh, changed: refresh },
  staleAfterS: Number(page.dataset.gpus) ? 15 : null,
  freshOn: ["cell"],
  parts: "[data-live]",
  onState: (state) => { if (state === "live" && was !== "live") refresh(); was = state; },
});
