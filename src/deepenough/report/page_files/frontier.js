// Quality against a cost that the reader chooses: points, their intervals, their names, and what runs them.

// Values with their intervals; an end so far out that the values would be one dot is cut off.
function around(intervals) {
  const values = intervals.map(i => i[0]), low = Math.min(...values), high = Math.max(...values);
  const most = Math.max(high - low, 0.2 * Math.abs(high));
  return intervals.flat().map(v => Math.max(low - most, Math.min(high + most, v)));
}

// Names beside the points, each where it covers no other name and no point, if there is such a place.
function namePoints(a, named, places) {
  const taken = places.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]);
  for (const [p, x, y, look] of named) {
    const width = 6.1 * p.name.length;
    const spots = [[x + 6, y - 11, "start"], [x + 6, y + 20, "start"], [x + 10, y + 4, "start"], [x - 10, y + 4, "end"], [x - 6, y - 10, "end"], [x - 6, y + 20, "end"]];
    for (const [tx, ty, anchor] of spots) {
      const left = anchor === "start" ? tx : tx - width, box = [left, ty - 11, left + width, ty + 3];
      if (left < a.left || left + width > a.width - a.right || ty < 12 || ty > a.height - a.bottom) continue;
      if (taken.some(t => t[0] < box[2] && box[0] < t[2] && t[1] < box[3] && box[1] < t[3])) continue;
      taken.push(box);
      a.drawing.append(svg("text", { x: tx, y: ty, "text-anchor": anchor, class: look }, p.name));
      break;
    }
  }
}

function drawFrontier(box, spec, redraw) {
  const choice = spec.chosen || (spec.chosen = spec.costs[spec.costs.length - 1].key);
  const cost = spec.costs.find(c => c.key === choice);
  const controls = html("div", { class: "controls" });
  const label = html("label", {}, "cost ");
  const select = html("select", { "aria-label": "which cost the horizontal axis shows" });
  for (const c of spec.costs) select.append(html("option", { value: c.key }, c.label));
  select.value = choice;
  select.addEventListener("change", () => { spec.chosen = select.value; redraw(null, "select"); });
  label.append(select);
  controls.append(label);
  box.append(controls);
  const groups = [...new Set(spec.points.map(p => p.group))];
  const off = legend(box, spec, groups, redraw);
  const at = p => p.costs[choice];
  const shown = spec.points.filter(p => !off.has(p.group)).sort((p, q) => at(p).value - at(q).value);
  const points = shown.length ? shown : spec.points;
  const a = axes(box, { ...spec, x_label: cost.label },
    around(points.map(p => [at(p).value, at(p).low ?? at(p).value, at(p).high ?? at(p).value])),
    around(points.map(p => [p.quality, p.low, p.high])));
  const detail = html("div", { class: "chosen", role: "status", hidden: "" });
  const best = shown.filter(p => p.optimal.includes(choice));
  let path = "";
  best.forEach((p, i) => { path += i ? `H${a.x(at(p).value)}V${a.y(p.quality)}` : `M${a.x(at(p).value)},${a.y(p.quality)}`; });
  if (path) a.drawing.append(svg("path", { d: path, fill: "none", stroke: "var(--muted)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }));
  for (const p of shown) {
    const index = groups.indexOf(p.group), x = a.x(at(p).value), y = a.y(p.quality), ink = color(index);
    const optimal = p.optimal.includes(choice);
    const bars = svg("g", { stroke: ink, opacity: optimal ? 0.8 : 0.4 });
    bars.append(svg("line", { x1: x, x2: x, y1: Math.min(a.y(p.low), a.height - a.bottom), y2: Math.max(a.y(p.high), a.top) }));
    if (at(p).low !== undefined) bars.append(svg("line", { x1: Math.max(a.x(at(p).low), a.left), x2: Math.min(a.x(at(p).high), a.width - a.right), y1: y, y2: y }));
    a.drawing.append(bars);
    const mark = symbol(index, x, y, optimal ? 6.5 : 5);
    mark.setAttribute("fill", optimal ? ink : "var(--card)");
    mark.setAttribute("stroke", ink);
    mark.setAttribute("stroke-width", 1.6);
    describe(mark, `${p.name}\n${spec.y_label} ${show(p.quality)} (${show(p.low)} to ${show(p.high)})\n`
      + spec.costs.map(c => `${c.label}: ${show(p.costs[c.key].value)}`).join("\n")
      + (optimal ? "\nno other point beats it" : "\nanother point is at least as good and costs less"));
    const choose = () => { spec.picked = p; showPoint(detail, spec, p); };
    mark.addEventListener("click", choose);
    mark.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    a.drawing.append(mark);
  }
  const spot = p => [a.x(at(p).value), a.y(p.quality)];
  const named = [...best, ...shown.filter(p => !best.includes(p))];
  namePoints(a, named.map(p => [p, ...spot(p), best.includes(p) ? "name" : "name beaten"]), shown.map(spot));
  wireKeys(a.drawing);
  box.append(a.drawing, detail);
  if (spec.picked) showPoint(detail, spec, spec.picked);
}

// What a chosen point is, where its run stands in this page, and the command that runs it.
function showPoint(place, spec, p) {
  const name = html("strong", {}, p.name), run = html("p", {}, "run: ");
  run.append(p.section === null ? html("code", {}, p.folder) : html("a", { href: `#section-${p.section}` }, p.folder));
  const costs = spec.costs.map(c => `${c.label} ${show(p.costs[c.key].value)}`).join(", ");
  place.replaceChildren(name, html("p", {}, `${spec.y_label} ${show(p.quality)} (${show(p.low)} to ${show(p.high)}); ${costs}`), run);
  if (p.command) place.append(command(p.command));
  place.hidden = false;
}
