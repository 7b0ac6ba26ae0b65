"""`deepenough shortcut fit`, `eval`, `lens`, `paper`, `import` and `prune`: one model's layers.

A run folder holds `shortcuts/` (the maps; `affine/` beside them where both kinds were asked for)
and `metrics.jsonl`, from which every figure is drawn. Torch is imported inside the functions, so
that `--help` need not wait for it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepenough.config import Command, dump, resolve
from deepenough.errors import UserError
from deepenough.runs import Record, RunFolder, read_config, replace_records
from deepenough.shortcut.config import (
    HealTrainingConfig,
    MapsConfig,
    ShortcutEvalConfig,
    ShortcutFitConfig,
    ShortcutImportConfig,
    ShortcutLensConfig,
    ShortcutPaperConfig,
    ShortcutPruneConfig,
    TuneTrainingConfig,
)

if TYPE_CHECKING:
    from deepenough.shortcut.modeling import Shortcuts

#: What the table of `shortcut eval` shows of a layer: heading and value in its record.
_COLUMNS = {
    "agrees": "precision_1",
    "in top 5": "precision_5",
    "surprisal": "surprisal",
    "kl": "kl",
    "entropy": "entropy",
    "loss": "cross_entropy",
    "rank": "target_rank",
}
_LENS_ROWS = 10
#: Lines of other text that a pruned model is measured on, and characters of a passage.
_PRUNE_LINES, _PASSAGE = 200, 2000
#: What `--show` of the lens is called in its record, where it is not the same.
_LENS_SHOWS = {"token": "words", "rank": "target_rank"}


def fit(config: ShortcutFitConfig) -> list[str] | None:
    """Run `deepenough shortcut fit`; interrupted, it goes on with `resume`.

    Returned is the plan where it was asked for.
    """
    if config.plan.dry_run:
        from deepenough.shortcut.planning import plan_fit

        plan = plan_fit(config, config.dataset.read(config.data))
        return [json.dumps(asdict(plan))] if config.plan.json else plan.lines()
    from deepenough.hf.adapter import adapt
    from deepenough.shortcut.fitting import init_distributed
    from deepenough.shortcut.reading import check_mask
    from deepenough.shortcut.training import tuned_layers
    from deepenough.training.distributed import agree, is_main_process
    from deepenough.training.trainer import keep_freed_memory

    keep_freed_memory()
    # Refuse before long work; delete an earlier run only when all else has been found good.
    RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)
    if config.tuned and config.device_map is not None:
        raise UserError("Maps are tuned on one device: leave out --device_map, or --tuned.")
    texts = config.dataset.read(config.data)
    model, tokenizer = config.model.load(
        device_map=config.device_map, offload_folder=config.offload_folder
    )
    adapter = adapt(model)
    check_mask(tokenizer, adapter.kind)
    if config.tuned:
        tuned_layers(adapter, config.tune.layers)
    init_distributed()
    run = RunFolder(Path(config.out))
    options = {"resume": config.resume, "overwrite": config.overwrite}
    agree(lambda: is_main_process() and RunFolder.create(config.out, **options))
    with run.lock():
        shortcuts = fit_run(config, run, model, tokenizer, texts)
    if is_main_process():
        print(
            f"{len(shortcuts.maps)} maps of {config.model.name} in {config.out}/shortcuts; "
            f"next: deepenough shortcut eval {config.out} --data {config.data}"
        )
    return None


def fit_run(
    config: ShortcutFitConfig, run: RunFolder, model: Any, tokenizer: Any, texts: list[str]
) -> Shortcuts:
    """Fit, or read what is fitted already, write the maps that are asked for and return them."""
    from deepenough.shortcut.training import tune
    from deepenough.training.distributed import is_main_process

    if is_main_process():
        dump(replace(config, resume=False, overwrite=False), run.config)
    names = config.fit.folders
    found = {name: _fit(config, run, model, tokenizer, texts, name) for name in names}
    tuning = RunFolder(run.path / "tuning")
    if config.tuned:
        options = TuneTrainingConfig(str(tuning.path), tune=config.tune, train=config.train)
        options.resume, options.overwrite = config.resume, not config.resume
        found["shortcuts"] = tune(found["shortcuts"], model, tokenizer, texts, options)
    if is_main_process():
        for name, each in found.items():
            each.save_pretrained(run.path / name)
            shutil.rmtree(run.checkpoints / name, ignore_errors=True)
        shutil.rmtree(tuning.model, ignore_errors=True)  # the maps are on disk once
        replace_records(run.metrics, [found["shortcuts"].record()])
    return found["shortcuts"]


def _fit(
    config: ShortcutFitConfig | ShortcutPaperConfig,
    run: RunFolder,
    model: Any,
    tokenizer: Any,
    texts: list[str],
    name: str,
    seed: int = 0,
) -> Shortcuts:
    """Fit the maps `shortcuts` or `affine` of a run, or read those it has fitted already."""
    from deepenough.hf.adapter import adapt
    from deepenough.shortcut.fitting import check_same_fit
    from deepenough.shortcut.modeling import INDEX, Shortcuts
    from deepenough.training.logging import reading

    chosen = config.fit
    is_first = name == "shortcuts"
    options: dict[str, Any] = {"affine": chosen.maps == "affine" or not is_first}
    options |= {"targets": chosen.targets if is_first else "last", "ridge": chosen.ridge}
    folder = run.path / name
    if (folder / INDEX).is_file():  # finished before the run was interrupted
        finished = Shortcuts.from_pretrained(folder)
        adapt(model).check_made_for(finished.made_for, "These shortcuts")
        fitted = finished.meta.get("fit", {})
        window = chosen.window or fitted.get("window")
        wanted = options | {"positions_taken": chosen.positions, "window": window}
        if chosen.submodules and is_first:
            fitted, wanted["submodules"] = fitted | {"submodules": bool(finished.submodules)}, True
        check_same_fit(folder, fitted, wanted)
        return finished
    options |= {"positions": chosen.positions, "window": chosen.window, "seed": seed}
    options |= {"submodules": chosen.submodules and is_first, "resume": run.checkpoints / name}
    options["memory"] = chosen.memory
    with reading("texts") as progress:
        return Shortcuts.fit(model, tokenizer, texts, progress=progress, **options)


def evaluate(config: ShortcutEvalConfig) -> None:
    """Run `deepenough shortcut eval`; its records take the place of earlier ones."""
    from deepenough.measurement import share_interval
    from deepenough.shortcut.modeling import Shortcuts
    from deepenough.training.trainer import keep_freed_memory

    keep_freed_memory()
    run, fitted = _open(config.run)
    shortcuts = _saved(run)
    texts = config.dataset.read(config.data)
    model, tokenizer = fitted.model.load(config.trust)
    parts = shortcuts[0].submodules if config.submodules else None
    if config.submodules and parts is None:
        if not isinstance(fitted, ShortcutFitConfig) or "imported" in shortcuts[0].meta:
            raise UserError(
                f"The maps of {config.run} have no sub-modules: leave out --submodules."
            )
        own = fitted.fit
        options: dict[str, Any] = {"targets": "last", "submodules": True, "ridge": own.ridge}
        options |= {"positions": own.positions, "window": own.window}
        read = fitted.dataset.read(fitted.data)
        parts = Shortcuts.fit(model, tokenizer, read, **options).submodules
    options = {"submodules": parts, "window": fitted.fit.window}
    number, records = evaluate_run(config, run, shortcuts, model, tokenizer, texts, **options)
    half = share_interval(number // 2, number).high - 0.5
    digits = max(1, -math.floor(math.log10(half)))
    print(f"{'mode':>14} {'layer':>5}" + "".join(f"{name:>11}" for name in _COLUMNS))
    for values in (record.values for record in records if record.kind == "layer"):
        shown = (values.get(key) for key in _COLUMNS.values())
        numbers = "".join(f"{'–' if x is None else f'{x:.{digits}f}':>11}" for x in shown)
        print(f"{values['mode']:>14} {values['layer']:>5}{numbers}")
    for values in (record.values for record in records if record.kind == "saved"):
        print(
            f"early exit, {values['mode']}, {values['agreement']:.0%} agreement: "
            f"{values['saved']:.1%} of layers saved"
        )
    print("loss and rank (from 1): of the token that really comes next")
    print(f"on {number:,} tokens, so that a share of them is certain to about {half:.1g}")
    print(f"next: deepenough shortcut plot {config.run}")


def evaluate_run(
    config: ShortcutEvalConfig,
    run: RunFolder,
    shortcuts: list[Shortcuts],
    model: Any,
    tokenizer: Any,
    texts: list[str],
    **options: Any,
) -> tuple[int, list[Record]]:
    """Measure the maps of a run on texts; return the number of tokens and the records kept."""
    from deepenough.shortcut.evaluation import evaluate as measure
    from deepenough.training.logging import reading

    started = time.perf_counter()
    options["positions"] = config.positions
    with reading("texts", "measuring") as progress:
        evaluation = measure(model, tokenizer, shortcuts, texts, progress=progress, **options)
    seconds = time.perf_counter() - started
    about = {"settings": asdict(config), "positions": evaluation.positions, "seconds": seconds}
    records = evaluation.records(config.exit)
    with run.lock():
        replace_records(run.metrics, [Record(0, "evaluation", about), *records])
    return evaluation.positions, records


def lens(config: ShortcutLensConfig) -> None:
    """Run `deepenough shortcut lens`; the run keeps what was shown last."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from deepenough.shortcut.lens import lens as look

    run, fitted = _open(config.run)
    shortcuts, *others = _saved(run)
    if config.mode == "affine" and others:
        shortcuts = others[0]
    model, tokenizer = fitted.model.load(config.trust)
    record = look(model, tokenizer, shortcuts, config.prompt, config.mode)
    with run.lock():
        replace_records(run.metrics, [record])
    values = record.values
    last = len(values["layers"]) - 1
    heads = [Column(Text(repr(token)[1:-1])) for token in values["tokens"]]
    table = Table("layer", *heads, box=None)
    for row in sorted({*range(0, last + 1, max(1, last // _LENS_ROWS)), last}):
        shown = values[_LENS_SHOWS.get(config.show, config.show)][row]
        predictions = [
            Text(_lens_cell(content), style="bold" if agrees else "dim")
            for content, agrees in zip(shown, values["agrees"][row], strict=True)
        ]
        table.add_row(str(values["layers"][row]), *predictions)
    Console().print(table)
    what = "" if config.show == "token" else f"; shown: {config.show.replace('_', '-')}"
    print(f"bold: the last layer's token{what}; next: deepenough shortcut plot {config.run}")


def _lens_cell(content: str | float | None) -> str:
    if content is None:
        return "–"
    if isinstance(content, str):
        return repr(content)[1:-1]
    return f"{content:.0f}" if content.is_integer() else f"{content:.3g}"


def paper(config: ShortcutPaperConfig) -> None:
    """Run `deepenough shortcut paper`; interrupted, it goes on with `resume`."""
    from deepenough.hf.adapter import adapt
    from deepenough.shortcut.fitting import check_same_fit
    from deepenough.shortcut.paper import MEANS, RESULTS, draw_sentences
    from deepenough.shortcut.reading import check_mask

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("deepenough shortcut paper runs in one process: start it without torchrun.")
    run = RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)
    options = {"resume": config.resume, "overwrite": config.overwrite}
    config = replace(config, resume=False, overwrite=False)
    if options["resume"] and run.config.is_file():
        check_same_fit(run.path, asdict(_open(config.out)[1]), asdict(config))
        if (run.path / RESULTS).is_file():
            print(f"{config.out} is finished; its figures are drawn again:")
            return
    sentences = draw_sentences(config.data, config.sentences)
    model, tokenizer = config.model.load()
    kind = adapt(model).kind
    check_mask(tokenizer, kind)
    if kind == "encoder":
        raise UserError(f"{config.model.name} has no language-model head: give a model with one.")
    RunFolder.create(config.out, **options)
    with run.lock():
        seconds = repeat_paper(config, model, tokenizer, *sentences)
    print(", ".join(f"{name}: {value:.0f} s" for name, value in seconds.items()))
    print(f"every sample: {run.path / RESULTS}; means: {run.path / MEANS}; figures:")


def repeat_paper(
    config: ShortcutPaperConfig, model: Any, tokenizer: Any, train: list[str], test: list[str]
) -> dict[str, float]:
    """Fit on sentences, measure on others, write all into `config.out`; return the seconds."""
    from deepenough.artifacts import write_text
    from deepenough.shortcut.evaluation import evaluate as measure
    from deepenough.shortcut.paper import NUM_TOP, SENTENCES, save_means, save_samples
    from deepenough.training.logging import reading
    from deepenough.training.trainer import keep_freed_memory

    keep_freed_memory()
    run, seed, began = RunFolder(Path(config.out)), config.sentences.seed, time.perf_counter()
    dump(config, run.config)
    write_text(run.path / SENTENCES, "".join(f"{sentence}\n" for sentence in (*train, *test)))
    maps = []
    for name in config.fit.folders:
        maps.append(_fit(config, run, model, tokenizer, train, name, seed))
        maps[-1].save_pretrained(run.path / name)
        shutil.rmtree(run.checkpoints / name, ignore_errors=True)
    fitted = time.perf_counter()
    options: dict[str, Any] = {"seed": seed + 1, "window": config.fit.window, "num_top": NUM_TOP}
    options["submodules"] = maps[0].submodules
    with reading("sentences", "measuring") as progress:
        evaluation = measure(model, tokenizer, maps, test, progress=progress, **options)
    records = evaluation.records(config.exit)
    seconds = {"fit": fitted - began, "measure": time.perf_counter() - fitted}
    save_means(records, run.path)
    about = {"settings": asdict(config), "positions": evaluation.positions, "seconds": seconds}
    records += [maps[0].record(), Record(0, "evaluation", about), Record(0, "paper", {})]
    replace_records(run.metrics, records)
    save_samples(evaluation, config.exit, run.path)  # last: it says that all is there
    return seconds


def prune(config: ShortcutPruneConfig) -> None:
    """Run `deepenough shortcut prune`; interrupted, it goes on with `resume`."""
    from deepenough.artifacts import seal
    from deepenough.shortcut.pruning import compare_outputs, model_card, report_of
    from deepenough.shortcut.pruning import prune as shrink
    from deepenough.shortcut.replaceable import prunable
    from deepenough.training.trainer import keep_freed_memory

    keep_freed_memory()
    RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)
    texts = config.dataset.read(config.data)
    held_out = replace(config.dataset, split="valid", lines=_PRUNE_LINES).read(config.data)
    model, tokenizer = config.model.load()
    if prunable(model).kind == "causal":
        texts, held_out = passages(texts), passages(held_out)
    options = {"resume": config.resume, "overwrite": config.overwrite}
    run = RunFolder.create(config.out, **options)
    with run.lock():
        dump(replace(config, resume=False, overwrite=False), run.config)
        pruned = shrink(
            model, tokenizer, texts, config=config.prune, folder=run.checkpoints / "prune"
        )
        if config.heal_steps:
            from deepenough.shortcut.healing import heal

            healing = HealTrainingConfig(str(run.path / "healing"), trained=config.heal)
            healing.train.steps, healing.train.lr = config.heal_steps, config.heal_lr
            healing.resume, healing.overwrite = config.resume, not config.resume
            report_of(pruned)["healed"] = heal(model, pruned, tokenizer, texts, healing)
            shutil.rmtree(run.path / "healing" / "model", ignore_errors=True)
        scores = compare_outputs(model, pruned, tokenizer, held_out)
        report = report_of(pruned)
        report["scores"] = scores
        pruned.save_pretrained(run.model)
        tokenizer.save_pretrained(run.model)
        command = f"deepenough shortcut prune {shlex.quote(config.model.name)} --data "
        command += f"{shlex.quote(config.data)} --keep {config.prune.keep} --budget "
        command += f"{config.prune.budget} --method {config.prune.method} --out {config.out}"
        command += f" --heal-steps {config.heal_steps}" if config.heal_steps else ""
        card = model_card(pruned, config.model.name, command)
        (run.model / "README.md").write_text(card, encoding="utf-8")
        seal(run.model)
        replace_records(run.metrics, [Record(0, "pruned", report)])
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    for layer, (attention, feed_forward) in enumerate(report.get("layers", ()), start=1):
        if {attention, feed_forward} != {"kept"}:
            print(f"layer {layer:>3}: attention {attention}, feed-forward {feed_forward}")
    took = ""
    if seconds := report.get("token_seconds"):
        took = f"a token takes {seconds['pruned'] / seconds['full']:.3f} of the full model's time; "
    print(
        f"layers at {report['share']:.3f} of their {config.prune.budget}; {took}on other text KL "
        f"{scores['kl']:.3f}, {scores['agreement']:.1%} of first choices are the full model's"
    )
    if "perplexity" in scores:
        print(f"perplexity {scores['perplexity']:.2f}; full model {scores['full_perplexity']:.2f}")
    print(f"next: deepenough decode generate {config.out}")


def passages(lines: list[str]) -> list[str]:
    """Return consecutive lines as passages, since a language model reads on over their ends."""
    passages: list[list[str]] = [[]]
    for line in lines:
        if sum(map(len, passages[-1])) > _PASSAGE:
            passages.append([])
        passages[-1].append(line)
    return ["\n".join(passage) for passage in passages]


def import_maps(config: ShortcutImportConfig) -> None:
    """Run `deepenough shortcut import`: published matrices become a run like one of `fit`."""
    from deepenough.shortcut.source_pickles import import_source

    RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)
    shortcuts = import_source(config.folder)
    run = RunFolder.create(config.out, resume=config.resume, overwrite=config.overwrite)
    fit = MapsConfig(
        maps="affine" if shortcuts.affine else "linear",
        positions="random",
        targets=shortcuts.targets,
        submodules=shortcuts.submodules is not None,
    )
    settings = ShortcutFitConfig(config.out, data=config.folder, model=config.model, fit=fit)
    with run.lock():
        dump(settings, run.config)
        shortcuts.save_pretrained(run.path / "shortcuts")
        replace_records(run.metrics, [shortcuts.record()])
    parts = 0 if shortcuts.submodules is None else len(shortcuts.submodules.maps)
    print(
        f"{len(shortcuts.maps)} maps between layers and {parts} of sub-modules, of "
        f"{shortcuts.num_layers} layers of width {shortcuts.width}, in {config.out}/shortcuts; "
        f"next: deepenough shortcut eval {config.out} --data TEXT"
    )


def _open(folder: str) -> tuple[RunFolder, ShortcutFitConfig | ShortcutPaperConfig]:
    content = read_config(folder)
    if content.get("method") != ShortcutFitConfig.METHOD or "fit" not in content:
        raise UserError(
            f"{folder} is not a run of deepenough shortcut fit: give the folder of one."
        )
    run = RunFolder.open(folder)
    if "sentences" in content:
        return run, resolve(ShortcutPaperConfig, run.settings())
    return run, resolve(ShortcutFitConfig, run.settings())


def _saved(run: RunFolder) -> list[Shortcuts]:
    from deepenough.shortcut.modeling import Shortcuts

    folders = [run.path / name for name in ("shortcuts", "affine")]
    if not folders[0].is_dir():
        raise UserError(
            f"{run.path} has no maps yet: let deepenough shortcut fit finish (--resume goes on)."
        )
    return [Shortcuts.from_pretrained(folder) for folder in folders if folder.is_dir()]


COMMANDS: tuple[Command, ...] = (
    Command(
        name="fit",
        help="fit linear maps between the layers of a Hugging Face model",
        config=ShortcutFitConfig,
        run=fit,
        description="Fit the linear map from every layer of a Hugging Face model to every later\n"
        "one, in one pass over a text.",
        example="deepenough shortcut fit smollm2 --data mytext.txt --out runs/shortcut",
        positional=("model.name",),
    ),
    Command(
        name="paper",
        help="repeat the paper for a model: maps, sub-modules, results per sample, all its plots",
        config=ShortcutPaperConfig,
        run=paper,
        description="Do all that the scripts of Jump to Conclusions do, for any model: draw\n"
        "sentences from a text, fit the maps of all pairs of layers and of the parts inside the\n"
        "blocks, measure them on other sentences, keep the results of every sample and draw.",
        example="deepenough shortcut paper smollm2 --data mytext.txt --out runs/paper",
        positional=("model.name",),
        draws="out",
    ),
    Command(
        name="prune",
        help="make a model smaller in minutes, by linear maps in the places of its parts",
        config=ShortcutPruneConfig,
        run=prune,
        description="Keep, replace by a linear map, or remove the attention and the feed-forward\n"
        "of every layer, so that the layers cost a given share and the output changes least.",
        example="deepenough shortcut prune smollm2 --data mytext.txt --keep 0.8 --out runs/small",
        positional=("model.name",),
        draws="out",
    ),
    Command(
        name="import",
        help="import the matrices that the authors of the paper have published",
        config=ShortcutImportConfig,
        run=import_maps,
        description="Import a folder of i_j.pickle and pi_a_b.pickle files, of which tensors are\n"
        "taken and nothing else, as a run for shortcut eval, lens and plot.",
        example="deepenough shortcut import matrices --name gpt2 --out runs/imported",
        positional=("folder",),
    ),
    Command(
        name="eval",
        help="measure what each layer already knows",
        config=ShortcutEvalConfig,
        run=evaluate,
        description="Measure shortcuts on a text: agreement with the last layer, surprisal and KL\n"
        "by layer, r^2 of all pairs, layers saved by early exit.",
        example="deepenough shortcut eval runs/shortcut --data mytext.txt",
        positional=("run",),
    ),
    Command(
        name="lens",
        help="show what every layer predicts after every token of a prompt",
        config=ShortcutLensConfig,
        run=lens,
        description="Show, for a prompt, the token each layer predicts after each token; the run\n"
        "keeps it for shortcut plot and report.",
        example='deepenough shortcut lens runs/shortcut --prompt "The capital of France is"',
        positional=("run", "prompt"),
    ),
)
