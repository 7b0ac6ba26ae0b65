"""Every long command in small: its words, what it needs, and what its result is.

All paths in the words are relative to a folder of the case's own, but for texts and models that no
command changes: results of two folders then compare as they are.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

VOCAB = 40
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
REVIEW_WORDS = ["good", "fine", "bad", "awful", "film", "plot", "the", "a", "so", "very"]
#: Names of values that a clock or a file system decides.
CLOCK = re.compile(
    "second|time|milli|bookkeeping|optimal|choice|sha256|SHA-256|crc|checksum|mtime|commit"
    "|resume|overwrite|created"
)


@dataclass(frozen=True)
class Case:
    """One command in small."""

    words: str
    """With `{inputs}` for the folder of texts and models."""
    needs: tuple[str, ...] = ()
    """Cases whose results lie in the folder before the command starts."""
    resume: bool = True
    """Whether it has an option `--resume`; else it is simply repeated."""
    timed: tuple[str, ...] = ()
    """Folders whose content a clock decides; only that they hold the same files is compared."""


TRAIN = (
    "--train.steps 10 --train.warmup 3 --train.lr 0.01 --train.log_every 3 --train.valid_every 4 "
    "--train.save_every 4"
)
SMALL = "--model.d_model 16 --model.num_heads 2 --model.d_ff 32 --model.dropout 0.1"
STREAMS = (
    "--data {inputs}/text.txt --dataset.cache cache --dataset.vocab_size 400 "
    "--dataset.batch_size 4 --dataset.length 8"
)
WORDS = "--data {inputs}/words.txt --dataset.min_chars 10"

CASES: dict[str, Case] = {
    "par search": Case(
        f"par search {STREAMS} {SMALL} {TRAIN} --model.mem_len 12 --model.num_blocks 3 "
        "--search.optimise alternating --search.alternate_every 2 --search.cost flops "
        "--train.accumulate 2 --search.retrain scratch --out par-search"
    ),
    "par train": Case(
        f"par train {STREAMS} {SMALL} {TRAIN} --model.mem_len 12 --model.pattern ada --out par"
    ),
    "ponder train": Case(
        f"ponder train --data {{inputs}}/reviews --model.encoder {{inputs}}/bert {TRAIN} "
        "--dataset.batch_size 8 --epochs null --out ponder"
    ),
    "ponder eval": Case("ponder eval ponder", ("ponder train",), resume=False),
    "ponder parity": Case(
        f"ponder parity {TRAIN} --dataset.size 16 --dataset.train_nonzero 3 --dataset.bands 16 "
        "--dataset.batch_size 32 --dataset.eval_size 50 --model.width 16 --model.max_passes 5 "
        "--out parity"
    ),
    "lazy train, translation": Case(
        f"lazy train --data {{inputs}}/pairs {SMALL} {TRAIN} --dataset.cache cache --epochs null "
        "--dataset.vocab_size 265 --dataset.max_length 40 --dataset.batch_tokens 150 "
        "--model.encoder_steps 2 --model.decoder_steps 2 --search.beams 1 --out translation"
    ),
    "lazy train, programs": Case(
        f"lazy train --task programs {SMALL} {TRAIN} --dataset.length 2 --dataset.batch_size 8 "
        "--dataset.eval_size 10 --model.encoder_steps 2 --model.decoder_steps 2 --out programs"
    ),
    "lazy train, language": Case(
        f"lazy train --task language {STREAMS} {SMALL} {TRAIN} --model.decoder_steps 2 "
        "--out language"
    ),
    "lazy sweep": Case(
        "lazy sweep translation --encoder_steps [1,2] --decoder_steps [1,2] --search.beams 1",
        ("lazy train, translation",),
        resume=False,
    ),
    "lazy eval": Case("lazy eval programs", ("lazy train, programs",), resume=False),
    "shortcut fit": Case(
        f"shortcut fit {{inputs}}/llama {WORDS} --fit.maps both --out shortcut",
    ),
    "shortcut fit --tuned": Case(
        f"shortcut fit {{inputs}}/llama {WORDS} {TRAIN} --tuned --tune.batch 64 "
        "--tune.held_out 64 --tune.top_tokens 20 --tune.sampled_tokens 5 --out tuned"
    ),
    "shortcut eval": Case(
        f"shortcut eval tuned {WORDS} --dataset.split train --submodules",
        ("shortcut fit --tuned",),
        resume=False,
    ),
    "decode tune": Case(
        f"decode tune {{inputs}}/llama --data {{inputs}}/words.txt {TRAIN} --text.min_chars 10 "
        "--text.tokens 600 --text.prompt_tokens 6 --text.new_tokens 10 --text.batch 16 "
        "--head.held_out 8 --head.texts 8 --head.epochs 1.5 --head.draft_vocab 30 --out draft"
    ),
    "decode calibrate": Case(
        f"decode calibrate {{inputs}}/llama {WORDS} --dataset.split train "
        "--shortcuts shortcut/shortcuts --texts 64 --prompt_tokens 6 --new_tokens 8 "
        "--kv_propagation copy --max_disagreement 0.9 --out guarantee",
        ("shortcut fit",),
        resume=False,
    ),
    "compare": Case(
        "compare ponder --rounds 3 --limit 24 --out compared",
        ("ponder train",),
        resume=False,
    ),
    "compare, generation": Case(
        "compare shortcut --rounds 2 --limit 2 --new_tokens 4 --prompt_tokens 4 --exit [0.5] "
        "--data {inputs}/words.txt --split train --out generated",
        ("shortcut fit",),
        resume=False,
    ),
    "profile": Case(
        "profile {inputs}/llama --data {inputs}/words.txt --min_chars 10 --prompt 'w4 w5' "
        "--prompts 2 --prompt_tokens 4 --new_tokens 4 --rounds 2 --out profile",
        resume=False,
        timed=("profile/profile.json", "profile/frontier.json"),
    ),
    "report": Case("report parity --out page.html", ("ponder parity",), resume=False),
    "demo": Case(
        "demo --model {inputs}/llama --scale 0.005 --out demo",
        resume=False,
        # The search weighs what blocks take on this machine.
        timed=("demo/par", "demo/language", "demo/profile/profile.json"),
    ),
}


def make_inputs(folder: Path) -> None:
    """Write the texts and models that the commands read."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import (
        BertConfig,
        BertModel,
        BertTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    lines = [line for name in sorted(topics) for line in topics[name].split("\n")]
    (folder / "text.txt").write_text("\n".join(lines[:700]) + "\n", encoding="utf-8")
    draw = random.Random(0)
    (folder / "reviews").mkdir()
    for split, num in (("train", 160), ("dev", 40)):
        rows = ["sentence\tlabel"]
        for _ in range(num):
            label = draw.randrange(2)
            words = draw.choices(REVIEW_WORDS[4:], k=draw.randrange(1, 7))
            rows.append(" ".join([*words, REVIEW_WORDS[2 * (1 - label)]]) + f"\t{label}")
        (folder / "reviews" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "pairs").mkdir()
    for split, num in (("train", 60), ("val", 8), ("test", 8)):
        for language, word in (("en", "la"), ("de", "lo")):
            text = "".join(" ".join([word] * (4 + row % 5)) + "\n" for row in range(num))
            (folder / "pairs" / f"{split}.{language}").write_text(text)
    (folder / "words.txt").write_text(
        "".join(
            " ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(14)) + "\n" for _ in range(160)
        )
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    bert = folder / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(SPECIAL + REVIEW_WORDS))
    tokenizer = BertTokenizer.from_pretrained(bert)
    BertModel(BertConfig(vocab_size=len(tokenizer), hidden_size=16, **sizes)).save_pretrained(bert)
    tokenizer.save_pretrained(bert)
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    known = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{n}": n for n in range(3, VOCAB)}
    words_tokenizer = Tokenizer(WordLevel(known, unk_token="[PAD]"))
    words_tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, pad_token="[PAD]")
    fast.save_pretrained(folder / "llama")


