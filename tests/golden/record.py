"""Golden figures: what this code computes, kept so that a change which moves one is noticed.

    python tests/golden/record.py [NAME ...]

writes `tests/golden/NAME.json` for the cases named, or for all. `test_golden.py` computes them
again and compares. The files say what the code did before it was restructured: where names or flags
change, edit this module; a file is recorded anew only where another figure is meant, and the commit
that does so says why.

All text is drawn here, from seeds, and all models are tiny and made from a config, so that nothing
depends on the machine but its arithmetic. Costs are counted, never timed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

# Read by libraries when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deepenough import (
    DraftModel,
    LazyTransformerConfig,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
    ParConfig,
    ParForCausalLM,
    PonderAlbertConfig,
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
    Record,
    RunFolder,
    Shortcuts,
    early_exit,
    speculate,
)
from deepenough import compare as compare_runs
from deepenough.__main__ import main
from deepenough.runs import append_record, read_records

Case = Callable[[], Any]

HERE = Path(__file__).parent
DIGITS = 9
STEPS = 40
#: What a clock or a path decides, and how certain a figure is.
UNSTABLE = (
    "interval",
    "second",
    "time",
    "folder",
    "path",
    "provenance",
    "command",
    "machine",
    "signature",
)

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Return the function, which is now a case under its own name."""
    CASES[function.__name__] = function
    return function


# -- commands, runs and texts ---------------------------------------------------------------------


@functools.cache
def workshop() -> Path:
    """Return a folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def new_folder(name: str) -> Path:
    """Return a folder of the workshop that does not exist, so that a case may be computed again."""
    folder = workshop() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def command(*words: str, **settings: Any) -> str:
    """Return what a command prints; settings are flags, with `__` for the dot of their names."""
    flags = [f"--{name.replace('__', '.')}={value}" for name, value in settings.items()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([*words, *flags])
    if code != 0:
        raise RuntimeError(f"{' '.join([*words, *flags])}: {errors.getvalue()}")
    return printed.getvalue()


def training(**changes: Any) -> dict[str, Any]:
    """Return the flags of a training of 40 steps that records every loss."""
    values = {"steps": STEPS, "warmup": 5, "lr": 0.01, "log_every": 1}
    values |= {"valid_every": STEPS, "save_every": STEPS, "keep": 1, "threads": 1}
    return {f"train__{name}": value for name, value in (values | changes).items()}


def values_of(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the stable values of a run's records of these kinds, in order."""
    records, corrupted = read_records(folder / "metrics.jsonl")
    assert corrupted == 0
    return [stable(record.values) for record in records if record.kind in kinds]


def measured_by(
    folder: Path, kinds: tuple[str, ...], commands: list[Callable[[], Any]]
) -> list[Any]:
    """Return the records of these kinds that commands add to a run."""
    before = len(values_of(folder, *kinds))
    for each in commands:
        each()
    found = values_of(folder, *kinds)[before:]
    later = {"chrf", "bleu_by_length", "halt_on", "length_penalty", "length_formula"}
    apart = {"evaluation"} | later  # told only since these were recorded, and tested elsewhere
    return [{k: v for k, v in values.items() if k not in apart} for values in found]


def stable(values: Any) -> Any:
    """Return values without those that a clock, a path or the last digit of a weight decides."""
    if isinstance(values, dict):
        kept = {k: v for k, v in values.items() if not any(word in k for word in UNSTABLE)}
        kept = {k: v for k, v in kept.items() if not _is_path_or_hash(v)}
        return {name: stable(value) for name, value in kept.items()}
    return [stable(value) for value in values] if isinstance(values, list) else values


