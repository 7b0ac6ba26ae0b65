"""`deepenough shortcut eval`: what each layer already knows."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.shortcut.study import ShortcutEval, evaluate_run
from deepenough.training.logging import reading

#: What the table shows of a layer.
_COLUMNS = {
    "agrees": "precision_1",
    "in top 5": "precision_5",
    "surprisal": "surprisal",
    "kl": "kl",
}


def main(argv: list[str]) -> int:
    settings = parse(
        "shortcut eval",
        ShortcutEval,
        argv,
        description="Measure shortcuts on a text: agreement with the last layer, surprisal and KL\n"
        "by layer, r^2 of all pairs, layers saved by early exit.",
        example="deepenough shortcut eval runs/shortcut --data mytext.txt",
        positional=["run"],
    )
    with reading("texts") as progress:
        evaluation = evaluate_run(settings, progress)
    records = evaluation.records()
    print(f"{'mode':>14} {'layer':>5}" + "".join(f"{name:>11}" for name in _COLUMNS))
    for record in records:
        if record.kind == "layer":
            values = record.values
            numbers = "".join(f"{values[key]:>11.3f}" for key in _COLUMNS.values())
            print(f"{values['mode']:>14} {values['layer']:>5}{numbers}")
    for record in records:
        if record.kind == "saved":
            values = record.values
            print(
                f"early exit, {values['mode']}, {values['agreement']:.0%} agreement: "
                f"{values['saved']:.1%} of layers saved"
            )
    print(f"on {evaluation.positions:,} tokens; next: deepenough plot {settings.run}")
    return 0
