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
    columns: ["token", panel.depth_name, ...(panel.lens ? panel.lens.layers.map(l => `layer ${l}`) : [])],
    rows: panel.tokens.map((t, i) => [t, panel.depth[i], ...(panel.lens ? panel.lens.predictions.map(row => row[i]) : [])]),
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
