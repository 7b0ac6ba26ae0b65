// The data behind a panel, as a table of columns and rows.

const TABLES = {
  scatter: panel => ({
    columns: ["name", "group", panel.y.label, "low", "high", panel.x.label, "low", "high", "Pareto-optimal"],
    rows: panel.points.map(p => [p.name, p.group, p.y, p.y_low, p.y_high, p.x, p.x_low, p.x_high, p.optimal ? "yes" : "no"]),
  }),
  chart: panel => ({
    columns: ["name", panel.x.label, panel.y.label],
    rows: [
      ...panel.bars.flatMap(s => panel.categories.map((category, i) => [s.name, category, s.values[i]])),
      ...panel.lines.flatMap(s => s.x.map((x, i) => [s.name, panel.categories[x] ?? x, s.y[i]])),
    ],
  }),
  heat: panel => panel.frames.length > 1 ? {
    columns: ["moment", panel.y.label || "row", ...panel.columns.map(c => `${panel.x.label} ${c}`)],
    rows: panel.frames.flatMap(f => f.values.map((row, r) => [f.name, panel.rows[r], ...row])),
  } : {
    columns: [`${panel.y.label} \\ ${panel.x.label}`, ...panel.columns],
    rows: panel.values.map((row, r) => [panel.rows[r], ...row]),
  },
  tokens: panel => ({
    columns: ["token", panel.depth_name, ...(panel.lens ? panel.lens.layers.flatMap(l => [`layer ${l}`, `probability, layer ${l}`]) : [])],
    rows: panel.tokens.map((t, i) => [t, panel.depth[i], ...(panel.lens ? panel.lens.predictions.flatMap((row, l) => [row[i], panel.lens.probability[l][i]]) : [])]),
  }),
  diagram: panel => ({ columns: ["block", "type"], rows: panel.blocks.map((block, i) => [i + 1, block]) }),
};

// A command that can be taken along.
function command(text) {
  const line = html("div", { class: "tools" }), code = html("code", { class: "command" });
  // Word by word, so that a line ends between two of them and not within a name of an option.
  for (const word of text.split(/(?<= )/)) code.append(html("span", {}, word));
  const button = html("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  line.append(code, button);
  return line;
}

function csv(content) {
  const cell = v => v === null || v === undefined ? "" : /[",\n\r]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : String(v);
  return [content.columns, ...content.rows].map(row => row.map(cell).join(",")).join("\r\n");
}

function less(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), undefined, { numeric: true });
}

