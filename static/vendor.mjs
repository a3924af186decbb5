/* Copies the few files that the pages load from node_modules into node_modules/.gpuyard-vendor (served at /static/vendor/). */
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { dirname, extname, join } from "node:path";
import { fileURLToPath } from "node:url";

const modules = join(dirname(fileURLToPath(import.meta.url)), "..", "node_modules");
const target = join(modules, ".gpuyard-vendor");

// from (below node_modules) -> to (below the target); a folder is copied with the files whose ending is listed.
const wanted = [
  ["htmx.org/dist/htmx.min.js", "htmx/htmx.min.js"],
  ["@tabler/core/dist/css/tabler.min.css", "tabler/tabler.min.css"],
  ["@tabler/icons-webfont/dist/tabler-icons.min.css", "tabler-icons/tabler-icons.min.css"],
  ["@tabler/icons-webfont/dist/fonts/tabler-icons.woff2", "tabler-icons/fonts/tabler-icons.woff2"],
  ["uplot/dist/uPlot.min.css", "uplot/uPlot.min.css"],
  ["uplot/dist/uPlot.esm.js", "uplot/uPlot.esm.js"],
  ["@xterm/xterm/css/xterm.css", "xterm/xterm.css"],
  ["@xterm/xterm/lib/xterm.mjs", "xterm/xterm.mjs"],
  ["@xterm/addon-fit/lib/addon-fit.mjs", "xterm/addon-fit.mjs"],
  ["@fontsource-variable/inter/wght.css", "inter/wght.css"],
  ["@fontsource-variable/inter/files", "inter/files", /-wght-normal\.woff2$/],
  ["@fontsource-variable/jetbrains-mono/wght.css", "jetbrains-mono/wght.css"],
  ["@fontsource-variable/jetbrains-mono/files", "jetbrains-mono/files", /-wght-normal\.woff2$/],
];

rmSync(target, { recursive: true, force: true });
for (const [from, to, only] of wanted) {
  const source = join(modules, from);
  const dest = join(target, to);
  mkdirSync(dirname(dest), { recursive: true });
  if (statSync(source).isDirectory()) copyFolder(source, dest, only);
  else copyFile(source, dest);
}

function copyFolder(source, dest, only) {
  mkdirSync(dest, { recursive: true });
  for (const name of readdirSync(source)) if (only.test(name)) cpSync(join(source, name), join(dest, name));
}

function copyFile(source, dest) {
  if (![".css", ".js", ".mjs"].includes(extname(source))) return cpSync(source, dest);
  let text = readFileSync(source, "utf8");
  // Source maps are not served, so nothing may point at one.
  text = text.replace(/\/\/# sourceMappingURL=.*$/gm, "").replace(/\/\*# sourceMappingURL=[^*]*\*\//g, "");
  // Only woff2 is served; every browser the pages support reads it.
  if (source.endsWith("tabler-icons.min.css"))
    text = text.replace(/,?\s*url\("?\.\/fonts\/tabler-icons\.(woff|ttf|eot)\?[^)]*\)\s*format\([^)]*\)/g, "");
  writeFileSync(dest, text);
}
