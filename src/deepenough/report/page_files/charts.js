"use strict";
// The five kinds of panel, drawn from plain data. Every text goes in as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const NUM_COLORS = 7, GREY = -1;
// Cividis: seen alike with any common colour blindness, and in grey.
const SCALE = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];
const DASHES = { solid: "none", dashed: "7 4", dotted: "2 4" };

function fill(element, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}
function svg(name, attributes = {}, text = null) { return fill(document.createElementNS(NS, name), attributes, text); }
function html(name, attributes = {}, text = null) { return fill(document.createElement(name), attributes, text); }

function color(place) { return place === GREY ? "var(--muted)" : `var(--c${place % NUM_COLORS})`; }

function shade(share) {
  const place = Math.max(0, Math.min(1, share)) * (SCALE.length - 1);
  const low = Math.min(SCALE.length - 2, Math.floor(place));
  const rgb = SCALE[low].map((c, i) => Math.round(c + (SCALE[low + 1][i] - c) * (place - low)));
  return `rgb(${rgb.join(",")})`;
}
function inkOn(share) { return share > 0.55 ? "#000" : "#fff"; }

function show(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (percent) return `${Number((100 * value).toPrecision(4))}%`;
  const size = Math.abs(value);
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
}

// -- axes ---------------------------------------------------------------------------------------

const TRANSFORMS = {
  linear: v => v,
  log: v => Math.log10(v),
  root: v => Math.sqrt(Math.max(0, v)),
  angle: v => 1 - Math.sqrt(Math.max(0, Math.min(1, 1 - v))),
};
const ANGLE_TICKS = [0, 0.5, 0.8, 0.9, 0.97, 0.99, 0.999, 1];

function ticks(low, high, wanted, whole) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / Math.max(1, wanted), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * (1 - 1e-9) && (!whole || Number.isInteger(s)));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  return found.filter(t => t >= low * (1 - 1e-9) && t <= high);
}

// How values become places between two pixels, and where ticks stand.
function scaleOf(axis, values, from, to, gap, margin = 0.06) {
  const known = values.filter(v => Number.isFinite(v) && (axis.scale !== "log" || v > 0));
  const f = TRANSFORMS[axis.scale];
  let low = axis.low ?? Math.min(...known), high = axis.high ?? Math.max(...known);
  if (!Number.isFinite(low) || !Number.isFinite(high)) { low = 0; high = 1; }
  if (!(high > low)) { high = low + (Math.abs(low) * 0.1 || 0.5); if (axis.low === null) low -= high - low; }
  if (axis.scale === "linear") {
    const room = margin * (high - low);
    if (axis.low === null) low -= room;
    if (axis.high === null) high += room;
  }
  const place = v => from + (f(v) - f(low)) / (f(high) - f(low)) * (to - from);
  const inside = v => v >= low - 1e-9 * (high - low) && v <= high + 1e-9 * (high - low);
  const all = axis.scale === "log" ? logTicks(low, high)
    : axis.scale === "angle" ? ANGLE_TICKS.filter(t => t >= low && t <= high)
      : ticks(low, high, Math.abs(to - from) / gap, axis.whole);
  let last = Infinity;  // ticks too close to the one before are left out, the end of the scale never
  const shown = all.reverse().filter(t => Math.abs(place(t) - last) >= gap * 0.45 && (last = place(t), true));
  return { place, inside, ticks: shown.reverse(), low, high };
}

