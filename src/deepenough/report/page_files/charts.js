"use strict";
// Drawings as SVG, from plain data. Every text goes in as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const NUM_COLORS = 7;
// Cividis: seen alike with any common colour blindness, and in grey.
const SCALE = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

function svg(name, attributes = {}, text = null) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function html(name, attributes = {}, text = null) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function color(index) { return `var(--c${index % NUM_COLORS})`; }

function shade(share) {
  const place = Math.max(0, Math.min(1, share)) * (SCALE.length - 1);
  const low = Math.min(SCALE.length - 2, Math.floor(place));
  const rgb = SCALE[low].map((c, i) => Math.round(c + (SCALE[low + 1][i] - c) * (place - low)));
  return `rgb(${rgb.join(",")})`;
}

function inkOn(share) { return share > 0.55 ? "#000" : "#fff"; }

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, wanted, whole = false) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / Math.max(1, wanted), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw && (!whole || Number.isInteger(s)));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function range(values, margin) {
  const known = values.filter(v => Number.isFinite(v));
  let low = Math.min(...known), high = Math.max(...known);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  return [low - margin * (high - low), high + margin * (high - low)];
}

// A frame with two axes; returns the drawing and how numbers become places on it.
function axes(box, spec, xs, ys) {
  const width = Math.max(300, box.clientWidth || 600), height = Math.round(Math.min(400, Math.max(260, width * 0.58)));
  const left = 58, right = 14, top = 10, bottom = 44;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": spec.title || "chart" });
  const [x0, x1] = range(xs, 0.05), [y0, y1] = spec.percent ? [Math.min(...ys, 1) - 0.02, 1.02] : range(ys, 0.07);
  const x = v => left + (v - x0) / (x1 - x0) * (width - left - right);
  const y = v => height - bottom - (v - y0) / (y1 - y0) * (height - top - bottom);
  for (const t of ticks(y0, y1, height / 60)) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(t), y2: y(t) }));
    drawing.append(svg("text", { class: "tick", x: left - 7, y: y(t) + 4, "text-anchor": "end" }, spec.percent ? `${show(100 * t)}%` : show(t)));
  }
  for (const t of spec.labels ? [] : ticks(x0, x1, width / 90, xs.every(Number.isInteger))) {
    drawing.append(svg("line", { class: "axis", x1: x(t), x2: x(t), y1: height - bottom, y2: height - bottom + 4 }));
    drawing.append(svg("text", { class: "tick", x: x(t), y: height - bottom + 17, "text-anchor": "middle" }, show(t)));
  }
  drawing.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x_label));
  drawing.append(svg("text", { class: "y-label", x: -(top + height - bottom) / 2, y: 13, transform: "rotate(-90)", "text-anchor": "middle" }, spec.y_label));
  return { drawing, x, y, width, height, left, right, top, bottom };
}

// Shapes differ as well as colours, so that either alone tells groups apart.
function symbol(kind, cx, cy, r) {
  const around = (n, turn) => Array.from({ length: n }, (_, i) => {
    const a = turn + 2 * Math.PI * i / n;
    return `${cx + r * 1.15 * Math.cos(a)},${cy + r * 1.15 * Math.sin(a)}`;
  }).join(" ");
  if (kind % 5 === 0) return svg("circle", { cx, cy, r });
  if (kind % 5 === 1) return svg("rect", { x: cx - r * 0.9, y: cy - r * 0.9, width: 1.8 * r, height: 1.8 * r });
  return svg("polygon", { points: [null, null, around(3, -Math.PI / 2), around(4, 0), around(3, Math.PI / 2)][kind % 5] });
}

const hidden = new WeakMap(); // figure data -> names of groups that are switched off

function legend(box, spec, names, redraw) {
  const off = hidden.get(spec) || new Set();
  hidden.set(spec, off);
  const list = html("div", { class: "legend" });
  names.forEach((name, index) => {
    const button = html("button", { type: "button", "aria-pressed": String(!off.has(name)) });
    const icon = svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" });
    const mark = symbol(index, 7, 7, 5);
    mark.setAttribute("fill", color(index));
    icon.append(mark);
    button.append(icon, name);
    button.addEventListener("click", () => { off.has(name) ? off.delete(name) : off.add(name); redraw(name); });
    list.append(button);
  });
  box.append(list);
  return off;
}

function describe(mark, text, row, column) {
  mark.classList.add("mark");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", text);
  mark.dataset.tip = text;
  if (row !== undefined) mark.dataset.at = `${row},${column}`;
}

const MOVES = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };

// A chart is one stop of the Tab key; arrow keys move between its marks, by row and column if they have some.
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

