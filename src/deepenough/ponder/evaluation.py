"""Measure a classifier that ponders: accuracy against passes for every exit.

One run at full depth keeps the answers of all passes and the halting probabilities; every
threshold, confidence, patience and fixed exit is then replayed on them, because what a pass answers
does not depend on when others stop. Nothing is run twice for a sweep.

Difficulty of an example: the pass from which on the model's answer no longer changes. An example
settled at pass 1 could have stopped there; a later one is one the passes were needed for.

Shapes: B examples, N passes, C labels.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from deepenough.config import resolve, validate
from deepenough.data.batches import by_length
from deepenough.data.classification import (
    METRICS,
    EncodedExamples,
    LabelledTexts,
    open_classification,
)
from deepenough.data.config import REGRESSION, SINGLE_LABEL, ProblemType
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.intercept import eval_mode
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Interval,
    OperatingPoint,
    Scores,
    content_of,
    intervals_of,
    resampled_interval,
    share_interval,
)
from deepenough.ponder.config import (
    EXITS,
    ExitConfig,
    PonderConfig,
    PonderEvalConfig,
    PonderTrainConfig,
    options_of,
)
from deepenough.ponder.figures import EXIT, PASSES
from deepenough.ponder.halting import POLICIES, HaltingPolicy, answer_loss, decide, make_policy
from deepenough.ponder.inference import PonderOutput, Prediction, Text, replay, select_pass
from deepenough.ponder.modeling import PonderClassifier
from deepenough.runs import Record, RunFolder, model_folder, read_records, replace_records
from deepenough.trace import DepthTrace
from deepenough.training.checkpoint import load_finished
from deepenough.training.distributed import place_among

THRESHOLDS: tuple[float, ...] = tuple(round(0.05 * step, 2) for step in range(1, 21))
"""Thresholds of a sweep, from stopping at once to never before the last pass."""
CONFIDENCES: tuple[float, ...] = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
FINE_THRESHOLDS = tuple(round(0.005 * step, 3) for step in range(1, 201))
FINE_CONFIDENCES = tuple(round(1 - 0.5 * 0.95**step, 5) for step in range(150))
"""Where a budget of passes is to be met closely: up to 0.9998, steps growing finer."""
EVAL_BATCH = 64
SPLITS = ("valid", "test", "train")
"""Splits in the order in which one is chosen: labelled, and not trained on, first."""


# -- answers of all passes, and what a policy makes of them ----------------------------------------


@dataclass(frozen=True)
class AllPasses:
    """What a model says of some examples after every pass."""

    step_logits: Tensor
    """[N, B, C]"""
    halt_logits: Tensor | None
    """[B, N - 1], of `lambda_n`; None of a model that has not learned to halt."""
    labels: Tensor
    """[B]: the number of each label, or the value; [B, C] where several labels may hold."""
    problem: ProblemType = SINGLE_LABEL
    metrics: tuple[str, ...] = METRICS[SINGLE_LABEL]
    """What answers are judged by, names of `measure`."""

    @property
    def num_passes(self) -> int:
        """N."""
        return len(self.step_logits)

    def passes(self, policy: HaltingPolicy) -> Tensor:
        """Return the pass at which each example stops, `[B]`."""
        return replay(policy, self.step_logits, self.halt_logits, problem=self.problem)


@torch.no_grad()
def all_passes(
    model: PonderClassifier,
    examples: EncodedExamples,
    accelerator: Accelerator | None = None,
    metrics: tuple[str, ...] | None = None,
) -> AllPasses:
    """Run all examples at full depth, each process its share of the batches."""
    rank, world = place_among(accelerator)
    shape = model.num_passes, len(examples), model.num_labels
    how: Any = {"dtype": torch.float32, "device": model.device}
    step_logits = torch.zeros(shape, **how)
    halt_logits = torch.zeros(len(examples), model.num_passes - 1, **how)
    with eval_mode(model):
        for rows in by_length(examples.lengths, EVAL_BATCH)[rank::world]:
            batch = examples.batch(rows, model.device)
            batch.pop("labels")
            output = model(**batch, all_passes=True)
            step_logits[:, rows] = output.step_logits.float()
            if output.halt_logits is not None:
                halt_logits[rows] = output.halt_logits.float()
    if accelerator is not None and world > 1:  # rows of other processes are zero
        step_logits = accelerator.reduce(step_logits, reduction="sum")
        halt_logits = accelerator.reduce(halt_logits, reduction="sum")
    labels = torch.tensor(examples.labels)
    halts = halt_logits.cpu() if model.has_halting else None
    scored = metrics or METRICS[model.problem]
    return AllPasses(step_logits.cpu(), halts, labels, model.problem, scored)


def quality(answers: AllPasses, policy: HaltingPolicy) -> dict[str, float]:
    """Return loss and scores of the answers given, mean passes, and their share of all."""
    passes = answers.passes(policy)
    logits = select_pass(answers.step_logits, passes)
    mean = float(exact(passes).mean())
    given = decide(logits, answers.problem)
    return {
        "loss": float(answer_loss(logits, answers.labels, answers.problem)),
        **{name: measure(name, given, answers.labels) for name in answers.metrics},
        "passes": mean,
        "share": mean / answers.num_passes,
    }


def measure(name: str, given: Tensor, wanted: Tensor) -> float:
    """Return a score of answers `[B]`, or `[B, C]` where several labels may hold.

    `accuracy`, where all labels of an example must be right; `f1` of label 1, or of all labels
    counted together; `matthews` correlation of two labels; `pearson` and `spearman` correlation of
    values. A correlation with answers that are all the same is 0.
    """
    given, wanted = exact(given), exact(wanted)
    match name:
        case "accuracy":
            return float(exact((given == wanted).view(len(given), -1).all(-1)).mean())
        case "f1":
            return float(2 * (given * wanted).sum() / (given + wanted).sum().clamp_min(1.0))
        case "spearman":
            given, wanted = _ranks(given), _ranks(wanted)
    given, wanted = given - given.mean(), wanted - wanted.mean()
    scale = given.norm() * wanted.norm()
    return float((given * wanted).sum() / scale) if scale else 0.0


def _ranks(values: Tensor) -> Tensor:
    """Return the place of each value in their order; equal values share their mean place."""
    _, group, counts = values.unique(return_inverse=True, return_counts=True)
    return exact((counts.cumsum(0) - (counts - 1) / 2)[group])


def score_interval(name: str, given: Tensor, wanted: Tensor) -> Interval:
    """Return a score with its confidence interval."""
    if name == "accuracy":
        value = measure(name, given, wanted)
        return share_interval(round(value * len(given)), len(given))
    return resampled_interval(lambda rows: measure(name, given[rows], wanted[rows]), len(given))


def settled_at(answers: AllPasses) -> Tensor:
    """Return the pass from which on the answer no longer changes, `[B]`, counted from 1."""
    each = decide(answers.step_logits, answers.problem)
    differs = (each != each[-1]).view(*each.shape[:2], -1).any(-1)
    position = torch.arange(1, answers.num_passes + 1)[:, None]
    return (differs * position).amax(0) + 1


def sweep(
    answers: AllPasses,
    thresholds: Sequence[float] = THRESHOLDS,
    confidences: Sequence[float] = CONFIDENCES,
) -> list[dict[str, Any]]:
    """Return the quality of every threshold, confidence, patience and fixed exit."""
    grid: dict[str, Sequence[float]] = {}
    if answers.halt_logits is not None:
        grid["quantile"] = thresholds
    if answers.problem != REGRESSION:
        grid["confidence"] = confidences
    grid["patience"] = range(1, answers.num_passes)
    grid["fixed"] = range(1, answers.num_passes + 1)
    return [
        {"policy": name, "setting": setting} | quality(answers, POLICIES[name](setting))
        for name, settings in grid.items()
        for setting in settings
    ]


def choose_exit(answers: AllPasses, options: PonderConfig) -> tuple[PonderConfig, str]:
    """Return options with the exit that suits the answers to held-out examples, and why it does.

    Of the exits that fit the objective: those that answer best, by the mean of the scores as in
    GLUE, and of these the one of the fewest passes. With a budget of passes: of each kind of exit
    the most cautious setting within it, and of these the one that answers best. Where the last
    answer alone is trained there is nothing to choose.
    """
    if options.objective == "last":
        return replace(options, exit="fixed"), "as only the last answer is trained"
    if options.exit_budget is None:
        suited = {"ponder": ("quantile",), "weighted": ("confidence", "patience", "fixed")}
        points = [point for point in sweep(answers) if point["policy"] in suited[options.objective]]
        why = "the fewest passes ({passes:.1f} of {all}) at the best {metric} ({best:.3f})"
    else:
        points = sweep(answers, FINE_THRESHOLDS, FINE_CONFIDENCES)
        within = [point for point in points if point["share"] <= options.exit_budget]
        named = [point for point in within if options.exit in (None, point["policy"])]
        named = named or [point for point in within if point["policy"] == "fixed"]
        named.sort(key=lambda point: point["setting"])
        points = list({point["policy"]: point for point in named}.values())
        why = "the best {metric} ({best:.3f}) within the budget ({passes:.1f} of {all} passes)"

    def score(point: dict[str, Any]) -> float:
        return sum(point[name] for name in answers.metrics) / len(answers.metrics)

    # At a tie the most cautious setting.
    best = max(points, key=lambda p: (score(p), -p["passes"], p["setting"]))
    chosen = {EXITS[best["policy"]][0]: best["setting"]}
    told = {"all": answers.num_passes, "metric": " and ".join(answers.metrics)}
    reason = why.format(passes=best["passes"], best=score(best), **told)
    reason += f" on {len(answers.labels)} validation examples"
    return replace(options, exit=best["policy"], exit_budget=None, **chosen), reason


def passes_by(groups: Tensor, num_groups: int, passes: Tensor, num_passes: int) -> list[list[int]]:
    """Return how many examples of each group (from 0) made 1, 2, ... passes: `[groups][N]`."""
    cells = groups * num_passes + passes - 1
    counts = cells.bincount(minlength=num_groups * num_passes)
    table: list[list[int]] = counts.view(num_groups, num_passes).tolist()
    return table


# -- a finished run --------------------------------------------------------------------------------


def load_classifier(folder: str) -> tuple[PonderClassifier, Any]:
    """Return the model and tokenizer of a finished run, or of a folder in Hugging Face form."""
    instead = "which does not ponder: give the folder of `deepenough ponder train`"
    return load_finished(folder, PonderClassifier, instead)


class FinishedRun:
    """A classifier that was trained, and the settings of its training if they are there."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.model, self.tokenizer = load_classifier(run)
        self.folder = RunFolder(model_folder(run).parent)
        self.trained: PonderTrainConfig | None = None
        if self.folder.is_run():
            self.trained = resolve(PonderTrainConfig, self.folder.settings())
        names: Any = self.model.config.id2label
        self.labels = [names[number] for number in range(self.model.num_labels)]

    def policy(self, exit: ExitConfig) -> HaltingPolicy:
        """Return the policy asked for, by default the one that was saved with the model."""
        options = exit.applied_to(options_of(self.model.config))
        options.check_depth(self.model.num_passes, shared=True)
        return make_policy(options)

    def open_split(self, data: str | None, split: str | None) -> tuple[LabelledTexts, str]:
        """Return labelled texts, by default those of training, and the split to measure on."""
        if self.trained is None and data is None:
            raise UserError(
                f"{self.run} has no config.yaml that says what it was trained on: give --data."
            )
        trained = self.trained or PonderTrainConfig(data="")
        is_other = data is not None and data != trained.data
        dataset = trained.dataset.for_other_data() if is_other else trained.dataset
        dataset = replace(dataset, problem_type=self.model.problem)
        texts = open_classification(data or trained.data, dataset, self.labels)
        return texts, split or next(name for name in SPLITS if name in texts.splits)

    @property
    def token_limit(self) -> int:
        """Tokens at which texts are cut, as in training."""
        dataset = (self.trained or PonderTrainConfig()).dataset
        return dataset.token_limit(self.model.max_length)


