"""Of every text architecture of transformers, each method is right or refuses it: none is wrong.

A tiny model with random weights is built of every causal, masked and encoder type, and of each of
its variants (`tiny_models.py`), and each method is compared with the model itself, on one text and
on three of different lengths, padded:

- shortcut: the states are those of `output_hidden_states`, the last one leads to the model's
  logits, and a fit and its evaluation run;
- early exit: a token that never leaves is that of `generate`; tokens that leave are those that one
  pass over the whole text, through hooks on the model's own layers, gives;
- speculation: the tokens are those of `generate`, by the fastest backend and by the general one,
  of encoder-decoders too;
- ponder: the last pass over the layers is what the encoder returns, and the classifier runs.

Writes the tables of docs/model-support.md; `python benchmarks/model_support.py TYPE` tries one.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import deepenough as de
from benchmarks.tiny_models import (
    PAIR,
    SWITCH,
    VOCABULARY,
    NotBuilt,
    build,
    model_types,
    variants_of,
)
from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.hf.adapter import adapt
from deepenough.hf.generation import random_states
from deepenough.ponder.halting import FixedExit
from deepenough.shortcut.evaluation import evaluate

QUICK = False
SEEDS = [0]

RIGHT, IN_PART, REFUSED, WRONG, CRASH = "right", "in part", "refused", "WRONG", "CRASH"
NOT_BUILT = "not built"
PAGE = Path(__file__).parents[1] / "docs" / "model-support.md"
NEW_TOKENS = 14
#: Logits nearer than this are a tie, which rounding decides.
TIE = 1e-4
#: Seconds for all variants of one type.
LIMIT = 240.0

Verdict = tuple[str, str]


class Different(Exception):
    """What a method gives is not what the model gives; says where."""


# -- inputs ----------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w4` to `w63`."""
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[MASK]": 3}
    words |= {f"w{n}": n for n in range(4, VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", bos_token="[BOS]"
    )


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY - 2, (rows, length), generator=generator)


