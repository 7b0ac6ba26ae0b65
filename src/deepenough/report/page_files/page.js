"use strict";
// What a reader can do: switch the theme, move through training, open a token, look at the data.

function drawFrames(box, spec) {
  const controls = html("div", { class: "controls" });
  const last = spec.frames.length - 1;
  const id = `slider-${spec.number}`;
  controls.append(html("label", { for: id }, "step"));
  const slider = html("input", { type: "range", min: 0, max: last, id, value: spec.at ?? last });
  const told = html("output", { for: id });
  const play = html("button", { type: "button" }, "Play");
  controls.append(slider, told, play);
  const place = html("div");
  box.append(controls, place);
  function update() {
    const at = Number(slider.value), frame = spec.frames[at];
    spec.at = at;
    const tau = frame.tau === null ? "" : `, temperature ${show(frame.tau)}`;
    told.textContent = `${frame.step}${tau}: ${frame.pattern}`;
    slider.setAttribute("aria-valuetext", `step ${frame.step}, blocks ${frame.pattern}`);
    place.replaceChildren(grid(box, spec, frame.values));
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
  scaleBar(box, spec);
}

function openLens(spec, token, button) {
  const dialog = document.getElementById("lens");
  const lens = spec.lens, last = lens.words.length - 1;
  const head = html("div", { class: "tools" });
  head.append(html("h3", {}, `after “${spec.tokens[token]}”`));
  const close = html("button", { type: "button" }, "Close");
  close.addEventListener("click", () => dialog.close());
  head.append(close);
  const table = html("table");
  const title = html("tr");
  for (const name of ["layer", "says", "probability", ""]) title.append(html("th", { scope: "col" }, name));
  table.append(title);
  for (let row = last; row >= 0; row--) {
    const line = html("tr", lens.agrees[row][token] ? { class: "last" } : {});
    const p = lens.probability[row][token];
    line.append(html("td", {}, String(lens.layers[row])), html("td", {}, lens.words[row][token]), html("td", {}, show(p)));
    const cell = html("td"), bar = html("div", { class: "bar" });
    bar.style.width = `${Math.round(100 * (p || 0))}%`;
    cell.append(bar);
    line.append(cell);
    table.append(line);
  }
  const note = html("p", { class: "caption" }, "Bold: the last layer’s word. "
    + (spec.depth[token] >= lens.layers[last] ? "Only the last layer says it for good." : `From layer ${spec.depth[token]} on every layer says it.`));
  dialog.replaceChildren(head, note, table);
  dialog.setAttribute("aria-label", `what every layer says after ${spec.tokens[token]}`);
  button.setAttribute("aria-expanded", "true");
  dialog.addEventListener("close", () => { button.setAttribute("aria-expanded", "false"); button.focus(); }, { once: true });
  dialog.showModal();
}

function drawTokens(box, spec) {
  const text = html("div", { class: "tokens" });
  spec.tokens.forEach((token, i) => {
    const share = spec.depth[i] === null ? null : spec.depth[i] / spec.last;
    const button = html(spec.lens ? "button" : "span", { ...(spec.lens ? { type: "button" } : { role: "img" }), class: "token", "aria-label": `${token}: ${spec.depth[i] === null ? "read, not written" : `layer ${spec.depth[i]} of ${spec.last}`}` }, token);
    button.dataset.tip = spec.depth[i] === null ? "part of the prompt" : `layer ${spec.depth[i]} of ${spec.last}`;
    if (share !== null) { button.style.background = shade(share); button.style.color = inkOn(share); }
    if (spec.lens) {
      button.setAttribute("aria-haspopup", "dialog");
      button.setAttribute("aria-expanded", "false");
      button.addEventListener("click", () => openLens(spec, i, button));
    }
    text.append(button);
  });
  wireKeys(text);
  box.append(text);
  scaleBar(box, { low: 0, high: spec.last, value_name: spec.depth_name });
}

function drawImage(box, spec) { box.append(html("img", { src: spec.source, alt: spec.title })); }

const DRAW = { frontier: drawFrontier, lines: drawLines, heat: drawHeat, frames: drawFrames, bars: drawBars, tokens: drawTokens, image: drawImage };

function drawFigure(figure, spec) {
  const box = figure.querySelector(".chart");
  function redraw(group, focus) {
    box.replaceChildren();
    DRAW[spec.kind](box, spec, redraw);
    // Whoever pressed a key must not be thrown back to the top of the page.
    if (focus) box.querySelector(focus)?.focus();
    else if (group) [...box.querySelectorAll(".legend button")].find(b => b.textContent === group)?.focus();
  }
  redraw(null);
  return redraw;
}

function showData(place, spec) {
  const box = html("div", { class: "data", tabindex: "0", role: "region", "aria-label": `data of ${spec.title}` });
  box.append(...dataTable(spec));
  place.append(box);
}

function wireData(figure, spec) {
  figure.querySelector(".tools .command").replaceWith(...command(spec.command).children);
  const button = figure.querySelector("button.show-data");
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "true";
    if (open) figure.querySelector(".data").remove();
    else showData(figure, spec);
    button.setAttribute("aria-expanded", String(!open));
  });
}

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
    spec.number = number;
    const figure = document.getElementById(`figure-${number}`);
    wireData(figure, spec);
    return drawFigure(figure, spec);
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

start();
