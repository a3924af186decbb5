/* What every page has: menus, dialogs, times that count up, things that can be copied. An entry point: never imported. */
import { tick } from "./format.js";

setInterval(tick, 1000);
tick();
document.addEventListener("htmx:afterSwap", (event) => tick(event.target));

document.addEventListener("click", (event) => {
  const target = event.target;
  closeMenus(target);
  const copier = target.closest("[data-copy]");
  if (copier) copy(copier);
  const opener = target.closest("[data-dialog]");
  if (opener) document.getElementById(opener.dataset.dialog)?.showModal();
  if (target.closest("[data-close-dialog]")) target.closest("dialog")?.close();
  if (target instanceof HTMLDialogElement) target.close(); // a click on the backdrop
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const menu of document.querySelectorAll("details.gy-menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});

function closeMenus(target) {
  for (const menu of document.querySelectorAll("details.gy-menu[open]")) if (!menu.contains(target)) menu.open = false;
}

async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.dataset.copy);
  } catch {
    return; // without https the browser has no clipboard; the text stays selectable
  }
  const said = document.getElementById("gy-said");
  if (said) said.textContent = said.dataset.copied;
  element.classList.add("copied");
  setTimeout(() => element.classList.remove("copied"), 1200);
}
