"""Accelerated models in EleutherAI's `lm-eval`, so that exits count in standard tasks too.

Importing this file makes `deepenough` a model of the harness, beside its `hf`:

    import deepenough.decoding.harness
    lm_eval.simple_evaluate(model="deepenough", tasks=["lambada_openai"], model_args={
        "pretrained": "smollm2", "mode": "exit", "shortcuts": "runs/shortcut/shortcuts"})

Likelihoods of an exiting model are those of its exits: every position but the first may leave,
whether it belongs to a question or to an answer (`adaptive/exit/scoring.py`). Texts are written by
the accelerated `generate`. In the other modes all scores are the model's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepenough.decoding.api import AdaptiveDecoding, early_exit, speculate
from deepenough.errors import UserError
from deepenough.hf.loading import load
from deepenough.shortcut.modeling import Shortcuts

try:
    from lm_eval.api.registry import register_model  # type: ignore
    from lm_eval.evaluator import simple_evaluate  # type: ignore
    from lm_eval.models.huggingface import HFLM  # type: ignore
    from lm_eval.tasks import TaskManager  # type: ignore
except ImportError as error:
    raise UserError(
        "Standard tasks need lm-eval: install it with pip install deepenough[eval]."
    ) from error


@register_model("deepenough")
class AcceleratedLM(HFLM):
    """A model of the harness that decodes by `speculate` or `early_exit`.

    `pretrained` is what `speculate` or `early_exit` returned, given with its `tokenizer`, or a name
    that `load` knows; then `mode`, `shortcuts`, `guarantee`, `policy`, `threshold` and `fill` are
    as for `deepenough exit generate`. The rest is as for the harness's own `hf`.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        mode: str = "full",
        shortcuts: str | None = None,
        guarantee: str | None = None,
        policy: str | None = None,
        threshold: float | None = None,
        fill: str | None = None,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            model, tokenizer = load(pretrained, "causal", dtype)
            given: dict[str, Any] = {"guarantee": guarantee, "kv_propagation": fill}
            given |= {"policy": policy, "threshold": threshold}
            given = {name: value for name, value in given.items() if value is not None}
            if mode != "exit" and given:
                raise UserError(f"{next(iter(given))} is of use in mode exit alone: leave it out.")
            if mode == "exit":
                if shortcuts is None:
                    raise UserError("Early exit needs shortcuts: give the folder of the model's.")
                pretrained = early_exit(model, Shortcuts.from_pretrained(shortcuts), **given)
            elif mode in ("full", "speculative"):
                pretrained = speculate(model, "none" if mode == "full" else None)
            else:
                raise UserError(f"The mode is full, speculative or exit, not {mode!r}.")
        elif not isinstance(pretrained, AdaptiveDecoding):
            raise UserError("Give what speculate() or early_exit() returned; others are for hf.")
        self.layers, self.positions = 0, 0
        super().__init__(pretrained=pretrained, tokenizer=tokenizer, backend="causal", **options)

    @property
    def mean_layers(self) -> float | None:
        """Layers that ran for a position of a likelihood, on average; None if all did."""
        return self.layers / self.positions if self.positions else None

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = super()._model_call(inps, *args, **kwargs)
        if self.model.exit_rule is not None:
            depth = self.model.trace.depth
            self.layers += int(depth.sum())
            self.positions += int((depth > 0).sum())
        return logits


def evaluate(
    fast: Any,
    tokenizer: Any,
    tasks: list[str],
    include: str | None = None,
    batch_size: int = 8,
    **options: Any,
) -> dict[str, Any]:
    """Scores of tasks by name: the harness's own, or those of the folder `include`; `options` as
    its `simple_evaluate` takes them. `mean_layers` stands beside the scores of an exiting model."""
    model = AcceleratedLM(fast, tokenizer, batch_size=batch_size)
    manager = TaskManager(include_path=include, include_defaults=include is None)
    found = simple_evaluate(model, tasks=tasks, task_manager=manager, **options)
    scores = {name: dict(values) for name, values in found["results"].items()}
    if model.mean_layers is not None:
        for values in scores.values():
            values["mean_layers"] = model.mean_layers
    return scores
