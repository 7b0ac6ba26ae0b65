"""`deepenough shortcut fit`: linear maps between the layers of a model."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.shortcut.study import ShortcutFit, fit_run
from deepenough.training.distributed import is_main_process
from deepenough.training.logging import reading


def main(argv: list[str]) -> int:
    settings = parse(
        "shortcut fit",
        ShortcutFit,
        argv,
        description="Fit the linear map from every layer of a Hugging Face model to every later\n"
        "one, in one pass over a text.",
        example="deepenough shortcut fit smollm2 --data mytext.txt --folder runs/shortcut",
        positional=["model.name"],
    )
    with reading("texts") as progress:
        shortcuts = fit_run(settings, progress)
    if is_main_process():
        folder = settings.run.folder
        print(
            f"{len(shortcuts.maps)} maps of {settings.model.name} in {folder}/shortcuts; next: "
            f"deepenough shortcut eval {folder} --data {settings.text.data}"
        )
    return 0