function drawLines(box, spec, redraw) {
  const names = spec.series.map(s => s.name);
  const off = names.length > 1 ? legend(box, spec, names, redraw) : new Set();
  const shown = spec.series.filter(s => !off.has(s.name));
  const used = shown.length ? shown : spec.series;
  const a = axes(box, spec, used.flatMap(s => s.x), used.flatMap(s => s.y));
  for (const s of shown) {
    const index = names.indexOf(s.name), ink = color(index);
    const path = s.x.map((v, i) => `${i ? "L" : "M"}${a.x(v).toFixed(1)},${a.y(s.y[i]).toFixed(1)}`).join("");
    a.drawing.append(svg("path", { d: path, fill: "none", stroke: ink, "stroke-width": 2, "stroke-dasharray": s.dashed ? "4 4" : "none", "stroke-linejoin": "round" }));
    const every = Math.max(1, Math.round(s.x.length / 20));
    s.x.forEach((v, i) => {
      if (i % every && i !== s.x.length - 1) return;
      const mark = symbol(index, a.x(v), a.y(s.y[i]), 3.6);
      mark.setAttribute("fill", ink);
      describe(mark, `${s.name}\n${spec.x_label} ${show(v)}\n${spec.y_label} ${show(s.y[i])}`, shown.indexOf(s), Math.ceil(i / every));
      a.drawing.append(mark);
    });
  }
  wireKeys(a.drawing);
  box.append(a.drawing);
}

function grid(box, spec, values, texts) {
  const rows = values.length, columns = values[0].length;
  const width = Math.max(300, box.clientWidth || 600), left = spec.row_width || 58, top = 8, bottom = 44;
  const cell = (width - left - 10) / columns;
  const height = Math.min(spec.cell_height || 34, Math.max(12, cell));
  const total = top + bottom + rows * height;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${total}`, role: "group", "aria-label": spec.title || "table of colours" });
  const up = spec.upwards, at = r => top + (up ? rows - 1 - r : r) * height;
  const every = Math.max(1, Math.ceil(24 / cell)), rowEvery = Math.max(1, Math.ceil(14 / height));
  for (let r = 0; r < rows; r++) {
    if (r % rowEvery === 0) drawing.append(svg("text", { class: "tick", x: left - 6, y: at(r) + height / 2 + 4, "text-anchor": "end" }, spec.rows[r]));
    for (let c = 0; c < columns; c++) {
      const value = values[r][c];
      if (value === null) continue;
      const share = (value - spec.low) / (spec.high - spec.low || 1);
      const mark = svg("rect", { x: left + c * cell + 0.5, y: at(r) + 0.5, width: Math.max(1, cell - 1), height: height - 1, fill: shade(share) });
      describe(mark, `${spec.row_name} ${spec.rows[r]}, ${spec.column_name} ${spec.columns[c]}\n${spec.value_name} ${show(value)}`, up ? rows - 1 - r : r, c);
      drawing.append(mark);
      const word = texts ? texts[r][c] : (rows * columns <= 400 && cell > 34 ? (spec.high <= 1 ? value.toFixed(2) : show(Number(value.toPrecision(3)))) : null);
      if (word) drawing.append(svg("text", { x: left + (c + 0.5) * cell, y: at(r) + height / 2 + 4, "text-anchor": "middle", style: `fill:${inkOn(share)};pointer-events:none` }, word));
    }
  }
  for (let c = 0; c < columns; c += every) drawing.append(svg("text", { class: "tick", x: left + (c + 0.5) * cell, y: total - bottom + 15, "text-anchor": "middle" }, spec.columns[c]));
  drawing.append(svg("text", { x: left + (width - left) / 2, y: total - 6, "text-anchor": "middle" }, spec.x_label));
  drawing.append(svg("text", { x: -(top + rows * height / 2), y: 13, transform: "rotate(-90)", "text-anchor": "middle" }, spec.y_label));
  wireKeys(drawing);
  return drawing;
}

function scaleBar(box, spec) {
  const line = html("div", { class: "caption" });
  const bar = html("span", { class: "scale" });
  bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(shade).join(",")})`;
  line.append(`${show(spec.low)} `, bar, ` ${show(spec.high)} ${spec.value_name}`);
  box.append(line);
}

function drawHeat(box, spec) {
  box.append(grid(box, spec, spec.values));
  scaleBar(box, spec);
}

function drawBars(box, spec, redraw) {
  const names = spec.series.map(s => s.name);
  const off = names.length > 1 ? legend(box, spec, names, redraw) : new Set();
  const shown = spec.series.filter(s => !off.has(s.name)), used = shown.length ? shown : spec.series;
  const places = spec.labels.map((_, i) => i);
  const a = axes(box, { ...spec, x_label: "" }, [-0.5, spec.labels.length - 0.5], [0, ...used.flatMap(s => s.values)]);
  const slot = (a.x(1) - a.x(0)) * 0.84, zero = a.y(0);
  for (const i of places) {
    const every = Math.max(1, Math.ceil(26 / (slot / 0.84)));
    if (i % every === 0) a.drawing.append(svg("text", { class: "tick", x: a.x(i), y: a.height - a.bottom + 17, "text-anchor": "middle" }, spec.labels[i]));
    const here = shown.filter(s => s.values[i] !== null), width = slot / Math.max(1, here.length);
    here.forEach((s, n) => {
      const top = a.y(s.values[i]);
      const mark = svg("rect", { x: a.x(i) - slot / 2 + n * width, y: Math.min(top, zero), width: Math.max(1, width - 1), height: Math.abs(zero - top), fill: color(names.indexOf(s.name)) });
      describe(mark, `${s.name}\n${spec.x_label} ${spec.labels[i]}\n${spec.y_label} ${show(s.values[i])}`);
      a.drawing.append(mark);
    });
  }
  wireKeys(a.drawing);
  a.drawing.append(svg("text", { x: a.width / 2, y: a.height - 6, "text-anchor": "middle" }, spec.x_label));
  box.append(a.drawing);
}