def padded(rows: int, length: int, side: str = "right") -> dict[str, Tensor]:
    """Return one text, or three of which two are shorter than the other, padded on one side."""
    ids, mask = random_ids(rows, length, seed=rows), torch.ones(rows, length, dtype=torch.long)
    for row, missing in enumerate((length // 2, 0, 2) if rows > 1 else ()):
        if missing:
            mask[row, slice(0, missing) if side == "left" else slice(-missing, None)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def same(found: Tensor, expected: Tensor, mask: Tensor, what: str) -> None:
    """Raise `Different` if two tensors `[B, T, ...]` differ where the mask is 1."""
    if found.shape != expected.shape:
        raise Different(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    seen = mask.bool()
    error = float((found - expected)[seen].abs().max())
    if not error <= 1e-3 * max(1.0, float(expected[seen].abs().max())):
        raise Different(f"{what}: off by {error:.2g}")


def same_states(states: Sequence[Tensor], theirs: Sequence[Tensor], mask: Tensor) -> None:
    """Compare states with those of transformers, but for the last, which may be behind a norm.

    Some models leave out the embeddings and begin with the output of the first layer.
    """
    if states[1].shape == theirs[0].shape and torch.allclose(states[1], theirs[0], atol=1e-3):
        states = states[1:]
    for layer, (own, other) in enumerate(zip(states[:-1], theirs, strict=False)):
        if own.shape == other.shape:  # a model may keep several streams, and return one
            same(own, other, mask, f"h_{layer}")


# -- methods ---------------------------------------------------------------------------------------


@torch.no_grad()
def check_shortcut(model: PreTrainedModel, made: dict[str, Any], rows: int) -> None:
    """Compare states and head with the model; fit and evaluate shortcuts."""
    adapter = adapt(model)
    given = padded(rows, 20)
    mask = given["attention_mask"]
    states = adapter.states(**given)
    whole = model(**given, output_hidden_states=True)
    theirs = getattr(whole, "hidden_states", None) or ()
    if len(theirs) == len(states):
        same_states(states, theirs, mask)
    if adapter.kind == "encoder":
        same(adapter.final_norm(states[-1]), whole[0], mask, "the last state")
    else:
        same(adapter.logits(states[-1]), whole.logits, mask, "logits")
    if rows > 1:
        lines = random_ids(40, 10, seed=3).tolist()
        texts = [" ".join(f"w{t}" for t in line[: 4 + n % 7]) for n, line in enumerate(lines)]
        made["shortcuts"] = de.Shortcuts.fit(adapter, tokenizer(), texts, ridge=1e-3)
        evaluate(adapter, tokenizer(), made["shortcuts"], texts[:8])


def prompts(rows: int) -> tuple[dict[str, Tensor], int]:
    """Return prompts, and how many tokens are generated: few behind a short prompt (0 rows)."""
    return (padded(1, 3), SWITCH - 3) if rows == 0 else (padded(rows, 7, "left"), NEW_TOKENS)


def read_by_encoder(model: Any, rows: int) -> dict[str, Any]:
    """Return what an encoder-decoder reads: text, sound for Whisper, or states in place of it."""
    number = max(rows, 1)
    if model.main_input_name == "input_ids":
        return padded(number, 12)
    if model.config.model_type == "whisper":
        torch.manual_seed(rows)
        shape = (number, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape)}
    return {"encoder_outputs": random_states(model, number)}


def generated(model: Any, given: dict[str, Tensor], tokens: int) -> Tensor:
    """Return the new tokens that a model generates greedily."""
    if changes_with_length(model) and not model.config.is_encoder_decoder:
        # The rotary angles of a longer text remain until a short one is read.
        model(input_ids=given["input_ids"][:, -1:])
    sequences: Tensor = model.generate(**given, do_sample=False, max_new_tokens=tokens)
    return sequences[:, 1 if model.config.is_encoder_decoder else given["input_ids"].shape[1] :]


class KnownDrafter(Drafter):
    """Drafts what the model will say, but for a wrong token here and there, other in each row."""

    expected: Tensor
    asked = 0

    def propose(self, rows: list[Any], state_BD: Tensor, engine: Any) -> Proposal:
        """Return three tokens of each row."""
        self.asked += 1
        drafts: list[list[int]] = []
        for row in rows:
            start = len(row.tokens)
            line = self.expected[row.index, start : start + self.num_draft_tokens].tolist()
            wrong = (row.index + start) % 4
            drafts.append([token ^ (place == wrong) for place, token in enumerate(line)])
        return Proposal(drafts)


def expected_key(given: dict[str, Tensor], tokens: int) -> str:
    """Return under what the tokens that a model generates are kept."""
    return f"expected {tokens} {tuple(given['input_ids'].shape) if 'input_ids' in given else ''}"


def same_tokens(
    model: Any,
    fast: Any,
    given: dict[str, Tensor],
    tokens: int,
    what: str,
    made: dict[str, Any],
) -> None:
    """Raise `Different` if two models generate different tokens where no tie explains it.

    What the model itself generates is kept in `made`, by its prompts.
    """
    key = expected_key(given, tokens)
    if model.config.is_encoder_decoder or key not in made:
        made[key] = generated(model, given, tokens)
    expected = made[key]
    if isinstance(fast.drafter, KnownDrafter):
        fast.drafter.expected = expected
    found = generated(fast, given, tokens)
    if expected.shape != found.shape:
        raise Different(f"{what}: {found.shape[1]} tokens, not {expected.shape[1]}")
    for row in range(len(expected)):
        differ = (expected[row] != found[row]).nonzero()
        if not len(differ):
            continue
        at = int(differ[0])
        if model.config.is_encoder_decoder:
            start = torch.ones(len(expected), 1, dtype=torch.long)
            prompt = {**given, "decoder_input_ids": torch.cat([start, expected[:, :at]], 1)}
        else:
            ids = torch.cat([given["input_ids"], expected[:, :at]], 1)
            more = torch.ones(len(ids), at, dtype=torch.long)
            mask = torch.cat([given["attention_mask"], more], 1)
            prompt = {"input_ids": ids, "attention_mask": mask}
        scores = model.generate(
            **prompt, do_sample=False, max_new_tokens=1, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        ).logits[0][row]  # fmt: skip
        gap = float(scores[expected[row, at]] - scores[found[row, at]])
        if abs(gap) > TIE * max(1.0, float(scores.abs().max())):
            raise Different(f"{what}: token {at + 1} of row {row} is another")


def check_speculation(model: PreTrainedModel, made: dict[str, Any], rows: int) -> None:
    """Compare the tokens of a speculating model with those of `generate`."""
    for backend in (None, "general"):
        fast = made.get(f"fast {backend}") or de.speculate(model, KnownDrafter(3), backend=backend)
        made[f"fast {backend}"] = fast
        given, tokens = prompts(rows)
        if model.config.is_encoder_decoder:
            given = read_by_encoder(model, rows)
        same_tokens(model, fast, given, tokens, backend or "fastest", made)
        if rows == 1 and not model.config.is_encoder_decoder:
            # The chat goes on: what both have in common is read once, where that can be done.
            ids = torch.cat([given["input_ids"], made[expected_key(given, tokens)]], 1)
            chat = {"input_ids": torch.cat([ids, random_ids(1, 5, seed=9)], 1)}
            chat["attention_mask"] = torch.ones_like(chat["input_ids"])
            same_tokens(model, fast, chat, tokens, f"{backend or 'fastest'}, next turn", made)
        made["drafts"] = made.get("drafts", False) or fast.drafter.asked > 0
        if not fast.decoding_engine.takes_groups:
            break


def check_early_exit(model: PreTrainedModel, made: dict[str, Any], rows: int) -> None:
    """Compare tokens that never leave with `generate`, and those that leave with one pass."""
    shortcuts = made.get("shortcuts")
    if shortcuts is None:
        adapter = adapt(model)
        states = [torch.randn(200, adapter.width) for _ in range(adapter.num_layers + 1)]
        shortcuts = made["shortcuts"] = de.Shortcuts.fit_states(states)
    layers = [1, shortcuts.num_layers - 1]
    given, tokens = prompts(rows)
    full = made.get("no exit") or de.early_exit(
        model, shortcuts, policy="top", threshold=1.0, exit_layers=layers
    )
    made["no exit"] = full
    same_tokens(model, full, given, tokens, "no exit", made)
    deferred = ("deferred",) if full.decoding_engine.takes_groups else ()
    for way in ("shortcut", "copy", *deferred):
        options = {"threshold": 0.3, "exit_layers": layers, "kv_propagation": way}
        early = made.get(way) or de.early_exit(model, shortcuts, policy="top", **options)
        made[way] = early
        generated(early, given, tokens)
        if changes_with_length(model) or rows != 1:
            continue  # one pass over the whole text rotates its first tokens otherwise
        start = padded(1, 1)
        found = generated(early, start, tokens)
        whole = torch.cat([start["input_ids"], found], 1)
        logits = early(input_ids=whole, attention_mask=torch.ones_like(whole)).logits[0, :-1]
        best = logits.max(-1).values - logits.gather(-1, found.T)[:, 0]
        if float(best.max()) > TIE * max(1.0, float(logits.abs().max())):
            raise Different(f"exits ({way}): tokens differ from those of one pass")


def changes_with_length(model: Any) -> bool:
    """Return whether how a token is rotated depends on how long the text is by now."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    return any(name in str(rope) for name in ("longrope", "dynamic"))


@torch.no_grad()
def check_ponder(model: PreTrainedModel, made: dict[str, Any], rows: int) -> None:
    """Compare the last pass of a pondering classifier with the encoder, and run it."""
    ponder = de.PonderEncoderForSequenceClassification.from_encoder(model, num_labels=3).eval()
    given = padded(rows, 12)
    whole = model(**given)[0]
    calls = ponder.stack.begin(**ponder.prepare(**given))
    hidden = calls[0].hidden
    for index in range(ponder.num_passes):
        hidden = ponder.stack.run(index, hidden, calls)
    same(ponder.adapter.final_norm(hidden), whole, given["attention_mask"], "the last pass")
    answers = ponder(**given, all_passes=True).step_logits
    one = ponder(**given, policy=FixedExit(ponder.num_passes))
    same(one.logits, answers[-1], torch.ones(rows), "answers")


@dataclass(frozen=True)
class Method:
    """How a method is checked."""

    check: Callable[[PreTrainedModel, dict[str, Any], int], None]
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ("one text", "padded batches")


ROWS = {"one short text": 0, "one text": 1, "padded batches": 3}
METHODS = {
    "shortcut": Method(check_shortcut, ("causal", "masked", "encoder")),
    "early exit": Method(check_early_exit, ("causal",), tuple(ROWS)),
    "speculation": Method(check_speculation, ("causal", PAIR), tuple(ROWS)),
    "ponder": Method(check_ponder, ("encoder",)),
}


# -- one type --------------------------------------------------------------------------------------


def judge(method: Method, model: PreTrainedModel, made: dict[str, Any]) -> Verdict:
    """Return what comes of a method: a verdict, and why if it is not right."""
    refused: dict[str, str] = {}
    for part in method.parts:
        try:
            method.check(model, made, ROWS[part])
        except de.UserError as refusal:
            refused[part] = str(refusal)
        except Different as error:
            return WRONG, f"{part}: {error}"
        except Exception as error:  # anything else than a refusal is a defect
            return CRASH, f"{part}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not refused:
        return RIGHT, ""
    verdict = REFUSED if len(refused) == len(method.parts) else IN_PART
    return verdict, next(iter(refused.values()))


def measure_type(
    model_type: str,
    kinds: Sequence[str],
    only: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind, variant and method (all, or those named) of one type."""
    for kind in kinds:
        for variant, changes in variants_of(model_type, kind).items():
            if only and variant not in only:
                continue
            name = f"{kind} {variant}" if kind == PAIR else variant
            row = {"type": model_type, "kind": kind, "variant": name}
            try:
                model = build(model_type, kind, **changes)
            except NotBuilt as reason:
                yield {**row, "method": None, "verdict": NOT_BUILT, "why": str(reason)}
                continue
            made: dict[str, Any] = {}
            for name, method in METHODS.items():
                twice = kind == "encoder" and name == "shortcut" and {"causal", "masked"} & {*kinds}
                if kind in method.kinds and not twice and name in (methods or METHODS):
                    verdict, why = judge(method, model, made)
                    drafts = made.get("drafts") if name == "speculation" else None
                    yield {
                        **row, "method": name, "verdict": verdict, "why": why, "drafts": drafts
                    }  # fmt: skip


def _send(model_type: str, kinds: Sequence[str], methods: Sequence[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for row in measure_type(model_type, kinds, methods=methods):
        pipe.send(row)
    pipe.close()


def in_process(
    model_type: str, kinds: Sequence[str], methods: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a type, measured in a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, kinds, methods, writer))
    process.start()
    writer.close()
    rows: list[dict[str, Any]] = []
    ends, why = time.monotonic() + LIMIT, ""
    try:
        while True:
            if not reader.poll(max(0.0, ends - time.monotonic())):
                why = f"not done after {LIMIT:.0f} s"
                break
            rows.append(reader.recv())
    except EOFError:
        process.join(10)
        why = f"the process ended with code {process.exitcode}" if process.exitcode else ""
    if process.is_alive():
        process.kill()
    if why:
        row = {"type": model_type, "kind": kinds[0], "variant": "?", "method": None}
        rows.append({**row, "verdict": CRASH, "why": why})
    return rows


# -- all of them -----------------------------------------------------------------------------------


def measure_all(
    names: Sequence[str] = (),
    kept: str = "",
    methods: Sequence[str] = (),
    processes: int = 1,
) -> list[dict[str, Any]]:
    """Return the rows of all types and methods, or of those named.

    In the folder `kept`, if there is one, those of a finished type are kept and found again.
    """
    types = {name: kinds for name, kinds in model_types().items() if not names or name in names}
    files = {name: Path(kept or os.devnull, f"{name}.json") for name in types}
    rows = {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.is_file()
    }
    missing = [name for name in types if name not in rows]
    kinds = [types[name] for name in missing]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        measured = pool.map(in_process, missing, kinds, repeat(methods))
        for number, (name, found) in enumerate(zip(missing, measured, strict=True), start=1):
            rows[name] = found
            if kept:
                files[name].parent.mkdir(parents=True, exist_ok=True)
                files[name].write_text(json.dumps(found), encoding="utf-8")
            counts = Counter(row["verdict"] for row in found)
            shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            print(f"{number}/{len(missing)} {name}: {shown}", flush=True)
            for row in found:
                if row["verdict"] in (WRONG, CRASH):
                    print(" ", *(row[k] for k in ("verdict", "kind", "variant", "method", "why")))
    return [row for name in types for row in rows[name]]


#: Methods that share a part of the page.
PARTS = (["speculation"], ["shortcut", "early exit", "ponder"])


def measure(kept: str = "", processes: int = 1) -> dict[str, Any]:
    """Measure all types, write the page's tables, and return how many types are right.

    With `kept=FOLDER` an interrupted measurement goes on behind the last type it has finished.
    """
    rows = measure_all(kept=kept, processes=processes)
    text, counts = PAGE.read_text(encoding="utf-8"), {}
    for methods in PARTS:
        kinds = {kind for method in methods for kind in METHODS[method].kinds}
        own = [r for r in rows if r["kind"] in kinds and r["method"] in (*methods, None)]
        block = re.compile(rf"(<!-- {' '.join(methods)} -->\n).*?(<!-- / -->)", re.DOTALL)
        part = page(own, methods)
        text = block.sub(lambda found, part=part: f"{found[1]}\n{part}\n{found[2]}", text, count=1)
        counts |= counts_by_method(own, methods)
    PAGE.write_text(text, encoding="utf-8")
    table = by_type(rows)
    shown = {name: {m: text for m, (_, text) in cells.items()} for name, cells in table.items()}
    return {
        "types": len(table),
        "models": len({(row["type"], row["kind"], row["variant"]) for row in rows}),
        "one_token_at_a_time": len(without_drafts(rows)),
        **{
            re.sub(r"\W+", "_", name): {word.lower().replace(" ", "_"): c[word] for word in WORDS}
            for name, c in counts.items()
        },
        "settings": {"verdicts": shown},
    }


# -- the page --------------------------------------------------------------------------------------

#: From the best to the worst; a type is what the worst of its variants is, but for mixtures.
WORDS = (RIGHT, IN_PART, REFUSED, WRONG, CRASH)
ABSENT = ""


def by_type(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return, for each type and method, a word and the text of its cell; rows name reasons."""
    table: dict[str, dict[str, tuple[str, str]]] = {}
    for row in rows:
        table.setdefault(row["type"], dict.fromkeys(METHODS, (ABSENT, "")))
    for name, cells in table.items():
        for method in METHODS:
            own = [row for row in rows if row["type"] == name and row["method"] == method]
            # A process that died or hung tells no method.
            own += [
                r for r in rows if (r["type"], r["method"], r["verdict"]) == (name, None, CRASH)
            ]
            if own:
                cells[method] = _cell(own)
    return table


def _cell(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the word for the variants of a type, and which of them are not right."""
    variants = {word: [row["variant"] for row in rows if row["verdict"] == word] for word in WORDS}
    found = [word for word in WORDS if variants[word]]
    if len(found) == 1:
        return found[0], found[0]
    listed = (f"{word}: {', '.join(dict.fromkeys(variants[word]))}" for word in found[1:])
    worst = found[-1] if found[-1] in (WRONG, CRASH) else IN_PART
    return worst, "; ".join([found[0], *listed])


def counts_by_method(
    rows: Sequence[dict[str, Any]], methods: Sequence[str]
) -> dict[str, Counter[str]]:
    """Return how many types there are by verdict, for each method and each kind that speculates."""
    parts = {method: (method, rows) for method in methods}
    for kind in METHODS["speculation"].kinds if "speculation" in methods else ():
        own = [row for row in rows if row["kind"] == kind]
        parts[f"speculation, {kind}"] = "speculation", own
    return {
        name: Counter(cells[method][0] for cells in by_type(own).values())
        for name, (method, own) in parts.items()
    }


def without_drafts(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Return the types that are decoded without being asked for drafts in any variant."""
    own = [r for r in rows if r["method"] == "speculation" and r["verdict"] in (RIGHT, IN_PART)]
    return {r["type"] for r in own} - {r["type"] for r in own if r["drafts"]}


def reason(why: str) -> str:
    """Return the part of a refusal that says why, without names, details and remedy."""
    text, before = why, ""
    while text != before:
        text, before = re.sub(r"\([^()]*\)", "", text), text
    text = re.sub(r"\b[A-Z]\w*(For|Model|Decoder|LMHead)\w*\b", "the model", text)
    text = re.sub(r"keeps [\w, ]+ in its cache", "keeps layers of other kinds in its cache", text)
    text = re.sub(r"type '[^']*'", "this type", text)
    text = re.split(r"[;:]", text)[0].replace(" ,", ",")
    return " ".join(text.split()).rstrip(".")


def page(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """Return what docs/model-support.md says of some methods, below their heading."""
    table = by_type(rows)
    shown = {name: [cells[m][1] for m in methods] for name, cells in table.items()}
    missing = {row["type"]: row["why"] for row in rows if row["verdict"] == NOT_BUILT}
    today, version = datetime.date.today().isoformat(), transformers.__version__
    models = len({(row["type"], row["kind"], row["variant"]) for row in rows})
    counts = counts_by_method(rows, methods).items()
    lines = [
        f"Of {len(table)} types and {models} models, with transformers {version}, on {today}:",
        "",
        *_table(
            "method", WORDS, ((name, [found[word] for word in WORDS]) for name, found in counts)
        ),
    ]
    if single := sorted(without_drafts(rows)):
        lines += [
            "",
            f"{len(single)} types gain nothing by drafts: they are right, and take one token at a "
            "time behind the prompt, as `generate()` has them do, since several at once give other "
            f"logits or cannot be taken back ({', '.join(f'`{name}`' for name in single)}).",
        ]
    reasons: dict[str, Counter[str]] = {}
    for row in rows:
        if row["verdict"] in (REFUSED, IN_PART):
            reasons.setdefault(reason(row["why"]), Counter())[row["method"]] += 1
    ordered = sorted(reasons.items(), key=lambda item: -item[1].total())
    refused = ((why, [found[method] for method in methods]) for why, found in ordered)
    cells = (
        (f"`{name}`", [t or "-" for t in texts]) for name, texts in shown.items() if any(texts)
    )
    absent = (
        (f"`{name}`", [missing[name].replace("|", " ")]) for name in missing if not any(shown[name])
    )
    lines += [
        *("", "Why a model is refused; a model is a type, a kind and a variant:", ""),
        *_table("why", methods, refused),
        *("", "Every type:", ""),
        *_table("type", methods, cells),
        *("", "Not measured, because their config alone makes no small model that reads text:", ""),
        *_table("type", ["why"], absent),
    ]
    return "\n".join(lines) + "\n"


def _table(
    first: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[object]]]
) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {first} | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for name, cells in rows:
        yield f"| {name} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    from benchmarks.runner import main

    if sys.argv[1:]:  # some types, to look at
        bad = [row for row in measure_all(sys.argv[1:]) if row["verdict"] in (WRONG, CRASH)]
        sys.exit(1 if bad else 0)
    sys.exit(main(["model_support"]))