// A frame with two axes; returns the drawing and how numbers become places on it.
function frame(box, panel, xs, ys, categories) {
  const width = Math.max(240, box.clientWidth || 600), height = Math.round(Math.min(400, Math.max(230, width * 0.58)));
  const left = 64, right = 14, top = 10, bottom = 44;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": panel.title || panel.y.label || "chart" });
  const x = scaleOf(panel.x, xs, left, width - right, 74, 0.05), y = scaleOf(panel.y, ys, height - bottom, top, 48, 0.07);
  for (const t of y.ticks) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y.place(t), y2: y.place(t) }));
    drawing.append(svg("text", { class: "tick", x: left - 7, y: y.place(t) + 4, "text-anchor": "end" }, show(t, panel.y.percent)));
  }
  const named = categories?.length ? categories.map((name, i) => [i, name]) : x.ticks.map(t => [t, show(t, panel.x.percent)]);
  const longest = Math.max(1, ...named.map(([, name]) => name.length)) * 6.4 + 6;
  const every = categories?.length ? Math.max(1, Math.ceil(longest / ((width - left - right) / categories.length))) : 1;
  named.forEach(([at, name], i) => {
    if (i % every) return;
    const anchor = x.place(at) > width - right - longest / 2 + 8 ? "end" : "middle";
    drawing.append(svg("line", { class: "axis", x1: x.place(at), x2: x.place(at), y1: height - bottom, y2: height - bottom + 4 }));
    drawing.append(svg("text", { class: "tick", x: anchor === "end" ? width - 2 : x.place(at), y: height - bottom + 17, "text-anchor": anchor }, name));
  });
  drawing.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, panel.x.label));
  if (panel.y.label !== panel.title) labelRows(box, drawing, panel.y.label, top, height - bottom);
  const clip = `clip-${++frame.count}`, defs = svg("defs"), path = svg("clipPath", { id: clip });
  path.append(svg("rect", { x: left, y: top - 4, width: width - left - right + 4, height: height - top - bottom + 4 }));
  defs.append(path);
  const inner = svg("g", { "clip-path": `url(#${clip})` });
  drawing.append(defs, inner);
  return { drawing, inner, x, y, width, height, left, right, top, bottom };
}
frame.count = 0;

// The label of the vertical axis, upright beside it; above the drawing if it is too long for that.
function labelRows(box, drawing, label, top, bottom) {
  if (label.length * 6.4 > bottom - top + 16) box.append(html("p", { class: "caption" }, `vertical: ${label}`));
  else if (label) drawing.append(svg("text", { class: "y-label", x: -(top + bottom) / 2, y: 13, transform: "rotate(-90)", "text-anchor": "middle" }, label));
}

// Shapes differ as well as colours, so that either alone tells names apart.
function symbol(kind, cx, cy, r) {
  const around = (n, start) => Array.from({ length: n }, (_, i) => {
    const a = start + 2 * Math.PI * i / n;
    return `${cx + r * 1.15 * Math.cos(a)},${cy + r * 1.15 * Math.sin(a)}`;
  }).join(" ");
  const cross = turn => svg("path", { d: `M${cx - r},${cy - r / 2.4}h${r * 0.6}v${-r * 0.6}h${r * 0.8}v${r * 0.6}h${r * 0.6}v${r * 0.8}h${-r * 0.6}v${r * 0.6}h${-r * 0.8}v${-r * 0.6}h${-r * 0.6}z`, transform: `rotate(${turn} ${cx} ${cy})` });
  switch (((kind % NUM_COLORS) + NUM_COLORS) % NUM_COLORS) {
    case 0: return svg("circle", { cx, cy, r });
    case 1: return svg("rect", { x: cx - r * 0.9, y: cy - r * 0.9, width: 1.8 * r, height: 1.8 * r });
    case 2: return svg("polygon", { points: around(3, -Math.PI / 2) });
    case 3: return svg("polygon", { points: around(4, 0) });
    case 4: return svg("polygon", { points: around(3, Math.PI / 2) });
    case 5: return cross(0);
    default: return cross(45);
  }
}

// -- keys and tips ------------------------------------------------------------------------------

function describe(mark, text, row, column) {
  mark.classList.add("mark");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", text);
  mark.dataset.tip = text;
  if (row !== undefined) mark.dataset.at = `${row},${column}`;
}

const MOVES = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };

