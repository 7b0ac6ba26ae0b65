// The data behind a figure, as a table of columns and rows.

const TABLES = {
  frontier: spec => ({
    columns: ["name", "group", spec.y_label, "low", "high", ...spec.costs.map(c => c.label), "beaten by none in"],
    rows: spec.points.map(p => [p.name, p.group, p.quality, p.low, p.high, ...spec.costs.map(c => p.costs[c.key].value), p.optimal.join(", ")]),
  }),
  lines: spec => ({
    columns: ["line", spec.x_label, spec.y_label],
    rows: spec.series.flatMap(s => s.x.map((x, i) => [s.name, x, s.y[i]])),
  }),
  bars: spec => ({
    columns: [spec.x_label, ...spec.series.map(s => s.name)],
    rows: spec.labels.map((label, i) => [label, ...spec.series.map(s => s.values[i])]),
  }),
  heat: spec => ({
    columns: [`${spec.row_name} \\ ${spec.column_name}`, ...spec.columns],
    rows: spec.values.map((row, r) => [spec.rows[r], ...row]),
  }),
  frames: spec => ({
    columns: ["step", "pattern", spec.row_name, ...spec.columns.map(c => `${spec.column_name} ${c}`)],
    rows: spec.frames.flatMap(f => f.values.map((row, r) => [f.step, f.pattern, spec.rows[r], ...row])),
  }),
  tokens: spec => ({
    columns: ["token", spec.depth_name, ...(spec.lens ? spec.lens.layers.map(l => `layer ${l}`) : [])],
    rows: spec.tokens.map((t, i) => [t, spec.depth[i], ...(spec.lens ? spec.lens.words.map(row => row[i]) : [])]),
  }),
  image: () => ({ columns: ["a picture of the figure beside it"], rows: [] }),
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

// The data of a figure as a table that a press on a column's name sorts, and as a file to save.
function dataTable(spec) {
  const content = TABLES[spec.kind](spec), table = html("table"), head = html("tr"), body = html("tbody");
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
  const save = html("a", { class: "save", download: `${spec.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.csv`,
    href: `data:text/csv;charset=utf-8,${encodeURIComponent(csv(content).replace(/[\uD800-\uDFFF]/gu, "\uFFFD"))}` }, "Save as CSV");
  return [save, table];
}