# -- what a command leaves -------------------------------------------------------------------------


def result_of(folder: Path, timed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return everything in a folder that a repeated command must leave alike.

    Not checkpoints, logs and caches; of pictures and pages only that they are there.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_dir() or {"checkpoints", "cache", "events"} & set(place.parts):
            continue
        if path.suffix == ".log" or path.name in (".lock", "checksums.json"):
            continue
        is_timed = str(place).startswith(timed) if timed else False
        found[str(place)] = "there" if is_timed else _content(path)
    return found


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = sorted(load_file(path).items())
        return {
            name: hashlib.sha256(tensor.view(-1).contiguous().numpy().tobytes()).hexdigest()
            for name, tensor in tensors
        }
    if path.suffix == ".jsonl":
        return [_timeless(_parsed(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".json" and not path.name.endswith(".data.json"):  # of a picture
        return _timeless(json.loads(path.read_text()))
    if path.suffix == ".yaml":
        lines = path.read_text().splitlines()
        return [line for line in lines if not CLOCK.search(line)]
    return "there"


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return f"torn: {line}"


def _timeless(value: Any) -> Any:
    """Return a value without what a clock decides, at any depth."""
    if isinstance(value, dict):
        return {key: _timeless(own) for key, own in value.items() if not CLOCK.search(key)}
    return [_timeless(own) for own in value] if isinstance(value, list) else value


def difference(expected: Any, found: Any, place: str = "") -> str | None:
    """Return where two results first differ, or None."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{place}: {sorted(expected.keys() ^ found.keys())} on one side only"
        parts = ((expected[key], found[key], f"{place}/{key}") for key in expected)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{place}: {len(found)} entries where there were {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        parts = ((one, other, f"{place}[{number}]") for number, (one, other) in pairs)
    else:
        same = expected == found or (expected != expected and found != found)
        return None if same else f"{place}: {found!r} where there was {expected!r}"
    return next(filter(None, (difference(*part) for part in parts)), None)
