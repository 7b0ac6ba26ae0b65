"""Lazy translates as well as a Universal Transformer, and stopping saves a third of its FLOPs.

Measures every finished run in a folder that is called `lazy-<kind>-<seed>` on Multi30k's test 2016,
with beam 4: at the steps of training; with one and a half times and half the encoder steps; and for
lazy models with equilibrium exit, at three savings of encoder steps. Epsilon and patience of each
are chosen on the valid split, by the loss a token there; the test split only sees what was chosen,
with the steps of training and with one and a half times as many. Beside it stands the same model
with as many steps for all tokens as the stopping ones make on average. Encoder seconds are those of
batches of 32, full and stopping runs in turns. Kept too: how far each step moves the states.

The targets are at most 0.3 BLEU lost at the first saving (about 30 % of the FLOPs), and 0.5 with
one and a half times the steps. A training takes hours, so each seed of the recipe is measured and
recorded by itself.

Every run is compared with the first universal one (without one, the first run) by paired bootstrap
over sentences, of test 2016 and of all four test sets together. What has been measured is kept in
the folder, translations included, so that an interrupted command goes on. docs/results.md has the
commands that train the runs of each variant.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from benchmarks.figures import Figure, Unavailable, interleaved, spread
from deepenough.data.translation import IGNORE_INDEX, EncodedPairs
from deepenough.lazy.config import BeamSearchConfig, LazyEvalConfig
from deepenough.lazy.evaluation import measure_encoder, measured_pairs
from deepenough.lazy.inference import (
    TrainedModel,
    bleu,
    load_translator,
    plain_loss,
    translate_pairs,
)
from deepenough.nn.layers import Dropout

QUICK = False
SEEDS = [0, 1, 2]
VARIANTS = {
    "recipe_0": {"runs": "runs/lazy-recipe", "seed": 0},
    "recipe_1": {"runs": "runs/lazy-recipe", "seed": 1},
    "recipe_2": {"runs": "runs/lazy-recipe", "seed": 2},
    "eight": {"runs": "runs/lazy-eight"},
    "one_norm": {"runs": "runs/lazy-one-norm"},
    "state": {"runs": "runs/lazy-state"},
    "dropout": {"runs": "runs/lazy-dropout"},
    "small": {"runs": "runs/lazy-small"},
}
TEST = "test_2016_flickr"
TESTS = (TEST, "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
SAVED = (0.32, 0.42, 0.52)
"""Shares of encoder steps that the epsilons tried on the valid split would save."""
PATIENCE = (1, 2)
CANDIDATES = {
    "gate": [round(0.005 * 1.12**power, 4) for power in range(48)],
    "angle": [round(0.0005 * 1.12**power, 5) for power in range(48)],
}
"""Epsilons, by what is compared with them."""
ROUNDS = 7


def measure(
    runs: str = "runs/lazy-recipe", seed: int | None = None, threads: int = 1
) -> dict[str, Any]:
    """Measure the finished runs of a folder; return BLEU, losses, savings and comparisons.

    Args:
        runs: Folder of runs that are called `lazy-<kind>-<seed>`.
        seed: Only runs of this seed.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    folders = sorted(
        folder
        for folder in Path(runs).glob(f"lazy-*-{'*' if seed is None else seed}")
        if (folder / "model" / "config.json").is_file() and folder.name.count("-") == 2
    )
    if not folders:
        raise Unavailable(f"{runs} has no finished run: docs/results.md has the commands.")
    kept = Kept(Path(runs) / "lazy_translation.json")
    measured = [Measured(folder, kept) for folder in folders]
    rows = {run.key: run.figures() for run in measured}
    return {
        **rows,
        "paired_bootstrap": paired(measured, [TEST]),
        "paired_bootstrap_all_tests": paired(measured, TESTS),
        "settings": {
            "test": TEST,
            "beams": 4,
            "signature": measured[0].signature,
            "models": {run.key: run.settings() for run in measured},
            **({} if seed is None else {"seeds": [seed]}),
        },
    }