// The data of a panel as a table that a press on a column's name sorts, and as a file to save.
function dataTable(spec, panel) {
  const content = TABLES[panel.kind](panel), table = html("table"), head = html("tr"), body = html("tbody");
  function fill(rows) {
    body.replaceChildren(...rows.map(row => {
      const line = html("tr");
      for (const value of row) line.append(html("td", {}, show(value)));
      return line;
    }));
  }
  content.columns.forEach((name, column) => {
    const cell = html("th", { scope: "col" }), button = html("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      fill([...content.rows].sort((a, b) => (down ? -1 : 1) * less(a[column], b[column])));
    });
    cell.append(button);
    head.append(cell);
  });
  fill(content.rows);
  const top = html("thead");
  top.append(head);
  table.append(top, body);
  const name = spec.panels.length > 1 && panel.title ? `${spec.title} ${panel.title}` : spec.title;
  const save = html("a", { class: "save", download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.csv`,
    href: `data:text/csv;charset=utf-8,${encodeURIComponent(csv(content).replace(/[\uD800-\uDFFF]/gu, "\uFFFD"))}` }, spec.panels.length > 1 && panel.title ? `Save “${panel.title}” as CSV` : "Save as CSV");
  return [save, table];
}

// -- pictures -----------------------------------------------------------------------------------

const LOOK = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order", "font-size", "font-family", "font-weight", "text-anchor"];

// A drawing by itself: with the look that the style sheet gives it, and nothing that is only for the page.
function standalone(drawing) {
  const copy = drawing.cloneNode(true), copies = [copy, ...copy.querySelectorAll("*")];
  [drawing, ...drawing.querySelectorAll("*")].forEach((element, i) => {
    const look = getComputedStyle(element);
    for (const name of [...copies[i].getAttributeNames()]) if (/^(class|style|role|tabindex|data-.*|aria-.*)$/.test(name)) copies[i].removeAttribute(name);
    for (const name of LOOK) copies[i].setAttribute(name, look.getPropertyValue(name));
  });
  return copy;
}

// A figure as one drawing: its title, and all that stands in it where it stands.
function picture(figure, title) {
  const chart = figure.querySelector(".chart"), origin = chart.getBoundingClientRect(), parts = [], margin = 12, head = 34;
  const base = getComputedStyle(chart);
  let right = 0, bottom = 0;
  const move = box => { const x = box.left - origin.left + chart.scrollLeft, y = box.top - origin.top + head; right = Math.max(right, x + box.width); bottom = Math.max(bottom, y + box.height); return [x, y]; };
  function words(node, look) {
    for (const found of node.textContent.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const box = range.getBoundingClientRect(), [x, y] = move(box);
      parts.push(svg("text", { x, y: y + 0.78 * box.height, fill: look.color, "font-size": look.fontSize, "font-family": look.fontFamily, "font-weight": look.fontWeight }, found[0]));
    }
  }
  function walk(element) {
    if (element.hidden || element.classList.contains("controls")) return;
    const look = getComputedStyle(element), box = element.getBoundingClientRect();
    if (element.namespaceURI === NS) {
      const [x, y] = move(box), copy = standalone(element);
      for (const [name, value] of Object.entries({ x, y, width: box.width, height: box.height })) copy.setAttribute(name, value);
      parts.push(copy);
      return;
    }
    const [x, y] = move(box), dashes = look.borderTopStyle === "dashed" ? "4 3" : "none", edge = parseFloat(look.borderTopWidth) || 0;
    const ground = look.backgroundColor, clear = ground === "rgba(0, 0, 0, 0)";
    if (!clear || (edge && look.borderTopColor !== "rgba(0, 0, 0, 0)")) parts.push(svg("rect", { x, y, width: box.width, height: box.height, rx: parseFloat(look.borderRadius) || 0, fill: clear ? "none" : ground, ...(edge ? { stroke: look.borderTopColor, "stroke-width": edge, "stroke-dasharray": dashes } : {}) }));
    for (const child of element.childNodes) child.nodeType === Node.TEXT_NODE ? words(child, look) : child.nodeType === Node.ELEMENT_NODE && walk(child);
  }
  for (const child of chart.children) walk(child);
  const width = Math.ceil(right) + 2 * margin, height = Math.ceil(bottom) + 2 * margin;
  const whole = svg("svg", { xmlns: NS, width, height, viewBox: `${-margin} ${-margin} ${width} ${height}` });
  whole.append(svg("rect", { x: -margin, y: -margin, width, height, fill: getComputedStyle(figure).backgroundColor }));
  whole.append(svg("text", { x: 0, y: 14, fill: base.color, "font-size": "16px", "font-weight": "bold", "font-family": base.fontFamily }, title), ...parts);
  const text = new XMLSerializer().serializeToString(whole).replace(/[\uD800-\uDFFF]/gu, "\uFFFD");
  return { width, height, url: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}` };
}

function saveAs(name, url) { html("a", { href: url, download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}` + (url.startsWith("data:image/png") ? ".png" : ".svg") }).click(); }

function wirePictures(figure, spec, state) {
  const title = () => spec.choice ? `${spec.title}: ${spec.panels[state.chosen].title}` : spec.title;
  figure.querySelector(".save-svg").addEventListener("click", () => saveAs(title(), picture(figure, title()).url));
  figure.querySelector(".save-png").addEventListener("click", async () => {
    const { width, height, url } = picture(figure, title()), image = new Image(), canvas = html("canvas", { width: 2 * width, height: 2 * height });
    image.src = url;
    await image.decode();
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    saveAs(title(), canvas.toDataURL("image/png"));
  });
}
