"""The commands `deepenough par search|derive|train|eval|generate`."""

import dataclasses
import json
from shlex import quote

from deepenough.config import Command, ContinueConfig
from deepenough.par.config import ParDeriveConfig, ParEvalConfig, ParSearchConfig, ParTrainConfig


def run_search(config: ParSearchConfig) -> str:
    """Search, and return the pattern found."""
    from deepenough.par.training import search

    found, place = search(config), quote(config.out)
    share = found.relative_cost
    cost = "" if share is None else f", {share:.0%} of the baseline's cost"
    return f"{found.doubt()}pattern {found.pattern}{cost}; next: deepenough par plot {place}"


def run_derive(config: ParDeriveConfig) -> str:
    """Return the pattern of a search, and the command that trains it."""
    from deepenough.par.training import derive_run
    from deepenough.runs import RunFolder

    run = RunFolder.open(config.run)
    found = derive_run(run, config.budget)
    if config.json:
        content = dataclasses.asdict(found)
        return json.dumps(content | {"pi": content.pop("probabilities")})
    cost = f" at {found.relative_cost:.0%} of the baseline's cost" if found.relative_cost else ""
    said = f"{found.pattern}{cost}\n{found.doubt()}"
    budget = "" if config.budget is None else f" --budget {config.budget:g}"
    if run.derived.exists():
        said += f"{run.derived} holds an earlier model: move it away before the next command\n"
    resume = f"--config {quote(str(run.config))} --resume --retrain scratch{budget}"
    return f"{said}next: deepenough par search {resume}"


def run_train(config: ParTrainConfig) -> str:
    """Train, and return where the model is."""
    from deepenough.par.training import train

    run = train(config)
    place = quote(str(run.path))
    following = f"deepenough par generate {place} --prompt 'Once'"
    if config.model.objective == "masked":
        following = f"deepenough ponder train --encoder {place} --data ..."
    return f"model in {run.model}; next: {following}"


COMMANDS = (
    Command(
        name="search",
        help="find which blocks a language model needs on your text and machine",
        config=ParSearchConfig,
        run=run_search,
        description="Train a SuperNet that chooses its blocks, and derive the pattern it found.",
        example="deepenough par search --data mytext.txt --out runs/mine --budget 0.65",
    ),
    Command(
        name="derive",
        help="read the block pattern out of a search",
        config=ParDeriveConfig,
        run=run_derive,
        description="Print the likeliest pattern of a search, within a budget if one is given.",
        example="deepenough par derive runs/mine --budget 0.65",
        positional=("run",),
    ),
    Command(
        name="train",
        help="train a language model with a given or derived pattern",
        config=ParTrainConfig,
        run=run_train,
        description="Train a language model with a given block pattern (default: interleaved).",
        example="deepenough par train --data mytext.txt --pattern aadadd --out runs/aadadd",
    ),
    Command(
        name="eval",
        help="measure perplexity and bits per byte, or accuracy, of a trained model",
        config=ParEvalConfig,
        run="deepenough.par.evaluation:evaluate",
        description="Measure perplexity per token and per word, bits per byte and tokens a second "
        "on a\ntext, with the model's own tokenizer, in segments as long as in training unless\n"
        "--length says otherwise. Of a masked model: perplexity and accuracy on masked tokens.",
        example="deepenough par eval runs/mine --data mytext.txt --split valid",
        positional=("run",),
    ),
    Command(
        name="generate",
        help="write text with a trained model",
        config=ContinueConfig,
        run="deepenough.par.evaluation:continue_text",
        example="deepenough par generate runs/mine --prompt 'The function returns'",
        positional=("run",),
    ),
)
