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
