"""Of every text architecture of transformers, each method is right or refuses it: none is wrong.

A tiny model with random weights is built of every causal, masked and encoder type, and of each of
its variants (`tiny_models.py`), and each method is compared with the model itself, on one text and
on three of different lengths, padded:

- shortcut: the states are those of `output_hidden_states`, the last one leads to the model's
  logits, and a fit and its evaluation run;
- early exit: a token that never leaves is that of `generate`; tokens that leave are those that one
  pass over the whole text, through hooks on the model's own layers, gives;
- speculation: the tokens are those of `generate`, fused and through the model's own layers;
- ponder: the last pass over the layers is what the encoder returns, and the classifier runs.

Also run as `python benchmarks/model_support.py`, which writes docs/model-support.md.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.tiny_models import VOCABULARY, NotBuilt, build, model_types, variants_of
from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.hf.adapter import adapt
from deepenough.ponder.halting import FixedExit

QUICK = False
SEEDS = [0]

RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "WRONG", "CRASH"
METHODS = {
    "shortcut": ("causal", "masked", "encoder"),
    "early exit": ("causal",),
    "speculation": ("causal",),
    "ponder": ("encoder",),
}
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


def batches(side: str, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield one text, then three padded ones."""
    ids = random_ids(1, length)
    yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ids, mask = random_ids(3, length, seed=1), torch.ones(3, length, dtype=torch.long)
    for row, missing in enumerate((length // 2, 0, 2)):
        if missing:
            mask[row, slice(0, missing) if side == "left" else slice(-missing, None)] = 0
    yield {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def same(found: Tensor, expected: Tensor, mask: Tensor, what: str) -> None:
    """Raise `Different` if two tensors `[B, T, ...]` differ where the mask is 1."""
    if found.shape != expected.shape:
        raise Different(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    seen = mask.bool()
    error = float((found - expected)[seen].abs().max())
    if not error <= 1e-3 * max(1.0, float(expected[seen].abs().max())):
        raise Different(f"{what}: off by {error:.2g}")


def same_states(
    states: Sequence[Tensor], theirs: Sequence[Tensor], mask: Tensor, rows: str
) -> None:
    """Compare states with those of transformers, but for the last, which may be behind a norm.

    Some models leave out the embeddings and begin with the output of the first layer.
    """
    if states[1].shape == theirs[0].shape and torch.allclose(states[1], theirs[0], atol=1e-3):
        states = states[1:]
    for layer, (own, other) in enumerate(zip(states[:-1], theirs, strict=False)):
        if own.shape == other.shape:  # a model may keep several streams, and return one
            same(own, other, mask, f"{rows}, h_{layer}")


# -- methods ---------------------------------------------------------------------------------------


@torch.no_grad()
def check_shortcut(model: PreTrainedModel, made: dict[str, Any]) -> None:
    """Compare states and head with the model; fit and evaluate shortcuts."""
    adapter = adapt(model)
    for given in batches("right", 20):
        rows = f"batch {len(given['input_ids'])}"
        mask = given["attention_mask"]
        states = adapter.states(**given)
        whole = model(**given, output_hidden_states=True)
        theirs = getattr(whole, "hidden_states", None) or ()
        if len(theirs) == len(states):
            same_states(states, theirs, mask, rows)
        if adapter.kind == "encoder":
            same(adapter.final_norm(states[-1]), whole[0], mask, f"{rows}, the last state")
        else:
            same(adapter.logits(states[-1]), whole.logits, mask, f"{rows}, logits")
    lines = random_ids(40, 10, seed=3).tolist()
    texts = [" ".join(f"w{token}" for token in line[: 4 + n % 7]) for n, line in enumerate(lines)]
    made["shortcuts"] = de.Shortcuts.fit(adapter, tokenizer(), texts, ridge=1e-3)
    from deepenough.shortcut.evaluation import evaluate

    evaluate(adapter, tokenizer(), made["shortcuts"], texts[:8])


def generated(model: Any, given: dict[str, Tensor], tokens: int = NEW_TOKENS) -> Tensor:
    """Return the new tokens that a model generates greedily, none of which ends a row."""
    sequences: Tensor = model.generate(
        **given, do_sample=False, min_new_tokens=None, max_new_tokens=tokens, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return sequences[:, given["input_ids"].shape[1] :]


class KnownDrafter(Drafter):
    """Drafts what the model will say, but for a wrong token here and there, other in each row."""

    expected: Tensor

    def propose(self, rows: list[Any], state_BD: Tensor, engine: Any) -> Proposal:
        """Return three tokens of each row."""
        drafts: list[list[int]] = []
        for row in rows:
            start = len(row.tokens)
            line = self.expected[row.index, start : start + self.num_draft_tokens].tolist()
            wrong = (row.index + start) % 4
            drafts.append([token ^ (place == wrong) for place, token in enumerate(line)])
        return Proposal(drafts)


def same_tokens(
    model: Any, fast: Any, given: dict[str, Tensor], what: str, known: KnownDrafter | None = None
) -> None:
    """Raise `Different` if two models generate different tokens where no tie explains it."""
    what = f"{what}, batch {len(given['input_ids'])}"
    expected = generated(model, given)
    if known is not None:
        known.expected = expected
    found = generated(fast, given)
    if expected.shape != found.shape:
        raise Different(f"{what}: {found.shape[1]} tokens, not {expected.shape[1]}")
    for row in range(len(expected)):
        differ = (expected[row] != found[row]).nonzero()
        if not len(differ):
            continue
        at = int(differ[0])
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


def check_speculation(model: PreTrainedModel, made: dict[str, Any]) -> None:
    """Compare the tokens of a speculating model with those of `generate`."""
    drafter = KnownDrafter(3)
    for fused in (True, False):
        fast = de.speculate(model, drafter, fused=fused)
        for given in batches("left", 7):
            same_tokens(model, fast, given, "fused" if fused else "unfused", drafter)
        if not fast.decoding_engine.takes_groups:
            break


def check_early_exit(model: PreTrainedModel, made: dict[str, Any]) -> None:
    """Compare tokens that never leave with `generate`, and those that leave with one pass."""
    shortcuts = made.get("shortcuts")
    if shortcuts is None:
        adapter = adapt(model)
        states = [torch.randn(200, adapter.width) for _ in range(adapter.num_layers + 1)]
        shortcuts = de.Shortcuts.fit_states(states)
    last = shortcuts.num_layers
    full = de.early_exit(model, shortcuts, policy="top", threshold=1.0, exit_layers=[1, last - 1])
    for given in batches("left", 7):
        same_tokens(model, full, given, "no exit")
    deferred = ("deferred",) if full.decoding_engine.takes_groups else ()
    for propagation in ("shortcut", "copy", *deferred):
        early = de.early_exit(
            model, shortcuts, policy="top", threshold=0.3, exit_layers=[1, last - 1],
            kv_propagation=propagation,
        )  # fmt: skip
        for given in batches("left", 7):
            generated(early, given)
        if changes_with_length(model):
            continue  # one pass over the whole text rotates its first tokens otherwise
        start = random_ids(1, 1)
        given = {"input_ids": start, "attention_mask": torch.ones_like(start)}
        found = generated(early, given)
        whole = torch.cat([start, found], 1)
        logits = early(input_ids=whole, attention_mask=torch.ones_like(whole)).logits[0, :-1]
        best = logits.max(-1).values - logits.gather(-1, found.T)[:, 0]
        if float(best.max()) > TIE * max(1.0, float(logits.abs().max())):
            raise Different(f"exits ({propagation}): tokens differ from those of one pass")


def changes_with_length(model: Any) -> bool:
    """Return whether how a token is rotated depends on how long the text is by now."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    return any(name in str(rope) for name in ("longrope", "dynamic"))


@torch.no_grad()
def check_ponder(model: PreTrainedModel, made: dict[str, Any]) -> None:
    """Compare the last pass of a pondering classifier with the encoder, and run it."""
    ponder = de.PonderEncoderForSequenceClassification.from_encoder(model, num_labels=3).eval()
    for given in batches("right", 12):
        whole = model(**given)[0]
        inputs = ponder.prepare(**given)
        calls = ponder.stack.begin(**inputs)
        hidden = calls[0].hidden
        for index in range(ponder.num_passes):
            hidden = ponder.stack.run(index, hidden, calls)
        rows = f"batch {len(whole)}"
        normed = ponder.adapter.final_norm(hidden)
        same(normed, whole, given["attention_mask"], f"{rows}, the last pass")
        answers = ponder(**given, all_passes=True).step_logits
        one = ponder(**given, policy=FixedExit(ponder.num_passes))
        same(one.logits, answers[-1], torch.ones(len(whole)), f"{rows}, answers")


CHECKS: dict[str, Callable[[PreTrainedModel, dict[str, Any]], None]] = {
    "shortcut": check_shortcut,
    "early exit": check_early_exit,
    "speculation": check_speculation,
    "ponder": check_ponder,
}


# -- one type --------------------------------------------------------------------------------------


def judge(check: Callable[..., None], model: PreTrainedModel, made: dict[str, Any]) -> Verdict:
    """Return what comes of a check: a verdict, and why."""
    try:
        check(model, made)
    except de.UserError as refusal:
        return REFUSED, str(refusal)
    except Different as error:
        return WRONG, str(error)
    except Exception as error:
        return CRASH, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return RIGHT, ""


def measure_type(model_type: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind, variant and method of one type."""
    for kind in kinds:
        for variant, changes in variants_of(model_type, kind).items():
            row = {"type": model_type, "kind": kind, "variant": variant}
            try:
                model = build(model_type, kind, **changes)
            except NotBuilt as reason:
                yield {**row, "method": None, "verdict": "not built", "why": str(reason)}
                continue
            made: dict[str, Any] = {}
            for method, taken in METHODS.items():
                twice = kind == "encoder" and method == "shortcut" and len(kinds) > 1
                if kind not in taken or twice:
                    continue
                start = time.perf_counter()
                verdict, why = judge(CHECKS[method], model, made)
                seconds = round(time.perf_counter() - start, 2)
                yield {**row, "method": method, "verdict": verdict, "why": why, "s": seconds}


def _send(model_type: str, kinds: Sequence[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for row in measure_type(model_type, kinds):
        pipe.send(row)
    pipe.close()


def in_process(model_type: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a type, measured in a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, kinds, writer))
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


def measure_all(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of all types, or of those named."""
    rows: list[dict[str, Any]] = []
    types = {name: kinds for name, kinds in model_types().items() if not names or name in names}
    for number, (name, kinds) in enumerate(types.items(), start=1):
        start = time.monotonic()
        found = in_process(name, kinds)
        rows += found
        counts = Counter(row["verdict"] for row in found)
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        seconds = time.monotonic() - start
        print(f"{number}/{len(types)} {name}: {shown} ({seconds:.1f} s)", flush=True)
    return rows


def main(names: Sequence[str]) -> int:
    """Measure, write the page, and return 1 if anything is wrong."""
    rows = measure_all(names)
    for row in rows:
        if row["verdict"] in (WRONG, CRASH):
            print(*(row[key] for key in ("verdict", "type", "kind", "variant", "method", "why")))
    print(Counter((row["method"], row["verdict"]) for row in rows))
    import json

    Path("/tmp/adapters/rows.json").write_text(json.dumps(rows, indent=0))
    return int(any(row["verdict"] in (WRONG, CRASH) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
