"use strict";
// Draws each chart as SVG from the JSON beside it: point at it for values, drag to zoom. The style sheet has the colours.
const HEIGHT = 300, TOP = 10, FOOT = 256, LEFT = 68, RIGHT = 14, LEAST_DRAG = 8, PRINTED = 700;

function word(value, axis, digits = axis.unit === "bytes" ? 3 : 4) {
  const power = axis.unit === "bytes" ? Math.floor(Math.log2(Math.max(Math.abs(value), 1)) / 10) : 0;
  return String(Number((value / 1024 ** power).toPrecision(digits))) + (axis.unit === "bytes" ? ` ${["B", "KiB", "MiB", "GiB", "TiB"][power]}` : "");
}

function ticks([low, high], axis, most) {
  if (axis.log) {
    const powers = Array.from({ length: 40 }, (_, i) => 10 ** (i - 20)), inside = (n) => n >= low && n <= high;
    const fine = powers.flatMap((n) => [n, 2 * n, 5 * n]).filter(inside);
    if (fine.length >= 2) return fine.length <= most ? fine : powers.filter(inside);
  }
  const unit = axis.unit === "bytes" ? 1024 ** Math.floor(Math.log2(Math.max(high, 1)) / 10) : 1;
  const rough = (high - low) / unit / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(unit * power * [1, 2, 5, 10].find((n) => n * power >= 0.999 * rough), axis.whole ? 1 : 0);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => (first + i) * step);
}

