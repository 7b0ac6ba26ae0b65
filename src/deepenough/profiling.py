"""`deepenough profile`: all about one model in one command, as one page and one JSON file.

It composes what other commands do: maps between the layers (`shortcut fit`), what every layer knows
(`shortcut eval` and `lens`), ways to generate side by side (`compare`), the page (`report`). Its
folder is a run of `shortcut fit`, so that those commands go on from there.

`profile.json` keeps what decided each finished stage. The same command, repeated after an
interruption, does what is missing; where the text or a setting has changed since, it says so and
does the stages that depend on it again. Another model is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepenough.artifacts import read_json, write_json
from deepenough.config import (
    Command,
    DeviceConfig,
    bounded,
    processor,
    provenance,
    resolve,
    validate,
)
from deepenough.errors import UserError
from deepenough.measurement import content_of, median_interval
from deepenough.registry import METHODS
from deepenough.runs import Record, RunFolder, read_records, replace_records

if TYPE_CHECKING:
    from deepenough.compare.config import CompareConfig

SHORTCUT, DECODE = (next(m for m in METHODS if m.name == name) for name in ("shortcut", "decode"))
Model: Any = SHORTCUT.load("config", "PretrainedModelConfig")

FILE, PAGE = "profile.json", "report.html"
OWN_TEXT = "python"
#: Texts of a list of which every so-manyth is measured on, and not fitted on.
HELD_OUT_EVERY = 5
FEWEST_TEXTS = 10
#: Bytes of maps between all pairs of layers, above which there are only those to the last one.
MOST_MAP_BYTES = 1_000_000_000
#: Parts of the text in which the states of a model without a head are measured, for an interval.
NUM_PARTS = 8
RIDGE = 0.01
PROMPT = "The capital of France is Paris, and the capital of Germany is"
#: Ways to generate that are measured beside each other.
WAYS = ("transformers", "full", "speculative", "exit")


@dataclass
class ProfileConfig(DeviceConfig):
    """Settings of `deepenough profile`."""

    out: str = "runs/profile"
    """Folder for the page, the JSON file and all that they are made from."""

    overwrite: bool = False
    """Delete an earlier profile in the folder first."""

    data: str | None = None
    """Text like that which the model is used on: a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a name on the hub; by default python, the prose inside Python."""

    model: Model = field(default_factory=Model)

    lines: int = bounded(400, ge=FEWEST_TEXTS)
    """Lines of text that maps are fitted on."""

    eval_lines: int = bounded(80, ge=FEWEST_TEXTS)
    """Lines of other text that every layer is measured on."""

    min_chars: int = bounded(40, ge=0)
    """Lines shorter than this, such as headings, are passed over."""

    prompt: str = PROMPT
    """Text that is looked at token by token."""

    prompts: int = bounded(4, ge=1)
    """Prompts after which the ways to generate are measured."""

    prompt_tokens: int = bounded(32, ge=1)
    """Tokens of a prompt."""

    new_tokens: int = bounded(32, ge=1)
    """Tokens that follow it."""

    rounds: int = bounded(7, ge=1)
    """How often every way is timed; fewer than 6 give intervals of less than 95 %."""


def profile(
    model: Any, tokenizer: Any, texts: Iterable[str], out: str = "runs/profile", **options: Any
) -> dict[str, Any]:
    """Measure how early a model knows its answer and what that is worth here; write a page.

    Every fifth of `texts` is measured on, the others are fitted on. `options` are those of
    `deepenough profile`, such as `new_tokens` or `overwrite`. Returned is what `profile.json` in
    the folder `out` holds: the verdict in sentences and the figures behind it.
    """
    given = list(texts)
    held_out = given[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if len(held_out) < FEWEST_TEXTS:
        raise UserError(
            f"{len(given)} texts are too few: give at least {FEWEST_TEXTS * HELD_OUT_EVERY}, of "
            "which every fifth is measured on."
        )
    config = resolve(ProfileConfig, overrides={"out": out, **options})
    config.model.name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    config.data = config.data or "texts given in Python"
    _check_folder(config)
    fitted_on = [text for place, text in enumerate(given, 1) if place % HELD_OUT_EVERY]
    return Profile(config, model, tokenizer, fitted_on, held_out).run()


def run_profile(config: ProfileConfig) -> None:
    """Run `deepenough profile`: print the verdict, and where the page is."""
    from deepenough.training.logging import announce

    _check_folder(config)
    text = SHORTCUT.load("config", "TextConfig")
    data = config.data or OWN_TEXT
    if config.data is None:
        announce("No --data: measured on the prose inside Python. Text of your own tells more.")
    train = text("train", config.lines, config.min_chars).read(data)
    valid = text("valid", config.eval_lines, config.min_chars).read(data)
    model, tokenizer = config.model.load()
    found = Profile(replace(config, data=data), model, tokenizer, train, valid).run()
    print(f"\n{found['model']}, measured on {data}:")
    for verdict in found["verdict"]:
        print("- " + "\n    ".join(filter(None, (verdict["sentence"], verdict["command"]))))
    print(f"\nfigures: {Path(config.out) / FILE}\npage: {Path(config.out) / PAGE}")


def _check_folder(config: ProfileConfig) -> None:
    """Refuse a folder that holds anything but an earlier profile, and change nothing."""
    validate(config)
    is_profile, out = (Path(config.out) / FILE).is_file(), config.out
    if not is_profile and RunFolder(Path(out)).is_run() and not config.overwrite:
        raise UserError(f"{out} holds another run: choose another folder, or give --overwrite.")
    RunFolder.check(out, is_profile and not config.overwrite, config.overwrite)


class Profile:
    """One model, and the stages in which it is measured."""

    def __init__(
        self, config: ProfileConfig, model: Any, tokenizer: Any, train: list[str], valid: list[str]
    ) -> None:
        """Look at the model; what cannot be profiled is refused before anything is written."""
        from deepenough.hf.adapter import adapt
        from deepenough.training.trainer import keep_freed_memory

        keep_freed_memory()
        self.config, self.model, self.tokenizer = config, model.eval(), tokenizer
        self.train, self.valid = train, valid
        self.adapter = adapt(model)
        SHORTCUT.load("reading", "check_mask")(tokenizer, self.adapter.kind)
        self.num_prompts = 0
        if self.adapter.kind == "causal" and model.can_generate():
            tokens = len(tokenizer("\n".join(valid), verbose=False)["input_ids"])
            self.num_prompts = min(config.prompts, tokens // config.prompt_tokens)
            if not self.num_prompts:
                raise UserError(
                    f"The text held out has {tokens} tokens, less than one prompt of "
                    f"{config.prompt_tokens}: give a longer text or a lower prompt_tokens."
                )
        self.fingerprint = str(self.adapter.identity(with_head=True)["fingerprint"])
        self.folder = RunFolder(Path(config.out))
        self.stages: dict[str, Any] = {}
        self.before = self._earlier()
        self.notes: list[str] = []

    def _earlier(self) -> dict[str, Any]:
        """Return the stages of an earlier profile in the folder; another model's is refused."""
        path = self.folder.path / FILE
        if self.config.overwrite or not path.is_file():
            return {}
        try:
            found = read_json(path)
            stages, fingerprint = dict(found["stages"]), found["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error!s:.99}): give --overwrite.") from error
        if fingerprint != self.fingerprint:
            raise UserError(
                f"{self.config.out} holds the profile of {found.get('model')}, whose weights are "
                "others: choose another folder with --out, or give --overwrite to replace it."
            )
        return stages

    def run(self) -> dict[str, Any]:
        """Do the stages that are missing and return what `profile.json` then holds."""
        import torch

        from deepenough.training.logging import announce

        config, is_profile = self.config, (self.folder.path / FILE).is_file()
        RunFolder.create(config.out, is_profile and not config.overwrite, config.overwrite)
        names = ("prompt_tokens", "new_tokens", "rounds")
        timing = {name: getattr(config, name) for name in names}
        timing |= {"prompts": self.num_prompts, "threads": torch.get_num_threads()}
        timing["device"] = str(self.model.device)
        fitted = {"text": content_of(self.train), "maps": {"targets": self._targets()}}
        measured = fitted | {"text measured": content_of(self.valid)}
        stages = [
            ("maps between the layers", fitted, self._fit, "shortcuts"),
            ("what every layer knows", measured, self._evaluate, ""),
        ]
        if self.adapter.kind != "encoder":
            stages.append(("token by token", fitted | {"prompt": config.prompt}, self._look, ""))
        if self.num_prompts:
            decides = measured | {"timing": timing, "machine": processor()}
            stages.append(("generation", decides, self._compare, "frontier.json"))
        with self.folder.lock():
            self._keep()
            for number, (name, decides, make, file) in enumerate(stages, start=1):
                title, before = f"[{number}/{len(stages)}] {name}", self.before.get(name)
                if before == decides and (self.folder.path / file).exists():
                    announce(f"{title}: done before")
                else:
                    known = before if isinstance(before, dict) else decides
                    changed = [key for key in decides if known.get(key) != decides[key]]
                    again = f": again, since this has changed: {', '.join(changed)}"
                    announce(title + again * bool(changed))
                    make()
                self.stages[name] = decides
                self._keep()
            return self._finish()

    def _targets(self) -> str:
        pairs = self.adapter.num_layers * (self.adapter.num_layers + 1) // 2
        return "all" if pairs * self.adapter.width**2 * 4 <= MOST_MAP_BYTES else "last"

    def _keep(self, **found: Any) -> dict[str, Any]:
        """Write `profile.json`, and return what it holds; until all is done, with older stages."""
        content = {
            "model": self.config.model.name,
            "fingerprint": self.fingerprint,
            "kind": self.adapter.kind,
            "layers": self.adapter.num_layers,
            "data": self.config.data,
            "stages": self.stages if found else self.before | self.stages,
            **found,
        }
        write_json(self.folder.path / FILE, content)
        return content

    def _fit(self) -> None:
        shutil.rmtree(self.folder.path / "shortcuts", ignore_errors=True)
        (self.folder.path / "frontier.json").unlink(missing_ok=True)  # it was about other maps
        config = SHORTCUT.load("config", "ShortcutFitConfig")(self.config.out)
        config.data, config.model = str(self.config.data), self.config.model
        config.dataset.lines, config.dataset.min_chars = self.config.lines, self.config.min_chars
        config.fit.ridge, config.fit.targets = RIDGE, self._targets()
        fit_run = SHORTCUT.load("commands", "fit_run")
        fit_run(config, self.folder, self.model, self.tokenizer, self.train)

    def _shortcuts(self) -> Any:
        shortcuts = SHORTCUT.load("modeling", "Shortcuts")
        return shortcuts.from_pretrained(self.folder.path / "shortcuts")

    def _evaluate(self) -> None:
        config = SHORTCUT.load("config", "ShortcutEvalConfig")(self.config.out)
        config.data, config.positions = str(self.config.data), "all"
        config.dataset.lines = self.config.eval_lines
        config.dataset.min_chars = self.config.min_chars
        shortcuts, loaded = self._shortcuts(), (self.model, self.tokenizer)
        evaluate_run = SHORTCUT.load("commands", "evaluate_run")
        evaluate_run(config, self.folder, [shortcuts], *loaded, self.valid)
        if self.adapter.kind == "encoder":  # which is told by its states, in parts for an interval
            measure = SHORTCUT.load("evaluation", "evaluate")
            num = min(NUM_PARTS, len(self.valid))
            parts = (self.valid[place::num] for place in range(num))
            found = (measure(*loaded, shortcuts, part, positions="all").r2 for part in parts)
            columns = zip(*(r2[shortcuts.mode][:, -1].tolist() for r2 in found), strict=True)
            rows = [median_interval(column)._asdict() for column in columns]
            values = {"mode": shortcuts.mode, "layers": rows}
            replace_records(self.folder.metrics, [Record(0, "r2_by_layer", values)])

    def _look(self) -> None:
        look = SHORTCUT.load("lens", "lens")
        record = look(self.model, self.tokenizer, self._shortcuts(), self.config.prompt)
        replace_records(self.folder.metrics, [record])

    def _compare(self) -> None:
        """Measure the ways to generate; early exit at the thresholds that the evaluation found."""
        from deepenough.compare.config import CompareConfig, Grid
        from deepenough.compare.frontier import run_comparison
        from deepenough.training.logging import reading

        records = [r.values for r in read_records(self.folder.metrics)[0] if r.kind == "saved"]
        found = [r["lambda"] for r in records if r["mode"] != "id" and r["lambda"] is not None]
        exits = sorted({round(min(1.0, value), 3) for value in found}, reverse=True)
        settings = CompareConfig(
            runs=[self.config.out],
            out=self.config.out,
            split="valid",
            limit=self.num_prompts,
            prompt_tokens=self.config.prompt_tokens,
            new_tokens=self.config.new_tokens,
            rounds=self.config.rounds,
            mechanisms=list(WAYS if exits else WAYS[:-1]),
            grid=Grid(exit=exits or None),
            count_flops=False,
        )
        try:
            candidate = self._candidate(settings)
        except UserError as error:  # a model that can be sped up, but not left early
            self.notes.append(f"Early exit was not measured: {error}")
            settings = replace(settings, mechanisms=list(WAYS[:-1]))
            candidate = self._candidate(settings)
        with reading("passes", "timing") as progress:
            run_comparison(settings, progress, [candidate])

    def _candidate(self, settings: CompareConfig) -> Any:
        open_candidate = DECODE.load("evaluation", "open_candidate")
        name, loaded = self.folder.path.resolve().name, (self.model, self.tokenizer)
        candidate = open_candidate(self.config.out, name, settings, loaded, self.valid)
        candidate.points()
        return candidate

    def _finish(self) -> dict[str, Any]:
        """Write the page and the JSON file from what the stages left."""
        from deepenough.report.page import read_report, write_page

        if self.config.data == OWN_TEXT:
            self.notes.append("Measured on the prose inside Python; text of your own tells more.")
        title = f"{self.config.model.name}: how deep does it need to go?"
        report = read_report([self.folder.path], title)
        findings = [finding for entry in report.entries for finding in entry.section.findings]
        records = read_records(self.folder.metrics)[0]
        points = read_json(self.folder.path / "frontier.json")["points"] if self.num_prompts else []
        write_page(replace(report, notes=[*report.notes, *self.notes]), self.folder.path / PAGE)
        return self._keep(
            verdict=[{"sentence": str(f), "command": getattr(f, "command", "")} for f in findings],
            notes=self.notes,
            decided=[record.values for record in records if record.kind == "decided"],
            saved=[record.values for record in records if record.kind == "saved"],
            generation=[{**point, "sample": None} for point in points],
            provenance=provenance(),
        )


PROFILE = Command(
    name="profile",
    help="find out how early a model knows its answer and what that is worth here, in one page",
    config=ProfileConfig,
    run=run_profile,
    description="All about one model in one command: fit maps between its layers, measure what\n"
    "every layer knows and how many could be saved, time plain, lossless and early-exit\n"
    "generation side by side, and write a verdict, one page and one JSON file.",
    goes_on=True,
    example="deepenough profile smollm2 --data mytext.txt --out runs/profile",
    positional=("model.name",),
)
