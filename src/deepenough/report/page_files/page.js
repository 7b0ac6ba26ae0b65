"use strict";
// What a reader can do: switch the theme, choose a panel, hide a line, look at the data.

// -- figures ------------------------------------------------------------------------------------

function namesOf(panels) {
  return [...new Set(panels.flatMap(p => p.kind === "chart" ? [...p.lines, ...p.bars].map(s => s.name) : p.kind === "scatter" ? p.points.map(q => q.group) : []))];
}

// Colours and shapes of the names, each a button that hides it, and of rules and marks.
function legend(box, panels, state, redraw) {
  const titles = new Set(panels.map(p => p.title));
  const names = state.names.filter(name => name && !titles.has(name));
  const others = new Map(panels.filter(p => p.kind === "chart").flatMap(p => [...p.rules.map(r => [r.name, r.vertical ? "6 4" : "2 4"]), ...(p.mark_name ? [[p.mark_name, "none"]] : [])]));
  if (names.length + others.size < 2) return;
  const list = html("div", { class: "legend" });
  for (const name of names) {
    const item = panels.filter(p => p.kind === "chart").flatMap(p => [...p.lines, ...p.bars]).find(s => s.name === name);
    const place = item?.color ?? state.names.indexOf(name);
    const button = html("button", { type: "button", "aria-pressed": String(!state.off.has(name)) });
    const icon = svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }), mark = symbol(place, 7, 7, 5);
    mark.setAttribute("fill", item?.style === "dotted" ? "none" : color(place));
    mark.setAttribute("stroke", color(place));
    icon.append(mark);
    button.append(icon, name);
    button.addEventListener("click", () => { state.off.has(name) ? state.off.delete(name) : state.off.add(name); redraw(name); });
    list.append(button);
  }
  for (const [name, dashes] of others) {
    const entry = html("span"), icon = svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" });
    icon.append(svg("line", { class: dashes === "none" ? "level" : "rule", x1: 0, x2: 14, y1: 7, y2: 7, "stroke-dasharray": dashes }));
    entry.append(icon, name);
    list.append(entry);
  }
  box.append(list);
}

function chooser(box, spec, state, redraw) {
  const controls = html("div", { class: "controls" }), label = html("label", {}, `${spec.choice} `);
  const select = html("select", { "aria-label": `which ${spec.choice} is shown` });
  spec.panels.forEach((panel, i) => select.append(html("option", { value: i }, panel.title)));
  select.value = state.chosen;
  select.addEventListener("change", () => { state.chosen = Number(select.value); redraw(null, "select"); });
  label.append(select);
  controls.append(label);
  box.append(controls);
}

function shownPanels(spec, state) { return spec.choice ? [spec.panels[state.chosen]] : spec.panels; }

function drawFigure(figure, spec, state) {
  const box = figure.querySelector(".chart");
  function redraw(name, focus) {
    const panels = shownPanels(spec, state);
    state.names = namesOf(panels);
    box.replaceChildren();
    if (spec.choice && spec.panels.length > 1) chooser(box, spec, state, redraw);
    legend(box, panels, state, redraw);
    const rows = html("div", { class: "panels" });
    rows.style.setProperty("--columns", Math.min(spec.columns, panels.length));
    box.append(rows);
    const places = panels.map(panel => {
      const place = html("div");
      if (panel.title && !spec.choice && !panel.frames?.length) place.append(html("h5", {}, panel.title));
      rows.append(place);
      return place;
    });
    panels.forEach((panel, i) => DRAW[panel.kind](places[i], panel, state));
    // Whoever pressed a key must not be thrown back to the top of the page.
    if (focus) box.querySelector(focus)?.focus();
    else if (name) [...box.querySelectorAll(".legend button")].find(b => b.textContent === name)?.focus();
  }
  redraw(null);
  return redraw;
}

function wireData(figure, spec, state) {
  const line = figure.querySelector(".tools .command");
  if (spec.command) line.replaceWith(...command(spec.command).children);
  else line.remove();
  const button = figure.querySelector("button.show-data");
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "true";
    if (open) figure.querySelector(".data").remove();
    else {
      const box = html("div", { class: "data", tabindex: "0", role: "region", "aria-label": `data of ${spec.title}` });
      for (const panel of shownPanels(spec, state)) box.append(...dataTable(spec, panel));
      figure.append(box);
    }
    button.setAttribute("aria-expanded", String(!open));
  });
}

// -- the page -----------------------------------------------------------------------------------

function wireTips() {
  const tip = html("div", { class: "tip", role: "tooltip", hidden: "" });
  document.body.append(tip);
  function at(x, y, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - box.width - 4, x + 12))}px`;
    tip.style.top = `${Math.max(4, y - box.height - 10)}px`;
  }
  const marked = event => event.target.closest?.("[data-tip]");
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, event => {
    const mark = marked(event);
    if (mark) at(event.clientX, event.clientY, mark.dataset.tip);
    else if (!document.activeElement?.dataset?.tip) tip.hidden = true;
  });
  function atFocus() {
    const mark = document.activeElement?.closest("[data-tip]");
    if (!mark) { tip.hidden = true; return; }
    const box = mark.getBoundingClientRect();
    at(box.right, box.top, mark.dataset.tip);
  }
  document.addEventListener("focusin", atFocus);
  document.addEventListener("scroll", atFocus, { passive: true });  // focus itself may scroll
  document.addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
}

function wireTheme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const kept = { get() { try { return localStorage.getItem("theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("theme", value); } catch { /* a page may be forbidden to keep anything */ } } };
  function apply(theme) {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
    button.textContent = theme === "dark" ? "Light" : "Dark";
  }
  apply(kept.get() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    apply(theme);
    kept.set(theme);
  });
}

function start() {
  wireTheme();
  wireTips();
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const redraws = specs.map((spec, number) => {
    // What a reader has changed: names switched off, the panel chosen, the frame and point looked at.
    const state = { number, off: new Set(), chosen: 0, names: [] };
    const figure = document.getElementById(`figure-${number}`);
    wireData(figure, spec, state);
    wirePictures(figure, spec, state);
    return drawFigure(figure, spec, state);
  });
  let width = innerWidth, timer = null;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => redraws.forEach(redraw => redraw(null)), 120);
  });
  document.documentElement.dataset.ready = "true";
}
