// Opens each page in frames of several widths, uses its charts as a person does, and writes what was seen as JSON.
const pages = JSON.parse(document.getElementById("pages").textContent);
const labels = (svg) => [...svg.querySelectorAll("text")].map((text) => [text.textContent, Math.round(text.getAttribute("x"))]);

function use(frame, figure) {
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), box = svg.getBoundingClientRect();
  const whole = figure.querySelector("button"), before = labels(svg);
  svg.setPointerCapture = () => {}; // There is no real pointer.
  const move = (kind, share) => svg.dispatchEvent(new frame.PointerEvent(kind, { clientX: box.left + share * box.width, bubbles: true }));
  const seen = { name: svg.getAttribute("aria-label"), before, drawn: svg.querySelectorAll("path.area, path.line, circle").length };
  seen.inside = [...svg.querySelectorAll(":scope > text")].every((text) => {
    const at = text.getBoundingClientRect();
    return at.left >= box.left - 1 && at.right <= box.right + 1;
  });
  move("pointermove", 0.6);
  seen.tip = tip.hidden ? "" : tip.innerText;
  seen.tipInside = tip.getBoundingClientRect().right <= figure.getBoundingClientRect().right + 1;
  svg.dispatchEvent(new frame.KeyboardEvent("keydown", { key: "ArrowLeft" }));
  seen.tipByKey = tip.innerText;
  move("pointerleave", 0.6);
  seen.tipLeft = tip.hidden;
  move("pointerdown", 0.5);
  move("pointerup", 0.5);
  seen.tipByTap = tip.hidden ? "" : tip.innerText;
  move("pointerdown", 0.4);
  move("pointermove", 0.7);
  move("pointerup", 0.7);
  seen.zoomed = labels(svg);
  seen.button = whole.hidden ? "" : whole.textContent;
  whole.click();
  seen.after = labels(svg);
  return seen;
}

async function look(name, html, width) {
  const element = Object.assign(document.createElement("iframe"), { width, height: 900, srcdoc: html });
  const loaded = new Promise((done) => element.addEventListener("load", done));
  document.body.append(element);
  await loaded;
  const frame = element.contentWindow, root = element.contentDocument.documentElement;
  const seen = {
    name, width, charts: [...root.querySelectorAll("figure.chart")].map((figure) => use(frame, figure)),
    overflow: root.scrollWidth - root.clientWidth, loads: frame.performance.getEntriesByType("resource").map((one) => one.name),
    colours: ["body", "section", "h2"].map((tag) => frame.getComputedStyle(root.querySelector(tag))[tag === "h2" ? "color" : "backgroundColor"]),
  };
  element.remove();
  return seen;
}

(async () => {
  const seen = [];
  for (const name in pages) for (const width of [1100, 390]) seen.push(await look(name, pages[name], width));
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "seen", textContent: btoa(unescape(encodeURIComponent(JSON.stringify(seen)))) }));
})();
