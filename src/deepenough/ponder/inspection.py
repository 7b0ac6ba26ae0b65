"""A finished classifier to be tried on texts: its answer after every pass, and where it stops."""

import torch

from deepenough.data.config import REGRESSION
from deepenough.errors import UserError
from deepenough.figure import Axis, FigureSpec, HeatMap, Inspector, Section, shortened
from deepenough.ponder.config import options_of
from deepenough.ponder.evaluation import FinishedRun
from deepenough.ponder.halting import ConfidenceExit, QuantileExit, probabilities

EXAMPLE = "The film is not without its charms, but they are few and far between."


def open_inspector(run: str) -> Inspector:
    """Return a finished run as it is tried on texts; a tab stands between a text and its pair.

    What can be set is the threshold of its exit: of confidence, unless it is configured to stop by
    its halting probabilities.
    """
    finished = FinishedRun(run)
    model, options = finished.model, options_of(finished.model.config)
    if model.problem == REGRESSION:
        raise UserError(f"{run} answers with values, which are not shown: give one with labels.")
    is_quantile = options.exit_kind == "quantile"
    exit_class = QuantileExit if is_quantile else ConfidenceExit
    dial = f"Stop once {'it has halted' if is_quantile else 'the answer holds'} with probability"
    usual = options.exit_value if options.exit_kind in ("quantile", "confidence") else 0.9

    @torch.inference_mode()
    def look(text: str, threshold: float) -> Section:
        first, tab, second = text.partition("\t")
        if not first.strip():
            raise UserError("The text is empty: give a sentence to classify.")
        asked, policy = (first, second) if tab else first, exit_class(threshold)
        how = {"policy": policy, "max_length": model.max_length}
        (answer,) = model.predict([asked], finished.tokenizer, **how)
        output = model([asked], policy=policy, all_passes=True)
        answers_NC = probabilities(output.step_logits[:, 0].float(), model.problem)
        rows = dict(zip(finished.labels, answers_NC.T.tolist(), strict=True))
        framed = [(row, answer.passes - 1) for row in range(len(rows))]
        if output.halting is not None:
            rows["halts at this pass"] = output.halting[0].tolist()
        panel = HeatMap(
            [shortened(name, 24) for name in rows],
            [str(number + 1) for number in range(model.num_passes)],
            list(rows.values()),
            Axis("pass"),
            Axis(),
            Axis("probability", low=0.0, high=1.0),
            texts=[[f"{share:.2f}" for share in row] for row in rows.values()],
            framed=framed,
        )
        caption = f"The answer after each pass; framed: it stops after pass {answer.passes}."
        figure = FigureSpec("text", "Pass by pass", caption, [panel], wide=True)
        said = ", ".join(answer.label) if isinstance(answer.label, list) else answer.label
        finding = (
            f"{said or 'no label'}, with probability {answer.probability:.3f}, after "
            f"{answer.passes} of {model.num_passes} passes."
        )
        return Section("Classify", findings=[finding], figures=[figure])

    return Inspector(look, EXAMPLE, dial, 0.01, 1.0, float(usual))
