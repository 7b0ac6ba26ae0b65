"""A finished classifier to be tried on texts: its answer after every pass, and where it stops."""

import torch

from deepenough.data.config import REGRESSION
from deepenough.errors import UserError
from deepenough.figure import Inspector, Section
from deepenough.ponder.config import options_of
from deepenough.ponder.evaluation import FinishedRun
from deepenough.ponder.figures import text_figure
from deepenough.ponder.halting import CONFIDENCE, POLICIES, QUANTILE, probabilities

EXAMPLE = "The film is not without its charms, but they are few and far between."
#: Exits with a threshold: what it means, and its value where a model is configured for another.
DIALS = {
    "quantile": ("Stop once the model has halted with probability", QUANTILE),
    "confidence": ("Stop once the answer has probability", CONFIDENCE),
}


def open_inspector(run: str) -> Inspector:
    """Return a finished run as it is tried on texts; a tab stands between a text and its pair.

    What can be set is the threshold of its exit. A model that can have none with a threshold stops
    as it is configured to.
    """
    finished = FinishedRun(run)
    model, options = finished.model, options_of(finished.model.config)
    possible = {"quantile": model.has_halting, "confidence": model.problem != REGRESSION}
    kinds = [kind for kind, is_possible in possible.items() if is_possible]
    kind = options.exit_kind if options.exit_kind in kinds else next(iter(kinds), "")
    dial, usual = DIALS.get(kind, ("", 0.0))
    if kind == options.exit_kind:
        usual = float(options.exit_value)

    @torch.inference_mode()
    def look(text: str, threshold: float) -> Section:
        first, tab, second = text.partition("\t")
        if not first.strip():
            raise UserError("The text is empty: give a sentence to classify.")
        policy = POLICIES[kind](threshold) if kind else model.exit_policy()
        asked = (first, second) if tab else first
        how = {"policy": policy, "max_length": model.max_length}
        (answer,) = model.predict([asked], finished.tokenizer, **how)
        output = model([asked], policy=policy, all_passes=True)
        figure = text_figure(
            finished.labels,
            probabilities(output.step_logits.float()[:, 0], model.problem).tolist(),
            answer.passes,
            None if output.halting is None else output.halting[0].tolist(),
        )
        said = answer.label
        shown = f"{said:.3g}" if isinstance(said, float) else said
        if isinstance(shown, list):
            shown = ", ".join(shown) or "no label"
        sure = "" if answer.probability is None else f", probability {answer.probability:.3f}"
        finding = f"{shown}{sure}, after {answer.passes} of {model.num_passes} passes."
        return Section("Classify", findings=[finding], figures=[figure])

    return Inspector(look, EXAMPLE, dial, 0.01, 1.0, usual)