def predict(
    run: str, texts: Iterable[Text], exit: ExitConfig | None = None, batch_size: int = 32
) -> Iterator[Prediction]:
    """Yield label, probability and passes of each text, in their order."""
    finished = FinishedRun(run)
    return finished.model.predict(
        texts,
        finished.tokenizer,
        policy=finished.policy(exit or ExitConfig()),
        batch_size=batch_size,
        max_length=finished.token_limit if finished.trained else None,
    )


def evaluate(config: PonderEvalConfig) -> dict[str, Any]:
    """Return scores and passes with the exit asked for.

    The whole frontier, and all that the figures need, goes into the run's metrics.jsonl.
    """
    validate(config)
    finished = FinishedRun(config.run)
    model, policy = finished.model, finished.policy(config.exit)
    texts, split = finished.open_split(config.data, config.split)
    rows = texts.split(split)
    examples = EncodedExamples(rows, finished.tokenizer, finished.token_limit, split)
    answers = all_passes(model, examples, metrics=texts.metrics)
    values: dict[str, Any] = {"split": split, "examples": len(rows)} | quality(answers, policy)
    values["exit"] = config.exit.applied_to(options_of(model.config)).exit_setting
    if finished.folder.is_run():
        step, number = _place(finished.folder)
        about = {"model": model.config.objective, "data": texts.name, "split": split}
        about |= {"evaluation": number}
        found = records(answers, policy, finished.labels)
        whole = [Record(step, kind, about | own) for kind, own in found]
        with finished.folder.lock():
            replace_records(finished.folder.metrics, whole, lambda earlier: False)
    given = decide(select_pass(answers.step_logits, answers.passes(policy)), answers.problem)
    scores = {name: score_interval(name, given, answers.labels) for name in answers.metrics}
    return values | intervals_of(**scores)


