// Draws every figure that Gradio puts into the page, and again when its place changes width.

const drawn = new ResizeObserver(entries => {
  for (const { target } of entries) {
    if (target.redraw && target.clientWidth && target.clientWidth !== target.drawnAt) {
      target.drawnAt = target.clientWidth;
      target.redraw(null);
    }
  }
});

let count = 0;
function drawNew() {
  for (const figure of document.querySelectorAll("figure[data-figure]")) {
    const spec = JSON.parse(figure.dataset.figure), state = { number: `live-${count++}`, off: new Set(), chosen: 0, names: [] };
    figure.removeAttribute("data-figure");
    wireData(figure, spec, state);
    wirePictures(figure, spec, state);
    figure.drawnAt = figure.clientWidth;
    figure.redraw = drawFigure(figure, spec, state);
    drawn.observe(figure);
  }
}

function begin() {
  wireTips();
  const around = html("div", { class: "deepenough" }), tip = document.querySelector("body > .tip");
  document.body.append(around);
  around.append(tip);
  new MutationObserver(drawNew).observe(document.body, { childList: true, subtree: true });
  drawNew();
}

if (document.body) begin();
else addEventListener("DOMContentLoaded", begin);
