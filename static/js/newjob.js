/* One request, seen three ways. Every edit asks the server, which has the only validator; the side not being edited follows. */
import { connect } from "./live.js";

const form = document.getElementById("new-job");
const yaml = document.getElementById("yaml");
const edited = form.elements.edited;
const command = document.getElementById("command");
const QUIET_MS = 250;
const RECHECK_MS = 30_000;
let commands = null, shell = "curl", timer = 0, asked = 0, checkedAt = 0, touched = new Set();

form.addEventListener("input", (event) => {
  if (event.target === yaml) edited.value = "yaml";
  else edited.value = "form";
  touched.add(event.target.name);
  clearTimeout(timer);
  timer = setTimeout(check, QUIET_MS);
});

document.getElementById("shells").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  shell = button.dataset.shell;
  for (const other of event.currentTarget.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
  showCommand();
});

form.addEventListener("submit", (event) => {
  if (event.submitter) event.submitter.setAttribute("aria-busy", "true");
});

// The cluster moved: the answer may be another one.
const soon = () => { clearTimeout(timer); timer = setTimeout(check, Math.max(QUIET_MS, checkedAt + 2000 - Date.now())); };
connect("/live/cluster/", { on: { job: soon, node: soon, gpu: soon, changed: soon, cell: () => {} } });

setInterval(() => {
  if (!document.hidden && Date.now() - checkedAt > RECHECK_MS) check();
  showAge();
}, 1000);
check();

async function check() {
  clearTimeout(timer);
  const number = ++asked;
  checkedAt = Date.now();
  const answer = await fetch(form.dataset.check, { method: "POST", body: new FormData(form) }).catch(() => null);
  if (number !== asked) return;             // an older answer never overwrites a newer one
  if (!answer?.ok || answer.redirected) { checkedAt = 0; return showAge(); }
  const found = await answer.json();
  if (number !== asked) return;
  checkedAt = Date.now();
  if (edited.value === "yaml") fill(found.form);
  else if (found.yaml !== null && document.activeElement !== yaml) yaml.value = found.yaml;
  document.getElementById("copy-yaml").dataset.copy = yaml.value;
  showErrors(found.errors);
  document.getElementById("start").innerHTML = found.start;   // rendered and escaped by the server
  commands = found.commands;
  form.dataset.ready = found.ready ? "1" : "0";
  showCommand();
  showAge();
}

function fill(values) {
  if (!values) return;
  for (const [name, value] of Object.entries(values)) {
    if (name === "models") chooseModels(value);
    else if (name === "link") for (const radio of form.querySelectorAll('[name="link"]')) radio.checked = radio.value === value;
    else if (form.elements[name] && form.elements[name] !== document.activeElement) form.elements[name].value = value;
  }
}

function chooseModels(names) {
  const boxes = [...form.querySelectorAll('[name="models"]')];
  for (const box of boxes) box.checked = names.includes(box.value);
  for (const name of names) if (!boxes.some((box) => box.value === name)) addChip(name);
}

/* A model that only the YAML names. */
function addChip(name) {
  const label = document.createElement("label"), box = document.createElement("input"), mark = document.createElement("i");
  label.className = "chip";
  Object.assign(box, { type: "checkbox", name: "models", value: name, checked: true });
  mark.className = "ti ti-check";
  mark.setAttribute("aria-hidden", "true");
  label.append(box, mark, document.createTextNode(name));
  document.getElementById("chips").append(label);
}

/* An untouched, empty command is no mistake yet. */
function showErrors(errors) {
  for (const place of form.querySelectorAll("[data-errors]")) {
    const field = place.dataset.errors, messages = (errors[field] ?? []).filter(() => touched.size || field !== "command");
    place.hidden = messages.length === 0;
    place.querySelector("span").textContent = messages.join(" ");
    const input = form.querySelector(`#f-${CSS.escape(field || "none")}`);
    if (input) input.setAttribute("aria-invalid", String(messages.length > 0));
  }
}

function showCommand() {
  command.textContent = commands ? commands[shell] : command.dataset.none ?? "";
  document.getElementById("copy-command").dataset.copy = command.textContent;
}

function showAge() {
  const seconds = Math.round((Date.now() - checkedAt) / 1000);
  document.getElementById("checked").textContent = checkedAt ? `checked ${Math.max(0, seconds)} s ago` : "no answer; trying again";
}