def _place(folder: RunFolder) -> tuple[int, int]:
    """Return the step of the run's last record, and the number of this evaluation of it."""
    if not folder.metrics.is_file():
        return 0, 1
    known, _ = read_records(folder.metrics)
    step = max((record.step for record in known), default=0)
    return step, 1 + max((record.values.get("evaluation", 0) for record in known), default=0)


def records(
    answers: AllPasses, policy: HaltingPolicy, labels: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and values of everything the figures need."""
    about: dict[str, Any] = {"num_passes": answers.num_passes}
    if answers.metrics[0] != "accuracy":
        about["metric"] = answers.metrics[0]
    for point in sweep(answers):
        yield EXIT, about | point
    passes = answers.passes(policy)
    numbers = [str(number) for number in range(1, answers.num_passes + 1)]
    tables = []
    if answers.problem == SINGLE_LABEL:
        tables.append(("label", list(labels), answers.labels))
    if answers.problem != REGRESSION:
        tables.append(("difficulty", numbers, settled_at(answers) - 1))
    for by, names, groups in tables:
        counts = passes_by(groups, len(names), passes, answers.num_passes)
        yield PASSES, about | {"by": by, "groups": names, "counts": counts}


# -- comparison ------------------------------------------------------------------------------------

COMPARED_EXAMPLES, COMPARED_BATCH = 512, 32
COMPARED_EXITS = {
    "threshold": ("quantile", "--exit.threshold {value:g}"),
    "confidence": ("confidence", "--exit.threshold {value:g}"),
    "passes": ("fixed", "--exit.passes {value}"),
}
"""Exits of operating points, and how `ponder eval` is told their setting."""


class PonderCandidate:
    """A classifier in a comparison: accuracy, over ways of stopping."""

    mechanism = "ponder"

    def __init__(self, run: str, name: str, data: ComparedData) -> None:
        self.name, self.path, self.grid = name, run, data.grid
        finished = FinishedRun(run)
        self.model = finished.model
        texts, split = finished.open_split(data.data, data.split)
        self.metric = texts.metrics[0]
        rows = texts.split(split)[: data.limit or COMPARED_EXAMPLES]
        examples = EncodedExamples(rows, finished.tokenizer, finished.token_limit, split)
        size = data.batch_size or COMPARED_BATCH
        self.batches = [
            examples.batch(part, self.model.device) for part in by_length(examples.lengths, size)
        ]
        self.labels: Tensor = torch.cat([batch.pop("labels") for batch in self.batches])
        detail = {"examples": len(rows), "batch_size": size, "labels": finished.labels}
        detail["content"] = content_of((row.text, row.pair, row.label) for row in rows)
        self.where = f" --split {split}"
        if finished.trained is None or texts.name != finished.trained.data:
            self.where = f" --data {shlex.quote(texts.name)}{self.where}"
        self.task = ComparedTask(
            "classification", texts.name, split, "example", self.metric, True, detail
        )

    def points(self) -> Sequence[OperatingPoint]:
        """Return fixed depths, then the thresholds of halting and of confidence."""
        last, grid = self.model.num_passes, self.grid
        usual = sorted({last, (last + 1) // 2, max(1, last // 4)}, reverse=True)
        fixed = usual if grid.passes is None else grid.passes
        if too_many := [n for n in fixed if n > last]:
            raise UserError(
                f"{self.path} makes {last} passes, so that {too_many[0]} cannot be compared: "
                "lower grid.passes."
            )
        found = [
            OperatingPoint(f"{n} pass{'es' * (n > 1)}", {"passes": n}, "fixed depth") for n in fixed
        ]
        if self.model.has_halting:
            values = [0.95, 0.8, 0.5] if grid.threshold is None else grid.threshold
            found += [OperatingPoint(f"halt {v:g}", {"threshold": v}) for v in values]
        usual_sure = [0.99, 0.9] if self.model.problem != REGRESSION else []
        values = usual_sure if grid.confidence is None else grid.confidence
        found += [OperatingPoint(f"sure {v:g}", {"confidence": v}, "confidence") for v in values]
        command = f"deepenough ponder eval {shlex.quote(self.path)}{self.where}"
        points = []
        for point in found:
            _policy(point)  # refused before the first is measured
            ((kind, value),) = point.settings.items()
            exit, setting = COMPARED_EXITS[kind]
            options = f"--exit.exit {exit} {setting.format(value=value)}"
            points.append(replace(point, command=f"{command} {options}"))
        return points

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> list[PonderOutput]:
        """Answer all examples; this is what is timed."""
        policy = _policy(point)
        return [self.model(**batch, policy=policy) for batch in self.batches]

    def judge(self, point: OperatingPoint, answers: list[PonderOutput]) -> Scores:
        """Return the score of the answers, and their cost by the trace."""
        logits = [output.logits for output in answers if output.logits is not None]
        given = decide(torch.cat(logits), self.model.problem)
        trace = DepthTrace.join([output.trace for output in answers if output.trace is not None])
        score = score_interval(self.metric, given.cpu(), self.labels.cpu())
        return Scores(score, len(given), trace.mean_blocks, trace.total_flops)


open_candidate = PonderCandidate
"""Opens a finished run as `deepenough compare` measures it."""


def _policy(point: OperatingPoint) -> HaltingPolicy:
    ((kind, value),) = point.settings.items()
    return POLICIES[COMPARED_EXITS[kind][0]](value)