function chart(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent), total = [];
  const [svg, tip, whole] = ["svg", ".tip", "button"].map((name) => figure.querySelector(name));
  for (const one of spec.series) {
    one.x = one.x.length ? one.x : one.y.map((_, i) => i);
    one.low = one.y.map((_, i) => total[i] || 0);
    one.high = one.look === "area" ? one.y.map((value, i) => (total[i] = one.low[i] + value)) : one.y;
  }
  const stops = [...new Set(spec.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  let view = spec.range, range, width, cursor, at = null, from = null;
  const draw = (parent, name, attributes, text = "") => {
    const made = parent.appendChild(document.createElementNS(svg.namespaceURI, name));
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.textContent = text;
    return made;
  };
  const label = (parent, x, y, text, anchor = "middle") => draw(parent, "text", { x, y, "text-anchor": anchor }, text);
  const flat = (value, axis) => (axis.log ? Math.log(value) : value);
  const share = (value, [low, high], axis) => (flat(value, axis) - flat(low, axis)) / (flat(high, axis) - flat(low, axis));
  const X = (value) => LEFT + share(value, view, spec.x) * (width - LEFT - RIGHT);
  const Y = (value) => FOOT - share(value, range, spec.y) * (FOOT - TOP);
  const valueAt = (pixel) => {
    const [low, high] = view.map((end) => flat(end, spec.x)), part = (pixel - LEFT) / (width - LEFT - RIGHT);
    const value = low + Math.min(1, Math.max(0, part)) * (high - low);
    return spec.x.log ? Math.exp(value) : value;
  };
  const path = (one) => one.x.map((x, i) => (i ? (one.step ? `H${X(x)}V` : `L${X(x)} `) : `M${X(x)} `) + Y(one.high[i])).join("");
  const back = (one) => one.x.map((x, i) => (one.step ? `V${Y(one.low[i])}H${X(x)}` : `L${X(x)} ${Y(one.low[i])}`)).reverse().join("");

  function drawSeries(inner, one) {
    const colour = `var(--${one.role})`, style = `stroke:${colour}`, dots = one.x.map((x, i) => [X(x), Y(one.high[i])]);
    if (one.look === "area") draw(inner, "path", { d: `${path(one)}${back(one)}Z`, class: `area ${one.role}`, style: `fill:${colour}` });
    else if (one.look === "line" || one.look === "dashed") draw(inner, "path", { d: path(one), class: `line ${one.look}`, style });
    else if (one.look === "cross") for (const [x, y] of dots) draw(inner, "path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, class: "line", style });
    else for (const [cx, cy] of dots) draw(inner, "circle", { cx, cy, r: 4.5, style: `${style};fill:${one.look === "dot" ? colour : "var(--panel)"}` });
  }
  function redraw(event) {
    const rules = spec.rules.filter((rule) => rule.drawn), wide = (width = event?.type === "beforeprint" ? PRINTED : figure.clientWidth) - LEFT - RIGHT;
    const first = stops.findLast((x) => x <= view[0]) ?? view[0], last = stops.find((x) => x >= view[1]) ?? view[1];
    const seen = spec.series.flatMap((one) => one.high.filter((_, i) => one.x[i] >= first && one.x[i] <= last));
    seen.push(...rules.filter((rule) => rule.axis === "y").map((rule) => rule.value));
    const low = Math.min(...seen), high = Math.max(...seen), more = 0.08 * (high - low || Math.abs(high) || 1);
    range = spec.y.zero ? [0, 1.08 * high || 1] : spec.y.log ? [low / 1.1, high * 1.1] : [low - more, high + more];
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const tick of ticks(range, spec.y, 6)) {
      draw(svg, "path", { d: `M${LEFT} ${Y(tick)}H${width - RIGHT}`, class: "grid" });
      label(svg, LEFT - 8, Y(tick) + 4, word(tick, spec.y, 3), "end");
    }
    if (!spec.spans.length) for (const tick of ticks(view, spec.x, Math.max(2, width / 90))) label(svg, X(tick), FOOT + 18, word(tick, spec.x));
    const inner = draw(svg, "svg", { x: LEFT, width: wide, height: HEIGHT, viewBox: `${LEFT} 0 ${wide} ${HEIGHT}` });
    spec.series.filter((one) => one.look === "area").forEach((one) => drawSeries(inner, one));
    for (const [start, end, name] of spec.spans) {
      const left = X(Math.max(start, view[0])), right = X(Math.min(end, view[1]));
      draw(inner, "path", { d: `M${X(start)} ${TOP}V${FOOT + 6}`, class: "span" });
      if (right - left > 7 * name.length + 4) label(inner, (left + right) / 2, FOOT + 18, name);
    }
    for (const { axis, value, role, dashed } of rules) draw(inner, "path", {
      d: axis === "y" ? `M${LEFT} ${Y(value)}H${width}` : `M${X(value)} ${TOP}V${FOOT}`, class: dashed ? "line dashed" : "line", style: `stroke:var(--${role})`,
    });
    spec.series.filter((one) => one.look !== "area").forEach((one) => drawSeries(inner, one));
    draw(svg, "path", { d: `M${LEFT} ${FOOT}H${width - RIGHT}`, class: "axis" });
    label(svg, LEFT + wide / 2, HEIGHT - 6, spec.x.label);
    cursor = draw(svg, "rect", { class: "cursor", y: TOP, height: FOOT - TOP });
    whole.hidden = view === spec.range;
    point(null);
  }
  const mark = (left, right) => { cursor.setAttribute("x", Math.min(left, right)); cursor.setAttribute("width", Math.abs(right - left)); };
  const zoom = (low, high) => { view = high > low ? [low, high] : spec.range; redraw(); };
  function point(index) { // Shows what is at a stop, or nothing.
    at = index;
    tip.hidden = index === null;
    if (index === null) return mark(0, 0);
    const x = stops[index], span = spec.spans.find(([start, end]) => x >= start && x < end), add = (name, row = {}) => Object.assign(document.createElement(name), row);
    tip.replaceChildren(add("b", { textContent: span ? span[2] || "preparation" : `${spec.x.label}: ${word(x, spec.x)}` }));
    for (const one of [...spec.series].reverse()) one.x.forEach((value, i) => {
      if (value !== x || (one.look === "area" && !one.y[i])) return;
      const row = tip.appendChild(add("span"));
      row.append(add("i", { style: `background:var(--${one.role})` }), `${one.name}: ${one.texts[i] || word(one.y[i], spec.y)}`);
    });
    mark(X(x) - 0.5, X(x) + 0.5);
    tip.style.left = `${Math.max(0, X(x) + 12 + tip.offsetWidth > width ? X(x) - 12 - tip.offsetWidth : X(x) + 12)}px`;
  }
  const nearest = (pixel) => stops.reduce((best, x, i) => (Math.abs(X(x) - pixel) < Math.abs(X(stops[best]) - pixel) ? i : best), 0);
  const place = (event) => event.clientX - svg.getBoundingClientRect().left, drags = (event) => from !== null && Math.abs(place(event) - from) > LEAST_DRAG;
  const on = (name, act) => svg.addEventListener(name, act);
  on("pointerdown", (event) => { from = place(event); svg.setPointerCapture(event.pointerId); });
  on("pointermove", (event) => { point(drags(event) ? null : nearest(place(event))); if (drags(event)) mark(from, place(event)); });
  on("pointerup", (event) => { if (drags(event)) zoom(...[from, place(event)].sort((a, b) => a - b).map(valueAt)); else point(nearest(place(event))); from = null; });
  on("pointerleave", (event) => { if (from === null && event.pointerType !== "touch") point(null); });
  for (const name of ["pointercancel", "blur"]) on(name, () => { from = null; point(null); });
  on("keydown", (event) => { if (event.key in { ArrowLeft: 0, ArrowRight: 0 }) point(Math.min(stops.length - 1, Math.max(0, (at ?? -1) + (event.key === "ArrowLeft" ? -1 : 1)))); });
  whole.addEventListener("click", () => zoom(0, 0));
  for (const name of ["resize", "beforeprint", "afterprint"]) window.addEventListener(name, redraw);
  redraw();
}
document.querySelectorAll("figure.chart").forEach(chart);
