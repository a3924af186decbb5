/* Runs before the first paint (a classic script in <head>): the chosen theme, else the system's. */
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const apply = () => { root.dataset.bsTheme = chosen() || (system.matches ? "dark" : "light"); };
  apply();
  system.addEventListener("change", apply);
  window.addEventListener("storage", apply);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    const next = root.dataset.bsTheme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", next); } catch { /* private mode: holds for this page */ }
    root.dataset.bsTheme = next;
    window.dispatchEvent(new CustomEvent("themechange", { detail: next }));
  });
})();