class Kept:
    """Measurements kept in a file, so that an interrupted command goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def get(self, key: str, make: Any) -> Any:
        """Return what is kept under a key, making and keeping it first if need be."""
        if key not in self.values:
            self.values[key] = make()
            self.path.write_text(json.dumps(self.values, indent=1))
            print(key, self.shown(key), flush=True)
        return self.values[key]

    def shown(self, key: str) -> Any:
        """Return what to print of a measurement."""
        value = self.values[key]
        return value["bleu"] if isinstance(value, dict) and "bleu" in value else value


class Measured:
    """One trained run and its measurements."""

    def __init__(self, folder: Path, kept: Kept) -> None:
        self.folder, self.kept = folder, kept
        self.key = folder.name.removeprefix("lazy-").replace("-", "_")
        self.signature = ""
        self.translator: TrainedModel = load_translator(str(folder))
        self.config = self.translator.model.config
        self.pairs: dict[str, EncodedPairs] = {}
        self.written: dict[tuple[str, str], list[str]] = {}
        weights = (folder / "model" / "model.safetensors").stat()
        self.name = f"{folder.name} {int(weights.st_mtime)}"

    def settings(self) -> dict[str, Any]:
        """Return what the model was trained with."""
        names = ("mechanism", "compare", "norm", "halt_on", "dropout", "clean_gates")
        return {name: getattr(self.config, name) for name in names}

    def figures(self) -> dict[str, Any]:
        """Return all figures of the run."""
        config = self.config
        row: dict[str, Any] = {
            "parameters": self.translator.model.num_parameters(),
            "encoder_steps": config.encoder_steps,
            "decoder_steps": config.decoder_steps,
            "bleu": self.bleu(TEST, {}),
            "other_tests_bleu": {test: self.bleu(test, {}) for test in TESTS[1:]},
            "valid_bleu": self.bleu("valid", {}),
            "losses": {split: self.loss(split) for split in ("valid", TEST)},
            "movement": self.kept.get(f"{self.name} movement", self.movement),
        }
        if config.mechanism != "transformer":
            row["more_steps"] = self.with_steps(config.encoder_steps * 3 // 2)
            row["half_steps"] = self.with_steps(config.encoder_steps // 2)
            row["losses_with_steps"] = {
                str(steps): self.loss(TEST, {"encoder_steps": steps})
                for steps in (config.encoder_steps * 3 // 2, config.encoder_steps * 2)
            }
        if config.mechanism == "lazy":
            row["gates"] = self.kept.get(f"{self.name} gates", self.gates)
            points = [self.at_rest(row["bleu"], share) for share in SAVED]
            row["at_rest"] = {f"point_{n}": point for n, point in enumerate(points)}
            row["at_rest_all_tests"] = self.at_rest_on_all(points[len(SAVED) // 2])
        return row

    def at_rest(self, full_bleu: float, share: float) -> dict[str, Any]:
        """Return equilibrium exit that saves about this share of the steps."""
        grid = self.kept.get(f"{self.name} grid", self.grid)
        nearest = [
            min(
                (point for point in grid if point["patience"] == patience),
                key=lambda point: abs(1.0 - point["flops"] - share),
            )
            for patience in PATIENCE
        ]
        settings = [{name: point[name] for name in ("epsilon", "patience")} for point in nearest]
        losses = [self.loss("valid", setting) for setting in settings]
        chosen = losses.index(min(losses))
        setting = settings[chosen]
        score = self.bleu(TEST, setting)
        kept = self.kept.get(f"{self.name} cost {setting}", lambda: self.cost(TEST, setting))
        cost = kept | {"time_share": Figure(**kept["time_share"])}
        return {
            **setting,
            "valid_flops": nearest[chosen]["flops"],
            "valid_loss": losses[chosen],
            "other": {**nearest[1 - chosen], "valid_loss": losses[1 - chosen]},
            "bleu": score,
            "bleu_lost": full_bleu - score,
            **cost,
            "more_steps": self.with_steps(self.config.encoder_steps * 3 // 2, setting),
            "same_steps_for_all": self.with_steps(round(cost["mean_steps"])),
        }

    def at_rest_on_all(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return one of these on all test sets together, beside all steps."""
        resting = {name: point[name] for name in ("epsilon", "patience")}
        named = {"all_steps": self.texts(TESTS, {}), "at_rest": self.texts(TESTS, resting)}
        return resting | bootstrap(named, self.references(TESTS))

    def loss(self, split: str, setting: dict[str, Any] | None = None) -> float:
        """Return the loss a token of a split, with other settings if given."""
        key = f"{self.name} loss {split}" + (f" {setting}" if setting else "")

        def make() -> float:
            usual = {name: getattr(self.config, name) for name in setting or {}}
            self.config.update(setting or {})
            found: float = plain_loss(self.translator.model, self.split(split), 4096)["loss"]
            self.config.update(usual)
            return found

        return float(self.kept.get(key, make))

    def with_steps(
        self, encoder_steps: int, setting: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return BLEU with another number of encoder steps."""
        score = self.bleu(TEST, {"encoder_steps": encoder_steps} | (setting or {}))
        return {"encoder_steps": encoder_steps, "bleu": score}

    def grid(self) -> list[dict[str, Any]]:
        """Return, for each patience, the epsilons that save about the shares that are asked for."""
        model, pairs = self.translator.model, self.split("valid")
        points = []
        for patience in PATIENCE:
            found = []
            for epsilon in CANDIDATES[self.config.halt_on]:
                search = BeamSearchConfig(epsilon=epsilon, patience=patience)
                depth = measure_encoder(model, pairs.head(256), search)["encoder_depth"]
                found.append((1.0 - depth / self.config.encoder_steps, epsilon))
                if found[-1][0] > max(SAVED) + 0.1:
                    break
            for share in SAVED:
                saved, epsilon = min(found, key=lambda pair: abs(pair[0] - share))
                point = {"epsilon": epsilon, "patience": patience, "flops": 1.0 - saved}
                if point not in points and abs(saved - share) < 0.08:
                    points.append(point)
        return points

    @torch.inference_mode()
    def movement(self) -> dict[str, list[float]]:
        """Return how far each step moves the states, as a share of their length.

        It is `|x_n+1 - x_n| / |x_n|`, root of the mean square over tokens. Dropout of a step in
        training is noise of this size times `sqrt(p / (1 - p))`.
        """
        batch = self.split("valid").head(256).batch(range(256))
        output = self.translator.model(**batch, output_hidden_states=True)
        sides = {
            "encoder": (output.encoder_hidden_states, batch["attention_mask"] > 0),
            "decoder": (output.decoder_hidden_states, batch["targets"] != IGNORE_INDEX),
        }
        found = {}
        for side, (states, real) in sides.items():
            shares = [
                (after - before).norm(dim=-1)[real] / before.norm(dim=-1)[real]
                for before, after in pairwise(states)
            ]
            found[side] = [float(share.square().mean().sqrt()) for share in shares]
        return found

    @torch.inference_mode()
    def gates(self) -> dict[str, dict[str, list[float]]]:
        """Return mean gates of every step in use and, where it bends them, with dropout."""
        model = self.translator.model
        pairs = self.split("valid").head(256)
        batch = pairs.batch(range(256))
        real = {"encoder": batch["attention_mask"] > 0, "decoder": batch["targets"] != IGNORE_INDEX}
        found: dict[str, dict[str, list[float]]] = {}
        for name in ("in_use",) if self.config.clean_gates else ("in_use", "in_training"):
            torch.manual_seed(0)
            for module in model.modules():
                if isinstance(module, Dropout):
                    module.train(name == "in_training")
            output = model(**batch)
            found[name] = {
                side: output[f"{side}_gates"][chosen].mean(0).tolist()
                for side, chosen in real.items()
            }
        model.eval()
        return found

    def cost(self, split: str, setting: dict[str, Any]) -> dict[str, Any]:
        """Return FLOPs and seconds of the encoder as shares of the full model's, in turns."""
        model, pairs = self.translator.model, self.split(split)
        searches = {"full": BeamSearchConfig(epsilon=0.0), "exit": BeamSearchConfig(**setting)}
        timings = interleaved(
            {
                name: lambda search=search: measure_encoder(model, pairs, search)
                for name, search in searches.items()
            },
            ROUNDS,
            warmup=0,
        )
        full, stopping = (timings.results[name][0] for name in searches)
        pairs_of_rounds = zip(timings.seconds["exit"], timings.seconds["full"], strict=True)
        return {
            "mean_steps": stopping["encoder_depth"],
            "flops_share": stopping["encoder_flops"] / full["encoder_flops"],
            "time_share": asdict(spread([a / b for a, b in pairs_of_rounds], "x")),
            "full_seconds": statistics.median(timings.seconds["full"]),
        }

    def bleu(self, split: str, setting: dict[str, Any]) -> float:
        """Return BLEU of a split, translating it first if need be."""
        search = replace(BeamSearchConfig(beams=4, length_penalty=0.6), **setting)

        def make() -> dict[str, Any]:
            pairs = self.split(split)
            written = translate_pairs(*self.translator, pairs, search)
            score = bleu(written, [pair.target for pair in pairs.pairs])
            return {"bleu": score.score, "signature": score.signature, "written": written}

        found = self.kept.get(f"{self.name} {split} {setting}", make)
        self.signature = found["signature"]
        self.written[split, str(setting)] = found["written"]
        return float(found["bleu"])

    def texts(self, tests: Sequence[str], setting: dict[str, Any]) -> list[str]:
        """Return its translations of several test sets."""
        for test in tests:
            self.bleu(test, setting)
        return [text for test in tests for text in self.written[test, str(setting)]]

    def references(self, tests: Sequence[str]) -> list[str]:
        """Return the reference translations of several test sets."""
        return [pair.target for test in tests for pair in self.split(test).pairs]

    def split(self, name: str) -> EncodedPairs:
        """Return the valid split, or one of the test sets."""
        if name not in self.pairs:
            run = str(self.folder)
            if name in TESTS:
                settings = LazyEvalConfig(run, split="test", test=name)
            else:
                settings = LazyEvalConfig(run, split=name)
            self.pairs[name] = measured_pairs(settings, self.translator)
        return self.pairs[name]


def paired(runs: list[Measured], tests: Sequence[str]) -> dict[str, Any]:
    """Return all runs beside the first universal one; nothing of a run that is alone."""
    if len(runs) < 2:
        return {}
    first = next((run for run in runs if run.config.mechanism == "universal"), runs[0])
    systems = [first, *(run for run in runs if run is not first)]
    named = {run.folder.name: run.texts(tests, {}) for run in systems}
    return bootstrap(named, first.references(tests))


def bootstrap(named: dict[str, list[str]], references: list[str]) -> dict[str, Any]:
    """Return BLEU with its 95 % interval over sentences, and p of a difference from the first."""
    _, found = PairedTest(list(named.items()), {"BLEU": BLEU()}, [references], "bs")()
    return {
        name: {
            "bleu": Figure(score.score, "BLEU", score.mean - score.ci, score.mean + score.ci),
            "p": score.p_value,
        }
        for name, score in zip(found["System"], found["BLEU"], strict=True)
    }