def _is_path_or_hash(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return str(workshop()) in value or re.fullmatch("[0-9a-f]{12,}", value) is not None


def losses(folder: Path) -> list[float]:
    """Return the loss of every one of the 40 steps of a run."""
    found = [values["loss"] for values in values_of(folder, "train")]
    assert len(found) == STEPS, f"{folder} has {len(found)} losses"
    return found


class Draw:
    """Numbers from a seed, the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def one_of(self, items: Any) -> Any:
        return items[self.below(len(items))]


SUBJECTS = ("the small dog", "a grey cat", "an old man", "the tall woman", "my friend", "nobody")
VERBS = ("sees", "finds", "wants", "carries", "paints", "forgets")
OBJECTS = ("the red ball", "a long letter", "two green apples", "the river", "an empty box")
ENDINGS = ("in the garden", "at night", "again", "before it rains", "with care")


@functools.cache
def prose() -> Path:
    """Return a file of 500 sentences of a small grammar."""
    draw, lines = Draw(0), []
    for _ in range(500):
        parts = [draw.one_of(SUBJECTS), draw.one_of(VERBS), draw.one_of(OBJECTS)]
        lines.append(" ".join([*parts, draw.one_of(ENDINGS)]) + " .")
    return _write("prose.txt", lines)


@functools.cache
def word_lines() -> Path:
    """Return a file of 300 lines of 14 words of the tiny decoders' vocabulary."""
    draw = Draw(1)
    rows = [[3 + draw.below(WORDS - 3) for _ in range(14)] for _ in range(300)]
    return _write("words.txt", [" ".join(f"w{number}" for number in row) for row in rows])


def _write(name: str, lines: Iterable[str]) -> Path:
    path = workshop() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# -- PAR ------------------------------------------------------------------------------------------

PAR = {
    "dataset__vocab_size": 300,
    "dataset__batch_size": 4,
    "dataset__length": 8,
    "model__d_model": 16,
    "model__num_heads": 2,
    "model__d_ff": 32,
    "model__mem_len": 8,
}


def language_data() -> dict[str, Any]:
    """Return the flags of the text that language models are trained on."""
    return {"data": prose(), "dataset__cache": workshop() / "cache"}


def par_run(name: str, what: str, **changes: Any) -> Path:
    """Return the folder of a search or a training of PAR."""
    folder = new_folder(name)
    command("par", what, out=folder, **PAR, **language_data(), **training(), **changes)
    return folder


def searched(folder: Path) -> dict[str, Any]:
    """Return what a search leaves."""
    train = values_of(folder, "train")
    return {
        "losses": losses(folder),
        "entropy": [values["entropy"] for values in train[:: STEPS // 4]],
        "tau": [values["tau"] for values in train[:: STEPS // 4]],
        "cost": values_of(folder, "cost"),
        "derive": [without_doubt(values) for values in values_of(folder, "derive")],
        "valid": values_of(folder, "valid"),
    }


def without_doubt(derived: dict[str, Any]) -> dict[str, Any]:
    """Return what was derived, without how sure the search is."""
    doubt = ("entropy", "undecided_blocks", "choice_steps")
    return {name: value for name, value in derived.items() if name not in doubt}


@case
def par_search() -> Any:
    """Return a simultaneous search under a budget of FLOPs, and the retraining of its pattern."""
    own = {"search__cost": "flops", "search__cost_weight": 0.1, "search__budget": 0.65}
    own |= {"search__retrain": "supernet", "search__budget_weight": 1.0}
    folder = par_run("search", "search", model__num_blocks=4, **own)
    derived = folder / "derived"
    return searched(folder) | {
        "retrained_losses": losses(derived),
        "retrained": values_of(derived, "valid", "test"),
    }


@case
def par_search_alternating() -> Any:
    """Return an alternating search, straight through, whose temperature falls linearly."""
    own = {"search__optimise": "alternating", "search__cost": "flops", "search__alpha_lr": 3}
    own |= {"search__straight_through": "true", "search__tau": "linear"}
    return searched(par_run("alternating", "search", model__num_blocks=4, **own))


@functools.cache
def par_trained() -> Path:
    """Return the run of the pattern `adad`."""
    return par_run("par", "train", model__pattern="adad")


@case
def par_train() -> Any:
    """Return losses and perplexities of a training of the pattern `adad`."""
    folder = par_trained()
    return {"losses": losses(folder), "measured": values_of(folder, "valid", "test")}


@case
def par_train_adaptive() -> Any:
    """Return the same of a pattern with an identity and an adaptive softmax."""
    own = {"model__cutoffs": "[40,120]"}
    folder = par_run("adaptive", "train", model__pattern="ad-d", train__accumulate=2, **own)
    return {"losses": losses(folder), "measured": values_of(folder, "valid", "test")}


@case
def par_generate() -> Any:
    """Return texts of the trained model, greedy and sampled, and tokens of a batch of a new one."""
    run = par_trained()
    texts = {
        "greedy": command(
            "par", "generate", run=run, prompt="the small dog", tokens=24, temperature=0
        ),
        "sampled": command(
            "par", "generate", run=run, prompt="a grey cat", tokens=24, top_k=20, seed=3
        ),
    }
    model = new_par()
    ids = torch.arange(3, 15).view(2, 6)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    greedy = model.generate(ids, do_sample=False, **options)
    torch.manual_seed(5)
    sampled = model.generate(ids, do_sample=True, top_k=10, **options)
    return texts | {"tokens": greedy.tolist(), "sampled_tokens": sampled.tolist()}


@case
def par_evaluate() -> Any:
    """Return perplexities of the trained model, with its own memory and a longer one."""
    given = {"run": par_trained(), "json": "true", "dataset__batch_size": 4} | language_data()
    return {
        f"{split}_{mem_len}": stable(
            json.loads(command("par", "eval", split=split, mem_len=mem_len, **given))
        )
        for split, mem_len in (("test", 8), ("valid", 8), ("test", 24))
    }


@case
def par_derive() -> Any:
    """Return the patterns of one search within budgets, by a table of costs that is given."""
    run = RunFolder.create(new_folder("frozen"))
    costs = {"attention": 4.0, "dense": 2.0, "identity": 0.0, "rest": 1.0, "unit": "flops"}
    append_record(run.metrics, Record(0, "cost", costs))
    rows = [[0.9, 0.06, 0.04], [0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.3, 0.2, 0.5], [0.6, 0.3, 0.1]]
    append_record(run.metrics, Record(9, "train", {"pi": rows}))
    found = {"free": without_doubt(json.loads(command("par", "derive", run=run.path, json="true")))}
    for budget in (0.25, 0.4, 0.65, 0.8, 1.0):
        given = {"run": run.path, "budget": budget, "json": "true"}
        found[f"{budget}"] = without_doubt(json.loads(command("par", "derive", **given)))
    return found


@case
def cutoffs() -> Any:
    """Return the best cutoffs of an adaptive softmax for counts that are given."""
    counts = _write("counts.txt", [str(20_000 // (rank + 3)) for rank in range(400)])
    shuffled = _write("shuffled.txt", [str(1 + (37 * rank) % 101) for rank in range(101)])
    found: dict[str, Any] = {}
    for clusters in (1, 2, 3, 4, 5):
        given = {"counts": counts, "clusters": clusters, "json": "true"}
        found[str(clusters)] = stable(json.loads(command("cutoffs", **given)))
    given = {"counts": shuffled, "clusters": 3, "json": "true"}
    found["sorted"] = stable(json.loads(command("cutoffs", **given)))
    found["as given"] = stable(json.loads(command("cutoffs", keep_order="true", **given)))
    return found


# -- Ponder ---------------------------------------------------------------------------------------

TELLING = ("awful", "bad", "good", "fine")
OTHER_WORDS = ("film", "plot", "the", "a", "so", "very")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENCODER: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(TELLING) + len(OTHER_WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}


@functools.cache
def reviews() -> Path:
    """Return a folder of labelled texts in which one word tells the label."""
    draw = Draw(2)
    for split, number in (("train", 160), ("dev", 40)):
        lines = ["sentence\tlabel"]
        for _ in range(number):
            label = draw.below(2)
            words = [draw.one_of(OTHER_WORDS) for _ in range(1 + draw.below(6))]
            words.insert(draw.below(len(words) + 1), TELLING[2 * label + draw.below(2)])
            lines.append(f"{' '.join(words)}\t{label}")
        _write(f"reviews/{split}.tsv", lines)
    return workshop() / "reviews"


@functools.cache
def encoder(kind: str) -> Path:
    """Return the folder of a tiny ALBERT or BERT with its tokenizer."""
    folder = workshop() / kind
    vocabulary = _write(f"{kind}/vocab.txt", [*SPECIAL, *TELLING, *OTHER_WORDS])
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "albert":
        model = AlbertModel(AlbertConfig(**ENCODER, embedding_size=8))
    else:
        model = BertModel(BertConfig(**ENCODER))
    model.save_pretrained(folder)
    BertTokenizer.from_pretrained(vocabulary.parent).save_pretrained(folder)
    return folder


@functools.cache
def ponder_trained(kind: str, objective: str = "ponder") -> Path:
    """Return the run of a classifier of the reviews."""
    folder = new_folder(f"ponder-{kind}-{objective}")
    own = {"data": reviews(), "dataset__batch_size": 8, "model__encoder": encoder(kind)}
    own |= {"ponder__halting_target": 0.4, "ponder__objective": objective}
    own |= {"ponder__pooling": "mean" if kind == "bert" else "cls", "head_lr": 1.0}
    own |= {"ponder__halting_head": "previous", "ponder__distill": 0.0}
    own |= {"ponder__exit": "patience" if objective == "weighted" else "quantile"}
    schedule = training() | {"epochs": 2.0}
    del schedule["train__steps"]
    command("ponder", "train", out=folder, **own, **schedule)
    return folder


def pondered(folder: Path) -> dict[str, Any]:
    """Return losses with their terms, and the last validation."""
    terms = [
        {name: values[name] for name in ("task", "kl") if name in values}
        for values in values_of(folder, "train")[:: STEPS // 4]
    ]
    return {"losses": losses(folder), "terms": terms, "valid": values_of(folder, "valid")}


@case
def ponder_train_albert() -> Any:
    """Return the training of an ALBERT that ponders."""
    return pondered(ponder_trained("albert"))


@case
def ponder_train_encoder() -> Any:
    """Return the training of a BERT that ponders."""
    return pondered(ponder_trained("bert"))


@case
def ponder_train_weighted() -> Any:
    """Return the training of a BERT with an answer at every pass (PABEE)."""
    return pondered(ponder_trained("bert", "weighted"))


EXITS: dict[str, dict[str, Any]] = {
    "quantile": {"exit__threshold": 0.6},
    "sampled": {"exit__seed": 4},
    "confidence": {"exit__threshold": 0.8},
    "patience": {"exit__patience": 1},
    "fixed": {"exit__passes": 2},
}


@case
def ponder_predict() -> Any:
    """Return label, probability and passes of twelve lines, for every model and way to stop."""
    lines = [line.split("\t")[0] for line in (reviews() / "dev.tsv").read_text().splitlines()[1:13]]
    file = _write("lines.txt", [*lines[:6], "", *lines[6:]])
    found: dict[str, Any] = {}
    for kind in ("albert", "bert"):
        for name, own in EXITS.items():
            given = {"exit__exit": name, "batch_size": 5, **own}
            printed = command("ponder", "predict", str(ponder_trained(kind)), str(file), **given)
            found[f"{kind} {name}"] = [json.loads(line) for line in printed.splitlines()]
    return found


@case
def ponder_eval() -> Any:
    """Return accuracy against passes of both models, for every way to stop."""
    found: dict[str, Any] = {}
    for kind in ("albert", "bert"):
        folder = ponder_trained(kind)
        measure = functools.partial(command, "ponder", "eval", str(folder))
        found[kind] = measured_by(folder, ("ponder_exit", "ponder_passes"), [measure])
    return found


@case
def ponder_parity() -> Any:
    """Return losses and accuracies by difficulty of every mechanism."""
    own = {"dataset__size": 6, "dataset__train_nonzero": 3, "dataset__bands": 2}
    own |= {"dataset__batch_size": 64, "dataset__eval_size": 100}
    own |= {"model__width": 16, "model__max_passes": 5}
    found: dict[str, Any] = {}
    for mechanism in ("ponder", "act", "fixed"):
        folder = new_folder(f"parity-{mechanism}")
        given = {"out": folder, "model__mechanism": mechanism, **own}
        command("ponder", "parity", **given, **training())
        measured = values_of(folder, "valid", "parity")
        found[mechanism] = {"losses": losses(folder), "measured": measured}
    return found


# -- Lazy -----------------------------------------------------------------------------------------

LAZY = {
    "model__d_model": 16,
    "model__num_heads": 2,
    "model__d_ff": 32,
    "model__encoder_steps": 3,
    "model__decoder_steps": 2,
}
DICTIONARY = {"red": "rot", "dog": "hund", "man": "mann", "big": "gross", "runs": "rennt"}


@functools.cache
def parallel() -> Path:
    """Return a folder of sentences with their translations, word for word and backwards."""
    sentences = [*permutations(DICTIONARY, 4), *permutations(DICTIONARY, 3)]
    parts = {"train": sentences[::2], "val": sentences[1::12], "test": sentences[3::12]}
    for split, part in parts.items():
        _write(f"parallel/{split}.en", [" ".join(words) for words in part])
        backwards = [" ".join(DICTIONARY[word] for word in reversed(words)) for words in part]
        _write(f"parallel/{split}.de", backwards)
    return workshop() / "parallel"


@functools.cache
def translator(mechanism: str) -> Path:
    """Return the run of a translator."""
    folder = new_folder(f"translation-{mechanism}")
    own = {"data": parallel(), "dataset__cache": workshop() / "cache", "epochs": "null"}
    own |= {"dataset__vocab_size": 290, "dataset__max_length": 32, "dataset__batch_tokens": 160}
    own |= {"search__beams": 2, "model__mechanism": mechanism, "model__dropout": 0.1}
    if mechanism == "universal":
        own |= {
            "fewest_encoder_steps": 1,
            "model__step_encoding": "sinusoid",
            "model__norm": "every",
        }
    command("lazy", "train", out=folder, **own, **LAZY, **training(lr=0.02))
    return folder


def lazy_measured(folder: Path) -> dict[str, Any]:
    """Return losses, and what was measured at the end."""
    return {"losses": losses(folder), "measured": values_of(folder, "valid", "test")}


@case
def lazy_train_translation() -> Any:
    """Return the training of a translator that updates only what changes."""
    return lazy_measured(translator("lazy"))


@case
def lazy_train_baselines() -> Any:
    """Return the training of the other translators."""
    return {name: lazy_measured(translator(name)) for name in ("universal", "act", "transformer")}


@case
def lazy_train_programs() -> Any:
    """Return the training of an executor of programs."""
    folder = new_folder("programs")
    own = {"task": "programs", "dataset__kinds": "[addition,copy,program]"}
    own |= {"dataset__batch_size": 8, "dataset__eval_size": 30, "dataset__nesting": 1}
    command("lazy", "train", out=folder, **own, **LAZY, **training())
    return lazy_measured(folder)


@functools.cache
def lazy_language() -> Path:
    """Return the run of a lazy language model."""
    folder = new_folder("language")
    own = {name: PAR[name] for name in PAR if name.startswith("dataset__")}
    own |= {name: value for name, value in LAZY.items() if name != "model__encoder_steps"}
    own |= language_data() | {"task": "language", "model__label_smoothing": 0.1}
    command("lazy", "train", out=folder, **own, **training())
    return folder


@case
def lazy_train_language() -> Any:
    """Return the training of a lazy language model, and its measures with other steps."""
    folder = lazy_language()
    measure = functools.partial(command, "lazy", "eval", str(folder))
    ways: list[dict[str, Any]] = [{"decoder_steps": 4, "split": "valid"}, {"decoder_epsilon": 0.3}]
    commands = [functools.partial(measure, **own) for own in ways]
    other = measured_by(folder, ("language",), commands)
    return lazy_measured(folder) | {"other_steps": other}


@case
def lazy_translate() -> Any:
    """Return translations by greedy and beam search, and with tokens that rest."""
    lines = (parallel() / "test.en").read_text().splitlines()[:8]
    file = _write("sources.txt", [*lines[:3], "", *lines[3:]])
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"search__beams": 1},
        "beam": {"search__beams": 3, "search__length_penalty": 1.0},
        "resting": {"search__beams": 1, "search__epsilon": 0.2, "search__decoder_epsilon": 0.2},
        "more steps": {"search__beams": 2, "search__encoder_steps": 5},
    }
    return {
        f"{mechanism} {name}": command(
            "lazy", "translate", str(translator(mechanism)), str(file), rows=4, **own
        ).splitlines()
        for mechanism in ("lazy", "act", "transformer")
        for name, own in ways.items()
        if mechanism == "lazy" or name in ("greedy", "beam")
    }


@case
def lazy_eval() -> Any:
    """Return BLEU, steps and FLOPs of the encoder as more of its tokens rest."""
    folder = translator("lazy")
    measure = functools.partial(command, "lazy", "eval", str(folder), search__beams=1)
    commands = [
        functools.partial(measure, search__epsilon=epsilon) for epsilon in (0, 0.05, 0.1, 0.2, 0.5)
    ]
    patient = {"search__epsilon": 0.2, "search__patience": 2, "split": "valid"}
    commands.append(functools.partial(measure, **patient))
    return measured_by(folder, ("translation",), commands)


# -- shortcuts ------------------------------------------------------------------------------------

WORDS = 60


def new_decoder(kind: str) -> PreTrainedModel:
    """Return a decoder with weights so large that no two words are nearly as likely."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model: PreTrainedModel
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
        config = GPT2Config(
            vocab_size=WORDS, **sizes, initializer_range=0.3, **special | {"eos_token_id": None}
        )
        model = GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=48,
                max_position_embeddings=64,
                initializer_range=0.3,
                **special,
            )
        )
    return model.eval().requires_grad_(False)


@functools.cache
def decoder(kind: str) -> Path:
    """Return the folder of a decoder with a tokenizer of whole words."""
    folder = workshop() / f"decoder-{kind}"
    new_decoder(kind).save_pretrained(folder)
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{n}": n for n in range(3, WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    fast.save_pretrained(folder)
    return folder


@functools.cache
def fitted(kind: str) -> Path:
    """Return the run of a shortcut fit with its tuning."""
    folder = new_folder(f"shortcut-{kind}")
    own = {"data": word_lines(), "dataset__min_chars": 10, "fit__maps": "both"}
    own |= {"fit__ridge": 1e-4, "tuned": "true", "tune__batch": 64, "tune__held_out": 64}
    own |= {"tune__top_tokens": 30, "tune__sampled_tokens": 10} if kind == "gpt2" else {}
    own |= {"out": folder, **training(lr=0.003, clip=0.0)}
    command("shortcut", "fit", str(decoder(kind)), **own)
    return folder


def sketch(matrix: torch.Tensor) -> dict[str, Any]:
    """Return the norm, the trace or sum, and a few entries of a matrix or vector."""
    whole = matrix.double()
    return {
        "shape": list(matrix.shape),
        "norm": float(whole.norm()),
        "sum": float(whole.diagonal().sum() if whole.ndim == 2 else whole.sum()),
        "entries": whole.flatten()[:: max(1, whole.numel() // 5)].tolist(),
    }


@case
def shortcut_fit() -> Any:
    """Return entries and norms of closed-form maps and their r² of two models."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        for name in ("shortcuts", "affine"):
            maps = Shortcuts.from_pretrained(fitted(kind) / name)
            width = 32
            inputs = torch.cat([torch.zeros(1, width), torch.eye(width)])
            found[f"{kind} {name}"] = {
                f"{source} to {target}": sketch(maps.apply(inputs, source, target, mode=maps.mode))
                for source, target in maps.pairs
            } | {"pairs": [list(pair) for pair in maps.pairs]}
        found[f"{kind} record"] = values_of(fitted(kind), "fit")
    return found


@case
def shortcut_tune() -> Any:
    """Return losses of tuning by KL, and what the tuned maps are."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        tuning = fitted(kind) / "tuning"
        maps = Shortcuts.from_pretrained(fitted(kind) / "shortcuts")
        found[kind] = {
            "losses": losses(tuning),
            "valid": values_of(tuning, "valid"),
            "maps": {
                str(layer): sketch(maps.apply(torch.eye(32), layer, 4, mode="tuned"))
                for layer in sorted(maps.tuned)
            },
        }
    return found


@case
def shortcut_eval() -> Any:
    """Return what each layer already knows: agreement, surprisal, r² and exits."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        folder = fitted(kind)
        given = {"data": word_lines(), "dataset__lines": 12, "dataset__min_chars": 10}
        given |= {"exit__min_layer": 0, "exit__length": "text"}
        command("shortcut", "eval", str(folder), submodules="true", positions="all", **given)
        for name in ("layer", "r2", "cka", "exit", "saved"):
            kept = KEPT_FIGURES.get(name)
            found[f"{kind} {name}"] = [
                {key: value for key, value in values.items() if kept is None or key in kept}
                for values in values_of(folder, name)
            ]
    return found


KEPT_FIGURES = {
    "layer": {"mode", "layer", "surprisal", "kl", "positions"}
    | {f"precision_{k}" for k in (1, 5, 10)},
    "exit": {"mode", "lambda", "layers_mean", "saved", "agreement"},
    "saved": {"mode", "lambda", "fixed_layer_saved", "saved", "agreement"},
}


# -- drafts and exits -----------------------------------------------------------------------------


@functools.cache
def tuned(kind: str) -> Path:
    """Return the run of a draft head."""
    folder = new_folder(f"tuned-{kind}")
    own = {"data": word_lines(), "text__min_chars": 10}
    own |= {"text__tokens": 2000, "text__prompt_tokens": 6, "text__new_tokens": 20}
    own |= {"text__batch": 16, "text__sample_every": 2, "head__held_out": 8}
    # As many texts as make 40 steps in the epochs.
    own |= {"head__texts": 8, "head__epochs": 4.0, "head__draft_vocab": 40}
    command("decode", "tune", str(decoder(kind)), out=folder, **own, **training(lr=0.003))
    return folder


@case
def decode_tune() -> Any:
    """Return losses of a draft head, and the linear maps it starts from."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        folder = tuned(kind)
        own = DraftModel.from_pretrained(folder)
        runs = sorted(path.parent for path in folder.rglob("metrics.jsonl"))
        found[kind] = {
            "runs": {
                str(run.relative_to(folder)): {
                    "losses": [values["loss"] for values in values_of(run, "train")][:STEPS],
                    "valid": values_of(run, "valid"),
                }
                for run in runs
            },
            "carry": [[sketch(matrix), sketch(bias)] for matrix, bias in own.linear_drafter.maps],
            "shortlist": own.linear_drafter.draft_vocab.tolist(),
        }
        assert all(len(run["losses"]) == STEPS for run in found[kind]["runs"].values())
    return found


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Return rows of 4, 6, 7, 7 ... tokens, padded on the left."""
    draw = Draw(3)
    ids = torch.tensor([[3 + draw.below(WORDS - 3) for _ in range(7)] for _ in range(rows)])
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :3], mask[1, :1] = 0, 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def decoded(model: Any) -> dict[str, Any]:
    """Return what a model writes: greedily alone and in a batch, and sampled from a seed."""
    found: dict[str, Any] = {}
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {"do_sample": False}),
        "batch": (3, {"do_sample": False}),
        "penalised": (1, {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 8}),
        "sampled": (2, {"do_sample": True, "temperature": 0.7, "top_k": 20}),
    }
    for name, (rows, options) in ways.items():
        torch.manual_seed(7)
        output = model.generate(
            **prompts(rows), max_new_tokens=16, return_dict_in_generate=True, **options
        )
        found[name] = {
            "tokens": output.sequences[:, 7:].tolist(),
            "passes": output.passes,
            "drafted": output.drafted,
            "accepted": output.accepted,
            "depth": output.trace.depth.tolist(),
            "flops": output.trace.total_flops,
        }
    return found


@case
def decode_full() -> Any:
    """Return what two models write without saving anything, on both kinds of layers."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        model = new_decoder(kind)
        own = model.generate(**prompts(3), do_sample=False, max_new_tokens=16)
        found[f"{kind} own"] = own[:, 7:].tolist()
        for fused, backend in ((True, "torch"), (False, "general")):
            found[f"{kind} fused {fused}"] = decoded(speculate(model, "none", backend=backend))
    return found


DRAFTS: dict[str, dict[str, Any]] = {
    "lookup": {"drafter": "lookup", "num_draft_tokens": 3},
    "carry": {"drafter": "linear", "num_draft_tokens": 2},
    "tuned": {"drafter": "draft_model", "num_draft_tokens": 3},
    "shortcut": {"drafter": "shortcut", "draft_layer": 3, "num_draft_tokens": 2},
    "together": {
        "drafter": ["lookup", "linear", "shortcut"],
        "draft_layer": 2,
        "num_draft_tokens": 2,
    },
    # How many are drafted where that is left open depends on the machine.
    "default": {"num_draft_tokens": 2},
}


@case
def decode_speculative() -> Any:
    """Return what two models write with every kind of draft."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        maps = Shortcuts.from_pretrained(fitted(kind) / "shortcuts")
        for name, own in DRAFTS.items():
            model = LlamaForCausalLM if kind == "llama" else GPT2LMHeadModel
            loaded = model.from_pretrained(decoder(kind)).eval()
            given = {"draft_model": str(tuned(kind)), "shortcuts": maps, **own}
            found[f"{kind} {name}"] = decoded(speculate(loaded, **given))
    return found


POLICIES = {"gap": 0.08, "top": 0.22, "entropy": 0.25, "layer": 2}


@case
def decode_exit() -> Any:
    """Return what two models write when tokens leave early, by every policy and fill."""
    found: dict[str, Any] = {}
    for kind in ("llama", "gpt2"):
        maps = Shortcuts.from_pretrained(fitted(kind) / "shortcuts")
        model = LlamaForCausalLM if kind == "llama" else GPT2LMHeadModel
        loaded = model.from_pretrained(decoder(kind)).eval()
        for name, value in POLICIES.items():
            for fill in ("shortcut", "copy", "deferred"):
                given: dict[str, Any] = {"policy": name, "threshold": value}
                given |= {"kv_propagation": fill, "exit_layers": [1, 2, 3]}
                fast = early_exit(loaded, maps, **given)
                found[f"{kind} {name} {fill}"] = decoded(fast)
        few = {"policy": "top", "exit_vocab": torch.arange(30), "exit_layers": [2, 3]}
        fast = early_exit(loaded, maps, 0.3, **few)
        found[f"{kind} shortlist"] = decoded(fast)
        chosen = early_exit(loaded, maps, 0.08)
        found[f"{kind} chosen exits"] = decoded(chosen)
        with torch.no_grad():
            logits = fast(**prompts(3)).logits
        found[f"{kind} scores"] = sketch(logits[:, -1])
    return found


@case
def decode_calibrate() -> Any:
    """Return the threshold whose disagreement is bounded, and what was measured for it."""
    given = {"shortcuts": fitted("llama") / "shortcuts", "data": word_lines(), "json": "true"}
    given |= {"new_tokens": 6, "max_disagreement": 0.3, "confidence": 0.8, "policy": "top"}
    given |= {"exit_layers": "[2,3]", "min_chars": 8, "texts": 60}
    given |= {"out": new_folder("calibrated")}
    found = json.loads(command("decode", "calibrate", str(decoder("llama")), **given))
    untold = ("file", "model", "speedup", "speedup_ends", "turns")  # of this place and machine
    return {name: value for name, value in stable(found).items() if name not in untold}


# -- what a forward costs -------------------------------------------------------------------------


def new_par() -> ParForCausalLM:
    """Return a PAR model of the pattern `ad-a` with new weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "num_heads": 2, "d_ff": 32, "mem_len": 8}
    return ParForCausalLM(ParConfig(pattern="ad-a", initializer_range=0.5, **sizes)).eval()


def traced(trace: Any) -> dict[str, Any]:
    """Return all that a trace counts."""
    return {
        "total": trace.total_flops,
        "flops": trace.flops.double().flatten().tolist(),
        "depth": trace.depth.flatten().tolist(),
        "ran": trace.ran.long().flatten(0, -2).sum(0).tolist(),
    }


@case
@torch.no_grad()
def flops() -> Any:
    """Return what one forward of each model counts, and a sketch of its logits."""
    draw = Draw(5)
    ids = torch.tensor([[5 + draw.below(45) for _ in range(9)] for _ in range(3)])
    mask = torch.ones_like(ids)
    mask[0, 6:], mask[1, 4:] = 0, 0
    found: dict[str, Any] = {}

    def note(name: str, output: Any, *traces: str) -> None:
        each = {trace: traced(getattr(output, trace)) for trace in traces or ("trace",)}
        found[name] = each | {"logits": sketch(output.logits.flatten(0, -2))}

    note("par", new_par()(ids))
    sizes = ENCODER | {"vocab_size": 50, "num_labels": 3}
    torch.manual_seed(0)
    config = PonderAlbertConfig(**sizes, embedding_size=8)
    albert = PonderAlbertForSequenceClassification(config).eval()
    note("ponder albert", albert(input_ids=ids, attention_mask=mask))
    bert = BertModel(BertConfig(**ENCODER | {"vocab_size": 50}))
    own = PonderEncoderForSequenceClassification.from_encoder(bert, num_labels=3).eval()
    note("ponder encoder", own(input_ids=ids, attention_mask=mask))
    lazy = {"d_model": 16, "num_heads": 2, "d_ff": 32, "encoder_steps": 3, "decoder_steps": 2}
    for mechanism in ("lazy", "universal", "act", "transformer"):
        torch.manual_seed(0)
        shape = LazyTransformerConfig(vocab_size=50, mechanism=mechanism, **lazy)
        model = LazyTransformerForConditionalGeneration(shape).eval()
        output = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5])
        note(f"{mechanism} translator", output, "encoder_trace", "trace")
        note(f"{mechanism} language", LazyTransformerForCausalLM(shape).eval()(input_ids=ids))
    return found


# -- runs side by side ----------------------------------------------------------------------------


@case
def compare() -> Any:
    """Return quality, layers and FLOPs of operating points of every kind of run."""
    runs: dict[str, tuple[Path, dict[str, Any]]] = {
        "par": (par_trained(), {"grid.mem_len": [4, 8], "limit": 20}),
        "ponder": (ponder_trained("bert"), {"grid.threshold": [0.3, 0.7], "grid.passes": [2]}),
        "lazy": (translator("lazy"), {"grid.epsilon": [0.1, 0.3], "grid.steps": [2]}),
        "shortcut": (fitted("llama"), {"grid.exit": [0.1, 0.6], "limit": 3}),
    }
    # Counting operator by operator is slow where single tokens are.
    words = {"data": str(word_lines()), "prompt_tokens": 6, "new_tokens": 8}
    runs["shortcut"][1].update(words | {"count_flops": False})
    names = ("mechanism", "name", "settings", "quality", "quality_low", "quality_high", "units")
    names += ("layers", "flops", "flops_counted")
    found: dict[str, Any] = {}
    for name, (run, own) in runs.items():
        given = {"out": str(new_folder(f"compare-{name}")), "rounds": 1}
        content = compare_runs([run], **given, **own)
        found[name] = [{key: point[key] for key in names} for point in content["points"]]
    return found


# -- files ----------------------------------------------------------------------------------------


def rounded(data: Any) -> Any:
    """Return plain data with floats of nine digits, as a file holds them."""
    if isinstance(data, dict):
        return {str(name): rounded(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    if isinstance(data, bool | int | str) or data is None:
        return data
    if isinstance(data, float):
        return float(f"{data:.{DIGITS}g}")
    raise TypeError(f"a case returned {type(data).__name__}, which is no plain data")


def file_of(name: str) -> Path:
    """Return where the figures of a case are kept."""
    return HERE / f"{name}.json"


def compute(name: str) -> Any:
    """Return the figures of a case, as a file holds them, computed by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return rounded(CASES[name]())
    finally:
        torch.set_num_threads(threads)


def record(names: list[str]) -> None:
    """Write the file of each case."""
    for name in names or list(CASES):
        began = time.perf_counter()
        text = json.dumps(compute(name), indent=1, ensure_ascii=False)
        file_of(name).write_text(_on_one_line(text) + "\n", encoding="utf-8")
        print(f"{name:28}{time.perf_counter() - began:6.1f} s  {len(text):8,} bytes", flush=True)


def _on_one_line(text: str) -> str:
    """Return JSON whose lists of numbers stand on one line each."""

    def joined(found: re.Match[str]) -> str:
        return "[" + ", ".join(part.strip() for part in found[1].split(",")) + "]"

    return re.sub(r'\[\n([^\[\]{}"]*)\]', joined, text)


if __name__ == "__main__":
    record(sys.argv[1:])