// A panel is one stop of the Tab key; arrow keys move between its marks, by row and column if they have some.
function wireKeys(place) {
  const marks = [...place.querySelectorAll("[data-tip]")];
  marks.forEach((mark, i) => mark.setAttribute("tabindex", i ? "-1" : "0"));
  place.addEventListener("keydown", event => {
    const here = marks.indexOf(event.target), move = MOVES[event.key];
    if (here < 0 || !(move || event.key === "Home" || event.key === "End")) return;
    let next = marks[event.key === "Home" ? 0 : marks.length - 1];
    if (move && marks[here].dataset.at) {
      const [row, column] = marks[here].dataset.at.split(",").map(Number);
      next = marks.find(m => m.dataset.at === `${row + move[0]},${column + move[1]}`);
    } else if (move) next = marks[here + move[0] + move[1]];
    event.preventDefault();
    if (!next) return;
    marks[here].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}

// -- charts -------------------------------------------------------------------------------------

function colorOf(item, state) { return item.color ?? state.names.indexOf(item.name); }

function drawChart(box, panel, state) {
  const lines = panel.lines.filter(s => !state.off.has(s.name)), bars = panel.bars.filter(s => !state.off.has(s.name));
  const usedLines = lines.length || bars.length ? lines : panel.lines, usedBars = lines.length || bars.length ? bars : panel.bars;
  const xs = panel.categories.length ? [-0.5, panel.categories.length - 0.5] : usedLines.flatMap(s => s.x);
  const ys = [...usedLines.flatMap(s => [...s.y, ...s.low, ...s.high]), ...usedBars.flatMap(s => [0, ...s.values, ...s.marks].filter(v => v !== null))];
  const axisX = panel.categories.length ? { ...panel.x, low: -0.5, high: panel.categories.length - 0.5 } : panel.x;
  const a = frame(box, { ...panel, x: axisX }, xs, ys, panel.categories);
  for (const s of panel.spans) {
    const from = Math.max(a.left, a.x.place(s.low)), to = Math.min(a.width - a.right, a.x.place(s.high));
    a.inner.append(svg("rect", { class: "span", x: from, y: a.top, width: Math.max(0, to - from), height: a.height - a.top - a.bottom }));
    a.inner.append(svg("text", { class: "tick", x: to - 4, y: a.height - a.bottom - 6, "text-anchor": "end" }, s.name));
  }
  drawBars(a, panel, bars, state);
  lines.forEach((s, row) => drawLine(a, panel, s, row, state));
  for (const r of panel.rules) {
    const at = r.vertical ? { x1: a.x.place(r.value), x2: a.x.place(r.value), y1: a.top, y2: a.height - a.bottom } : { x1: a.left, x2: a.width - a.right, y1: a.y.place(r.value), y2: a.y.place(r.value) };
    a.inner.append(svg("line", { class: "rule", "stroke-dasharray": r.vertical ? "6 4" : "2 4", ...at }));
  }
  wireKeys(a.drawing);
  box.append(a.drawing);
}

function drawLine(a, panel, s, row, state) {
  const place = colorOf(s, state), ink = color(place), at = i => `${a.x.place(s.x[i]).toFixed(1)},${a.y.place(s.y[i]).toFixed(1)}`;
  if (s.low.length) {
    const end = v => a.y.place(panel.y.scale === "log" ? Math.max(v, a.y.low) : v);  // which 0 is below
    const upper = s.x.map((v, i) => `${a.x.place(v)},${end(s.high[i])}`), lower = s.x.map((v, i) => `${a.x.place(v)},${end(s.low[i])}`);
    a.inner.append(svg("polygon", { points: [...upper, ...lower.reverse()].join(" "), fill: ink, opacity: 0.18 }));
  }
  // What a scale cannot show, as 0 on a logarithmic one, is left out.
  const drawn = s.x.map((_, i) => i).filter(i => s.y[i] !== null && Number.isFinite(a.y.place(s.y[i])));
  if (s.style !== "none") a.inner.append(svg("path", { d: drawn.map((i, n) => `${n ? "L" : "M"}${at(i)}`).join(""), fill: "none", stroke: ink, "stroke-width": place === GREY ? 0.8 : 2, opacity: place === GREY ? 0.6 : 1, "stroke-dasharray": DASHES[s.style], "stroke-linejoin": "round" }));
  if (place === GREY && !s.marker) return;
  if (s.labels.length) (a.taken ??= []).push(...along(a, s));
  const every = Math.max(1, Math.round(s.x.length / 20));
  let column = 0;
  s.x.forEach((v, i) => {
    if ((i % every && i !== s.x.length - 1) || !a.x.inside(v) || !a.y.inside(s.y[i])) return;
    const mark = symbol(place, a.x.place(v), a.y.place(s.y[i]), s.marker ? 3.8 : 3);
    mark.setAttribute("fill", s.marker ? (s.style === "dotted" ? "var(--card)" : ink) : "transparent");
    if (s.style === "dotted") mark.setAttribute("stroke", ink);
    const label = s.labels[i] ? `\n${s.labels[i]}` : "";
    describe(mark, `${s.name}${label}\n${panel.x.label} ${panel.categories[v] ?? show(v, panel.x.percent)}\n${panel.y.label} ${show(s.y[i], panel.y.percent)}`, row, column++);
    a.inner.append(mark);
    if (s.labels[i]) nameBeside(a, s.labels[i], a.x.place(v), a.y.place(s.y[i]), "tick");
  });
}

function drawBars(a, panel, bars, state) {
  const slot = (a.x.place(1) - a.x.place(0)) * 0.84, zero = a.y.place(Math.max(0, a.y.low));
  panel.categories.forEach((category, i) => {
    const here = bars.filter(s => s.values[i] !== null), width = slot / Math.max(1, here.length);
    here.forEach((s, n) => {
      const ink = color(colorOf(s, state)), x = a.x.place(i) - slot / 2 + n * width, top = a.y.place(s.values[i]);
      const mark = svg("rect", { x, y: Math.min(top, zero), width: Math.max(1, width - 1), height: Math.max(0.5, Math.abs(zero - top)), fill: ink });
      if (s.hatched.includes(i)) { mark.setAttribute("fill-opacity", 0.3); mark.setAttribute("stroke", ink); mark.setAttribute("stroke-dasharray", "4 3"); }
      const also = s.marks.length && s.marks[i] !== null ? `\n${panel.mark_name} ${show(s.marks[i], panel.y.percent)}` : "";
      describe(mark, `${s.name}\n${panel.x.label} ${category}\n${panel.y.label} ${show(s.values[i], panel.y.percent)}${also}`);
      a.inner.append(mark);
      if (also) {
        const y = a.y.place(s.marks[i]);
        for (const look of ["edge", "level"]) a.inner.append(svg("line", { class: look, x1: x, x2: x + width - 1, y1: y, y2: y }));
      }
      if (s.texts.length && s.texts[i].length * 6.2 < width + 4) {
        const above = Math.max(a.top + 9, Math.min(top, also ? a.y.place(s.marks[i]) : top) - 4);
        a.inner.append(svg("text", { class: "tick", x: x + width / 2, y: above, "text-anchor": "middle" }, s.texts[i]));
      }
    });
  });
}

// Small boxes along a line, which names should not cover.
function along(a, s) {
  return s.x.slice(1).flatMap((v, i) => Array.from({ length: 12 }, (_, k) => {
    const t = (k + 0.5) / 12, x = a.x.place(s.x[i]) * (1 - t) + a.x.place(v) * t, y = a.y.place(s.y[i]) * (1 - t) + a.y.place(s.y[i + 1]) * t;
    return [x - 3, y - 3, x + 3, y + 3];
  }));
}

// A name beside a point, where it covers no other name and no point, if there is such a place.
function nameBeside(a, name, x, y, look, taken = a.taken ??= []) {
  const width = 6.3 * name.length;
  const spots = [[x + 6, y - 11, "start"], [x + 6, y + 20, "start"], [x + 10, y + 4, "start"], [x - 10, y + 4, "end"], [x - 6, y - 10, "end"], [x - 6, y + 20, "end"]];
  for (const [tx, ty, anchor] of spots) {
    const left = anchor === "start" ? tx : tx - width, box = [left, ty - 11, left + width, ty + 3];
    if (left < a.left || left + width > a.width - a.right || ty < 12 || ty > a.height - a.bottom) continue;
    if (taken.some(t => t[0] < box[2] && box[0] < t[2] && t[1] < box[3] && box[1] < t[3])) continue;
    taken.push(box);
    a.drawing.append(svg("text", { x: tx, y: ty, "text-anchor": anchor, class: look }, name));
    return;
  }
}

// -- scatter ------------------------------------------------------------------------------------

// Values with their intervals; an end so far out that the values would be one dot is cut off.
function around(intervals) {
  const values = intervals.map(i => i[0]), low = Math.min(...values), high = Math.max(...values);
  const most = Math.max(high - low, 0.2 * Math.abs(high));
  return intervals.flat().map(v => Math.max(low - most, Math.min(high + most, v)));
}

function drawScatter(box, panel, state) {
  const shown = panel.points.filter(p => !state.off.has(p.group)).sort((p, q) => p.x - q.x);
  const points = shown.length ? shown : panel.points;
  const a = frame(box, panel, around(points.map(p => [p.x, p.x_low ?? p.x, p.x_high ?? p.x])), around(points.map(p => [p.y, p.y_low ?? p.y, p.y_high ?? p.y])));
  const detail = html("div", { class: "chosen", role: "status", hidden: "" });
  const spot = p => [a.x.place(p.x), a.y.place(p.y)];
  const best = shown.filter(p => p.optimal);
  const path = best.map((p, i) => (i ? `H${spot(p)[0]}V${spot(p)[1]}` : `M${spot(p)}`)).join("");
  if (path) a.inner.append(svg("path", { d: path, fill: "none", stroke: "var(--muted)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }));
  for (const p of shown) {
    const place = state.names.indexOf(p.group), [x, y] = spot(p), ink = color(place);
    const bars = svg("g", { stroke: ink, opacity: p.optimal !== false ? 0.8 : 0.4 });
    if (p.y_low !== null) bars.append(svg("line", { x1: x, x2: x, y1: a.y.place(p.y_low), y2: a.y.place(p.y_high) }));
    if (p.x_low !== null) bars.append(svg("line", { x1: a.x.place(p.x_low), x2: a.x.place(p.x_high), y1: y, y2: y }));
    a.inner.append(bars);
    const mark = symbol(place, x, y, p.optimal ? 6.5 : 5);
    mark.setAttribute("fill", p.optimal !== false ? ink : "var(--card)");
    mark.setAttribute("stroke", ink);
    mark.setAttribute("stroke-width", 1.6);
    describe(mark, [p.name, ...p.details, ...(p.optimal === null ? [] : [p.optimal ? "no other point is as good and cheaper" : "another point is at least as good and cheaper"])].join("\n"));
    const choose = () => { state.picked = p.name; showPoint(detail, p); };
    mark.addEventListener("click", choose);
    mark.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    a.drawing.append(mark);
  }
  a.taken = shown.map(spot).map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]);
  for (const p of [...best, ...shown.filter(p => !p.optimal)]) nameBeside(a, p.name, ...spot(p), p.optimal !== false ? "name" : "name beaten");
  wireKeys(a.drawing);
  box.append(a.drawing, detail);
  const picked = panel.points.find(p => p.name === state.picked);
  if (picked) showPoint(detail, picked);
}

// What a chosen point is, where its run stands in this page, and the command that runs it.
function showPoint(place, p) {
  place.replaceChildren(html("strong", {}, p.name), html("p", {}, p.details.join("; ")));
  if (p.folder) {
    const run = html("p", {}, "run: ");
    run.append(p.section === null ? html("code", {}, p.folder) : html("a", { href: `#run-${p.section}` }, p.folder));
    place.append(run);
  }
  if (p.command) place.append(command(p.command));
  place.hidden = false;
}

// -- heat maps ----------------------------------------------------------------------------------

function shareOf(axis, value) {
  const f = TRANSFORMS[axis.scale], low = f(axis.low), high = f(axis.high);
  return (f(value) - low) / (high - low || 1);
}

// The cells with their texts; `leastCell` is their least width, and `tip` tells what is said of one.
function grid(box, panel, values, texts, { leastCell = 0, tip = null } = {}) {
  const rows = values.length, columns = values[0].length;
  const room = Math.max(240, box.clientWidth || 600, leastCell * columns + 70);
  const width = Math.min(panel.square ? 560 : Infinity, room), top = 8, bottom = 44;
  const longest = Math.max(...panel.rows.map(r => r.length));
  const left = Math.min(width * 0.4, 7 * longest + (panel.y.label ? 30 : 14));
  const cell = (width - left - 10) / columns;
  const height = Math.min(panel.square ? Infinity : rows <= 4 ? 48 : 30, Math.max(12, cell));
  const total = top + bottom + rows * height;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${total}`, role: "group", "aria-label": panel.title || panel.value.label, style: `max-width:${width}px${leastCell ? `;width:${width}px` : ""}` });
  const at = r => top + (panel.upwards ? rows - 1 - r : r) * height;
  const widest = Math.max(...panel.columns.map(c => c.length)) * 7 + 8;
  const every = Math.max(1, Math.ceil(widest / cell)), rowEvery = Math.max(1, Math.ceil(14 / height));
  const framed = new Set(panel.framed.map(String));
  for (let r = 0; r < rows; r++) {
    if (r % rowEvery === 0) drawing.append(svg("text", { class: "tick", x: left - 6, y: at(r) + height / 2 + 4, "text-anchor": "end" }, panel.rows[r]));
    for (let c = 0; c < columns; c++) {
      const value = values[r][c];
      if (value === null) continue;
      const share = shareOf(panel.value, value), below = value < panel.value.low;
      const mark = svg("rect", { x: left + c * cell + 0.5, y: at(r) + 0.5, width: Math.max(1, cell - 1), height: height - 1, fill: below ? "var(--line)" : shade(share) });
      if (framed.has(`${r},${c}`)) { mark.classList.add("framed"); mark.setAttribute("width", Math.max(1, cell - 3)); mark.setAttribute("x", left + c * cell + 1.5); }
      describe(mark, tip ? tip(r, c) : `${panel.y.label || "row"} ${panel.rows[r]}, ${panel.x.label} ${panel.columns[c]}\n${panel.value.label} ${show(value, panel.value.percent)}${below ? ` (below ${panel.value.low})` : ""}${panel.details?.length ? `\n${panel.details[r][c]}` : ""}`, panel.upwards ? rows - 1 - r : r, c);
      drawing.append(mark);
      const word = texts.length ? texts[r][c] : "";
      if (word && word.length * 6.6 < cell && height > 13) drawing.append(svg("text", { x: left + (c + 0.5) * cell, y: at(r) + height / 2 + 4, "text-anchor": "middle", style: `fill:${inkOn(share)};pointer-events:none` }, word));
    }
  }
  for (let c = 0; c < columns; c += every) drawing.append(svg("text", { class: "tick", x: left + (c + 0.5) * cell, y: total - bottom + 15, "text-anchor": "middle" }, panel.columns[c]));
  // Of cells that are scrolled through, the middle may be out of sight.
  drawing.append(svg("text", { x: leastCell ? left : left + (width - left) / 2, y: total - 6, "text-anchor": leastCell ? "start" : "middle" }, panel.x.label));
  labelRows(box, drawing, panel.y.label, top, top + rows * height);
  wireKeys(drawing);
  return drawing;
}

function scaleBar(box, low, high, name, below) {
  const line = html("div", { class: "caption" }), bar = svg("svg", { class: "scale", viewBox: "0 0 144 13", "aria-hidden": "true" });
  for (let i = 0; i < 48; i++) bar.append(svg("rect", { x: 3 * i, y: 0, width: 6, height: 13, fill: shade(i / 47) }));
  line.append(`${low} `, bar, ` ${high} ${name}`);
  if (below) { const swatch = html("span", { class: "scale below" }); line.append(" ", swatch, ` below ${low}`); }
  box.append(line);
}

function drawHeat(box, panel, state) {
  if (panel.frames.length > 1) drawFrames(box, panel, state);
  else box.append(grid(box, panel, panel.values, panel.texts));
  const below = panel.values.some(row => row.some(v => v !== null && v < panel.value.low));
  scaleBar(box, show(panel.value.low, panel.value.percent), show(panel.value.high, panel.value.percent), panel.value.label, below);
}

// A heat map that moves: a slider over its frames, and a button that plays them.
function drawFrames(box, panel, state) {
  const controls = html("div", { class: "controls" }), last = panel.frames.length - 1, id = `slider-${state.number}`;
  const slider = html("input", { type: "range", min: 0, max: last, id, value: state.at ?? last, "aria-label": "moment shown" });
  const told = html("output", { for: id }), play = html("button", { type: "button" }, "Play"), place = html("div");
  controls.append(slider, play, told);
  box.append(controls, place);
  function update() {
    state.at = Number(slider.value);
    const now = panel.frames[state.at];
    told.textContent = now.name;
    slider.setAttribute("aria-valuetext", now.name);
    place.replaceChildren(grid(box, panel, now.values, now.texts));
  }
  let timer = null;
  function stop() { clearInterval(timer); timer = null; play.textContent = "Play"; }
  slider.addEventListener("input", () => { stop(); update(); });
  play.addEventListener("click", () => {
    if (timer) { stop(); return; }
    if (Number(slider.value) === last) slider.value = 0;
    play.textContent = "Stop";
    timer = setInterval(() => {
      if (!place.isConnected || Number(slider.value) >= last) { stop(); return; }
      slider.value = Number(slider.value) + 1;
      update();
    }, 90);
  });
  update();
}

// -- texts and diagrams -------------------------------------------------------------------------

function drawTokens(box, panel, state) {
  const text = html("div", { class: "tokens" });
  panel.tokens.forEach((token, i) => {
    const depth = panel.depth[i], share = depth === null ? null : depth / panel.last;
    const told = depth === null ? "part of the prompt" : `${panel.depth_name}: ${show(depth)} of ${show(panel.last)}`;
    const mark = html("span", { role: "img", class: "token", "aria-label": `${token}: ${told}` }, token);
    mark.dataset.tip = told;
    if (share !== null) { mark.style.background = shade(share); mark.style.color = inkOn(share); }
    text.append(mark);
  });
  wireKeys(text);
  box.append(text);
  scaleBar(box, "0", show(panel.last), panel.depth_name);
  if (panel.lens) drawLens(box, panel, state);
}

// Layers by tokens: what is predicted, shaded by a statistic of the reader's choice.
function drawLens(box, panel, state) {
  const lens = panel.lens, last = lens.layers.length - 1, tables = { probability: lens.probability, ...lens.statistics };
  const controls = html("div", { class: "controls" }), label = html("label", {}, "shade by "), place = html("div");
  const select = html("select", { "aria-label": "what the cells are shaded by" });
  for (const name of Object.keys(tables)) select.append(html("option", { value: name }, name));
  select.value = state.statistic ?? "probability";
  label.append(select);
  controls.append(label);
  box.append(controls, place);
  const tip = (r, c) => [
    `layer ${lens.layers[r]}, after “${panel.tokens[c]}”`,
    ...(lens.top.length ? lens.top[r][c].map((word, i) => `${i + 1}. ${lens.words[word]}  ${show(lens.top_probability[r][c][i], true)}`) : [`${lens.predictions[r][c]}  ${show(lens.probability[r][c], true)}`]),
    ...Object.entries(lens.statistics).filter(([, table]) => table[r][c] !== null).map(([name, table]) => `${name}: ${show(table[r][c])}`),
  ].join("\n");
  const framed = panel.tokens.map((_, c) => [lens.layers.findIndex(layer => layer >= panel.depth[c]), c]).filter(([r]) => r < last);
  function update() {
    const name = state.statistic = select.value, values = tables[name], known = values.flat().filter(v => v !== null);
    const isRank = name.startsWith("rank"), high = name === "probability" ? 1 : Math.max(...known, isRank ? 2 : 0.01);
    const value = { label: name, scale: isRank ? "log" : "linear", low: isRank ? 1 : 0, high, percent: false };
    const heat = { rows: lens.layers.map(String), columns: panel.tokens, x: { label: "token read" }, y: { label: "layer" }, value, framed, upwards: true, square: false, title: name };
    const scroll = html("div", { class: "scroll", tabindex: "-1" });
    place.replaceChildren(scroll);
    scroll.append(grid(place, heat, values, lens.predictions, { leastCell: 52, tip }));
    scaleBar(place, show(value.low), show(value.high), `${name}; framed: from this layer on the prediction stays the same`);
  }
  select.addEventListener("change", update);
  update();
}

function drawDiagram(box, panel) {
  if (panel.facts) box.append(html("p", { class: "caption" }, panel.facts));
  const row = html("div", { class: "diagram", role: "img", "aria-label": `tokens, ${panel.blocks.join(", ")}, next token` });
  row.append(html("span", {}, "tokens"));
  panel.blocks.forEach((block, i) => {
    const place = html("span", { class: `block ${block}` }, block);
    place.append(html("small", {}, String(i + 1)));
    row.append(place);
  });
  row.append(html("span", {}, "next token"));
  box.append(row);
}

const DRAW = { chart: drawChart, scatter: drawScatter, heat: drawHeat, tokens: drawTokens, diagram: drawDiagram };
