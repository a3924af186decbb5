/* How a card is cut: which one is looked at, the wish as text, and the server's answer to it while it is written. */
import { takeOver } from "./live.js";

const TYPING_MS = 250;

export class MigPlanner {
  constructor(card) {
    this.card = card;
    this.input = card.querySelector("#mig-wanted");
    this.answer = card.querySelector("[data-mig-plan]");
    this.choice = card.querySelector("[data-mig-choose]");
    this.timer = 0;
    this.asked = 0;
    this.choice.addEventListener("click", (event) => this.choose(event.target.closest("button")));
    this.input.addEventListener("input", () => this.soon());
    this.answer.addEventListener("click", (event) => this.pick(event.target.closest("[data-add], [data-wanted]")));
    this.choose(this.choice.querySelector("[data-first]") || this.choice.querySelector("button"));
  }

  choose(button) {
    if (!button) return;
    for (const one of this.choice.children) one.setAttribute("aria-pressed", String(one === button));
    this.gpu = button.value;
    this.input.value = button.dataset.layout || "off";
    this.showChosen();
    this.ask();
  }

  showChosen(root = this.card) {
    for (const one of root.querySelectorAll("[data-mig]")) one.hidden = one.dataset.mig !== this.gpu;
  }

  /* What is now came anew; the plan for it may read differently. */
  take(fresh) {
    this.showChosen(fresh);
    const old = this.card.querySelector("[data-part=mig]"), before = old.innerHTML;
    takeOver(fresh);
    if (old.innerHTML !== before) this.soon();
  }

  pick(chip) {
    if (!chip) return;
    const { add, wanted } = chip.dataset, now = this.input.value.trim();
    this.input.value = wanted ?? (now && now !== "off" ? `${now} + ${add}` : add);
    this.ask();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), TYPING_MS);
  }

  async ask() {
    clearTimeout(this.timer);
    const number = ++this.asked, query = new URLSearchParams({ gpu: this.gpu, wanted: this.input.value });
    const answer = await fetch(`${this.card.dataset.planUrl}?${query}`, { credentials: "same-origin" }).catch(() => null);
    if (!answer?.ok || answer.redirected || number !== this.asked) return;
    const html = await answer.text();
    if (number === this.asked && this.answer.innerHTML !== html) this.answer.innerHTML = html;
  }
}
