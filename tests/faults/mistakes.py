"""Wrong command lines: each must be refused in one sentence that says what to do.

    python -m tests.faults mistakes [--only WORDS] [--list FILE]

A mistake is one line of `TABLE`: words of a command in which `{names}` stand for files and folders
of a small workshop. Every one must exit with 2, end with one short sentence on standard error,
print no traceback, and change nothing on the disk. `--list` writes all sentences, to be read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Within which a mistake is refused, on a busy machine.
SECONDS = 30
#: Longest sentence that is still short, paths of the workshop not counted.
LONGEST = 330
#: One of these is in every sentence that says what to do.
REMEDY = re.compile(
    r"\b(give|choose|set|lower|raise|write|use|remove|leave|make|check|move|correct|save|name|"
    r"did you mean|must be|must lie|there (is|are)|start|fit|train|install|load|needs? a|it has|"
    r"must be given|shorten|delete|measure|let|convert|free|need|only one|of more|is either)\b",
    re.IGNORECASE,
)

# One mistake a line; a line that begins with + is put behind the command words of the line before
# that does not.
TABLE = """
# -- words that are no command
pra train
par trian
par --bogus
train
ponder evaluate
lazy run
shortcut fitt
decode speculate
comapre
reprot x
explode
-x
"" ""

# -- explore
explore --host 0.0.0.0
explore --port 0
explore --waiting none

# -- options of par train
par train --data {text} --out {out}
+ --step 10
+ --trian.steps 10
+ --steps
+ --steps ten
+ --steps 0
+ --steps -5
+ --steps 1.5
+ --steps 1e999
+ --lr 0
+ --lr nan
+ --lr inf
+ --lr fast
+ --warmup -1
+ --warmup 2.5
+ --warmup soon
+ --schedule cosinus
+ --betas 0.9
+ --betas [0.9]
+ --betas [0.9,1.5]
+ --betas [a,b]
+ --clip -1
+ --accumulate 0
+ --precision fp8
+ --threads 0
+ --seed one
+ --log_every 0
+ --keep 0
+ --pattern aaxd
+ --pattern ""
+ --pattern "***"
+ --num_blocks 0
+ --num_blocks 2.5
+ --d_model 0
+ --d_model 30 --num_heads 4
+ --num_heads 0
+ --d_ff -1
+ --mem_len -1
+ --dropout 1.5
+ --dropout much
+ --cutoffs [100,50]
+ --cutoffs 100
+ --cutoffs [0]
+ --cutoffs [999999] --vocab_size 300
+ --div_value 0
+ --batch_size 0
+ --batch_size 100000
+ --length 0
+ --vocab_size 0
+ --vocab_size 5
+ --vocab_size big
+ --lowercase perhaps
+ --valid_fraction 1
+ --valid_fraction 0.6 --test_fraction 0.6
+ --tokenizer {missing}
+ --tokenizer {text}
+ --tokenizer {image}
+ --tokenizer {empty_folder}
+ --tokenizer no/such-tokenizer
+ --start {missing}
+ --start {ponder}
+ --start {empty_folder}
+ --resume --overwrite
+ --resume perhaps
+ --config {missing}
+ --config
+ --config {text_folder}
+ --config {image}
+ --config {yaml_broken}
+ --config {yaml_list}
+ --config {yaml_unknown}
+ --config {yaml_types}
+ --config {yaml_section}
+ --config {yaml_other}
+ --batch-sise 4
+ --model 3
+ --train.model.steps 3
+ --budget 0.5
+ stray words
+ --out
+ --cache {text}

# -- texts
par train --out {out} --data {missing}
par train --out {out} --data {empty}
par train --out {out} --data {blank}
par train --out {out} --data {image}
par train --out {out} --data {archive}
par train --out {out} --data {weights}
par train --out {out} --data {latin}
par train --out {out} --data {utf16}
par train --out {out} --data {one_line}
par train --out {out} --data {short}
par train --out {out} --data {empty_folder}
par train --out {out} --data {pictures}
par train --out {out} --data {missing}/*.txt
par train --out {out} --data no/such-corpus
par train --out {out} --data hf:no-such-corpus
par train --out {out} --data pyhton
par train --out {out} --data ""
par train --out {out} --data /proc/self/mem
par train --out {text} --data {text}
par train --out {text}/run --data {text}
par train --out {par} --data {text}
par train --out {own_work} --data {text} --overwrite
par train --out {own_work} --data {text} --resume
par train --out {own_work} --data {text}
par train --out {readonly}/run --data {text}
par train --out "" --data {text}

# -- par: search, derive, eval, generate, plot
par search --data {text} --out {out}
+ --pattern adad
+ --budget 0
+ --budget -1
+ --budget 0.0001 --cost flops
+ --budget_weight 1
+ --tau learnt
+ --tau_start 0
+ --held_out 1
+ --optimise both
+ --retrain yes
+ --cost watts
+ --choose_after 1
par derive
par derive {missing}
par derive {par}
par derive {ponder}
par derive {text}
par derive {empty_folder}
par derive {search} --budget much
par derive {search} --budget 0.00001
par eval
par eval {missing}
par eval {text}
par eval {ponder} --data {text}
par eval {lazy} --data {text}
par eval {gpt2} --data {text}
par eval {par} --data {missing}
par eval {par} --data {image}
par eval {par} --data {one_line}
par eval {par} --data {text} --split tset
par eval {par} --data {text} --mem_len -1
par eval {par} --data {text} --length 100000
par eval {par} --data {text} --batch_size 0
par eval {par} {par} --data {text}
par generate
par generate {missing}
par generate {par} --prompt ""
par generate {par} --prompt " "
par generate {par} --tokens 0
par generate {par} --tokens many
par generate {par} --temperature -1
par generate {par} --temperature hot
par generate {par} --top_k -1
par generate {par} --promt hello
par generate {ponder} --prompt hello
par plot
par plot {missing}
par plot {empty_folder}
par plot {text}
par plot {ponder} --out {text}

# -- ponder
ponder train --data {reviews} --model.encoder {bert} --out {out}
+ --epochs 0
+ --epochs many
+ --head_lr 0
+ --max_passes 0
+ --ponder.exit sometimes
+ --text_column nothing
+ --label_column nothing
+ --limit 0
+ --max_length 0
+ --model.tokenizer {missing}
+ --model.tokenizer {empty_folder}
+ --dropout 1
ponder train --model.encoder {bert} --out {out} --data {missing}
ponder train --model.encoder {bert} --out {out} --data {missing}.csv
ponder train --model.encoder {bert} --out {out} --data {text}
ponder train --model.encoder {bert} --out {out} --data {empty_folder}
ponder train --model.encoder {bert} --out {out} --data {csv_empty}
ponder train --model.encoder {bert} --out {out} --data {csv_headless}
ponder train --model.encoder {bert} --out {out} --data {csv_binary}
ponder train --model.encoder {bert} --out {out} --data {csv_labels}
ponder train --model.encoder {bert} --out {out} --data {csv_rows}
ponder train --model.encoder {bert} --out {out} --data {jsonl_broken}
ponder train --model.encoder {bert} --out {out} --data babi:99
ponder train --data {reviews} --out {out} --model.encoder {missing}
ponder train --data {reviews} --out {out} --model.encoder no/such-encoder
ponder train --data {reviews} --out {out} --model.encoder {gpt2}
ponder train --data {reviews} --out {out} --model.encoder {text}
ponder train --data {reviews} --out {out} --model.encoder {missing}.json
ponder train --data {reviews} --out {out} --model.encoder {bert}/config.json
ponder eval
ponder eval {missing}
ponder eval {par}
ponder eval {bert}
ponder eval {ponder} --split tset
ponder eval {ponder} --data {missing}
ponder eval {ponder} --exit never
ponder eval {ponder} --threshold 2
ponder eval {ponder} --exit fixed --passes 99
ponder eval {ponder} --exit quantile --patience 2
ponder predict {ponder} {missing}
ponder predict {ponder} {reviews}
ponder predict {par} {text}
ponder predict {ponder} {text} --batch_size 0
ponder plot {missing}
ponder parity --out {out} --size 0
ponder parity --out {out} --steps none
ponder parity --out {par}

# -- lazy
lazy train --task sums --out {out}
lazy train --task
lazy train --data {text} --out {out}
lazy train --data {pairs} --out {out} --source xx
lazy train --data {pairs} --out {out} --source en --target en
lazy train --data {pairs} --out {out} --test nothing
lazy train --data {pairs} --out {out} --epochs 0
lazy train --data {pairs} --out {out} --batch_tokens 10
lazy train --data {pairs} --out {out} --mechanism fast
lazy train --data {pairs} --out {out} --encoder_steps 0
lazy train --data {pairs_uneven} --out {out}
lazy train --data {missing} --out {out}
lazy train --task programs --out {out} --nesting 99
lazy train --task programs --out {out} --length 0
lazy train --task language --data {missing} --out {out}
lazy train --task language --data {image} --out {out}
lazy train --config {yaml_unknown} --out {out}
lazy eval
lazy eval {missing}
lazy eval {par}
lazy eval {lazy} --split tset
lazy eval {lazy} --beams 0
lazy eval {lazy} --nesting 3
lazy eval {lazy} --epsilon -1
lazy translate
lazy translate {missing} {text}
lazy translate {lazy} {missing}
lazy translate {lazy} {text} --rows 0
lazy translate {lazy} {image}
lazy translate {ponder} {text}
lazy sweep {missing}
lazy sweep {lazy} --encoder_steps [] --epsilons []
lazy sweep {lazy} --encoder_steps 4
lazy sweep {lazy} --encoder_steps [0]
lazy sweep {lazy} --sentences 0
lazy generate
lazy generate {missing} "Once upon a time"
lazy generate {lazy} "Once upon a time"
lazy generate {par} "Once upon a time"
lazy plot {missing}
lazy plot {par}
lazy plot {lazy} --source ""

# -- shortcut
shortcut paper {missing} --data {text} --out {out}
shortcut paper {gpt2} --data {missing} --out {out}
shortcut paper {gpt2} --data {text} --sentences.train 0 --out {out}
shortcut prune {missing} --data {text} --out {out}
shortcut prune {gpt2} --data {missing} --out {out}
shortcut prune {gpt2} --data {text} --keep 1.5 --out {out}
shortcut prune {gpt2} --data {text} --keep 0 --out {out}
shortcut prune {gpt2} --data {text} --method shear --out {out}
shortcut prune {gpt2} --data {text} --heal_steps -1 --out {out}
shortcut prune {gpt2} --data {text} --out {shortcut}
shortcut import {missing} --model.name {gpt2} --out {out}
shortcut import {empty} --model.name {gpt2} --out {out}
shortcut fit {gpt2} --data {text} --out {out}
+ --lines 0
+ --lines some
+ --min_chars -1
+ --min_chars 100000
+ --split tset
+ --maps square
+ --ridge -1
+ --window 1
+ --dtype int3
+ --kind decoder
+ --positions few
+ --tuned --layers [99]
shortcut fit {missing} --data {text} --out {out}
shortcut fit no/such-model --data {text} --out {out}
shortcut fit smolm2 --data {text} --out {out}
shortcut fit {empty_folder} --data {text} --out {out}
shortcut fit {text} --data {text} --out {out}
shortcut fit {pickled} --data {text} --out {out}
shortcut fit {no_tokenizer} --data {text} --out {out}
shortcut fit {gpt2} --data {missing} --out {out}
shortcut fit {gpt2} --data {image} --out {out}
shortcut fit {bert} --kind causal --data {text} --out {out}
shortcut fit {gpt2} --data {text} --out {shortcut}
shortcut eval
shortcut eval {missing}
shortcut eval {par} --data {text}
shortcut eval {shortcut} --data {missing}
shortcut eval {shortcut} --data {text} --split tset
shortcut eval {shortcut} --data {text} --positions none
shortcut lens {shortcut}
shortcut lens {shortcut} ""
shortcut lens {shortcut} hello --mode guess
shortcut lens {missing} hello
shortcut plot {missing}

# -- decode
decode generate {missing} --prompt the
decode generate no/such-model --prompt the
decode generate {bert} --prompt the
decode generate {gpt2} --prompt ""
decode generate {gpt2} --prompt the --max_new_tokens 0
decode generate {gpt2} --prompt the --max_new_tokens 100000
decode generate {gpt2} --prompt the --mode faster
decode generate {gpt2} --prompt the --mode early_exit
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {missing}
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {shortcut}
decode generate {gpt2} --prompt the --threshold 0.5
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {maps} --threshold 7
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {maps} --policy luck
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {maps} --exit_layers [99]
decode generate {gpt2} --prompt the --mode early_exit --shortcuts {maps} --guarantee {missing}
decode generate {gpt2} --prompt the --draft_model {missing}
decode generate {gpt2} --prompt the --draft_model {maps}
decode generate {gpt2} --prompt the --rounds 0
decode tune {missing} --data {text} --out {out}
decode tune {gpt2} --data {missing} --out {out}
decode tune {bert} --data {text} --out {out}
decode tune {gpt2} --data {text} --out {out} --head.patience never
decode tune {gpt2} --data {text} --out {out} --text.tokens 0
decode tune {gpt2} --data {text} --out {out} --head.held_out 0
decode tune {gpt2} --data {text} --out {out} --head.epochs 0
decode tune {gpt2} --data {text} --out {shortcut}
decode bench {missing} --data {text} --out {out}
decode bench {bert} --data {text} --out {out}
decode bench {gpt2} --data {text} --prompts 0 --out {out}
decode bench {gpt2} --data {missing} --out {out}
decode export {missing} --to vllm --out {out}
decode export {maps} --to vllm --out {out}
decode export {maps} --to ollama --out {out}
decode export {maps} --to vllm
decode calibrate {gpt2}
decode calibrate {gpt2} --shortcuts {missing} --data {text}
decode calibrate {gpt2} --shortcuts {par} --data {text}
decode calibrate {gpt2} --shortcuts {maps} --data {missing}
decode calibrate {gpt2} --shortcuts {maps} --data {text} --max_disagreement 0
decode calibrate {gpt2} --shortcuts {maps} --data {text} --max_disagreement 2
decode calibrate {gpt2} --shortcuts {maps} --data {text} --confidence 1
decode calibrate {gpt2} --shortcuts {maps} --data {text} --policy luck
decode calibrate {gpt2} --shortcuts {maps} --data {text} --texts 0
decode calibrate {missing} --shortcuts {maps} --data {text}

# -- profile, compare, report, demo, cutoffs
profile {gpt2} --data {text} --out {out}
+ --lines 0
+ --eval_lines few
+ --rounds 0
+ --prompt_tokens 0
+ --new_tokens many
+ --ridge -1
+ --prompt_tokens 1000000
+ --kind decoder
+ --resume
profile {missing} --data {text} --out {out}
profile no/such-model --data {text} --out {out}
profile {gpt2} --data {missing} --out {out}
profile {gpt2} --data {image} --out {out}
profile {no_tokenizer} --data {text} --out {out}
profile {gpt2} --data {text} --out {shortcut}
profile {gpt2} --data {text} --out {own_work}
profile {gpt2} --data {text} --out {own_work} --overwrite
profile {gpt2} --data {text} --out {text}
compare
compare {missing}
compare {text} --out {out}
compare {par} {ponder} --out {out}
compare {search} --out {out}
compare {par} --out {out} --rounds 0
compare {par} --out {out} --data {missing}
compare {par} --out {out} --split tset
compare {par} --out {out} --grid.mem_len [-1]
compare {ponder} --out {out} --grid.passes [99]
compare {par} --out {out} --grid.memlen [4]
compare {par} --out {text} --data {text}
report
report {missing}
report {text}
report {empty_folder}
report {par} --out {readonly}/page.html
cutoffs
cutoffs --clusters 2 --counts {missing}
cutoffs --clusters 2 --counts {text}
cutoffs --clusters 2 --counts {empty}
cutoffs --clusters 2 --counts {image}
cutoffs --counts {counts} --clusters 0
cutoffs --counts {counts} --clusters 999
cutoffs --clusters 2 --run {par} --counts {counts}
cutoffs --clusters 2 --run {missing}
cutoffs --clusters 2
demo --out {text}
demo --what
"""


def table() -> list[str]:
    """Return the wrong command lines, `+` lines completed."""
    lines, before = [], ""
    for line in TABLE.splitlines():
        if line.startswith("+ "):
            lines.append(f"{before} {line[2:]}")
        elif line.strip() and not line.startswith("#"):
            before = line.strip()
            lines.append(before)
    bases = {line for line in lines if any(other.startswith(f"{line} ") for other in lines)}
    # What only begins other lines is right by itself: it has all that the command needs.
    return [line for line in lines if not (line in bases and "--out {out}" in line)]


@dataclass
class Outcome:
    """What a wrong command line led to."""

    words: str
    code: int
    said: str
    wrong: list[str] = field(default_factory=list)
    """What should not have been so."""


def run(seed: int = 0, only: str = "", share: float = 1.0) -> list[Outcome]:
    """Run the command lines that contain `only`, or a share of them drawn by the seed."""
    chosen = [line for line in table() if only in line]
    if share < 1.0:
        chosen = sorted(random.Random(seed).sample(chosen, round(share * len(chosen))))
    with workshop() as places:
        return [attempt(line, places) for line in chosen]


def attempt(line: str, places: dict[str, str]) -> Outcome:
    """Run one wrong command line in this process."""
    from deepenough.__main__ import main

    words = [word.format(**places) for word in shlex.split(line)]
    top = Path(places["top"])
    before = contents(top)
    out, errors = io.StringIO(), io.StringIO()
    wrong = []
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(words)
    except BaseException as error:
        code = -1
        wrong.append(f"raised {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    lines = [each for each in errors.getvalue().splitlines() if each.strip()]
    said = lines[-1] if lines else ""
    for name, place in sorted(places.items(), key=lambda item: -len(item[1])):
        said = said.replace(place, f"<{name}>")
    outcome = Outcome(line, code, said, wrong)
    if code != 2:
        wrong.append(f"exit code {code}")
    if "Traceback" in errors.getvalue() + out.getvalue():
        wrong.append("a traceback")
    sentence = said.removeprefix("deepenough: error: ")
    if sentence == said or not sentence.endswith((".", "?")):
        wrong.append("no sentence at the end")
    if len(sentence) > LONGEST:
        wrong.append(f"a sentence of {len(sentence)} characters")
    if not REMEDY.search(sentence):
        wrong.append("no remedy")
    if (after := contents(top)) != before:
        changed = sorted(set(after.items()) ^ set(before.items()))
        wrong.append(f"changed {changed[0][0]}")
        shutil.rmtree(places["out"], ignore_errors=True)  # or the next ones would fail for it
    if wrong:
        print(f"{line}\n    {said}\n    {wrong}", file=sys.stderr)
    return outcome


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not refused within {SECONDS} s")


def contents(top: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file and folder of the workshop; the cache may change."""
    found = {}
    for folder, inner, files in os.walk(top):
        inner[:] = [name for name in inner if name != "cache"]
        for name in (*inner, *files):
            path = Path(folder, name)
            state = path.lstat()
            found[str(path)] = (state.st_size, state.st_mtime_ns) if path.is_file() else (0, 0)
    return found


# -- the workshop ------------------------------------------------------------------------------


@contextlib.contextmanager
def workshop() -> Iterator[dict[str, str]]:
    """Yield places by name: texts, models and runs, good ones and bad ones."""
    top = Path(tempfile.mkdtemp(prefix="mistakes-"))
    old, variables = Path.cwd(), dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(top / "cache")
    os.environ.pop("DEEPENOUGH_DATA", None)
    stdin = sys.stdin
    sys.stdin = io.StringIO("")
    os.chdir(top)
    try:
        yield _furnish(top)
    finally:
        os.chdir(old)
        sys.stdin = stdin
        os.environ.clear()
        os.environ.update(variables)
        shutil.rmtree(top, ignore_errors=True)


def _furnish(top: Path) -> dict[str, str]:
    places = {name: str(top / name) for name in ("top", "out", "missing")} | {"top": str(top)}

    def put(name: str, content: str | bytes, file: str = "") -> str:
        path = top / (file or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        places[name] = str(path)
        return str(path)

    lines = [
        f"the number {n} comes after {n - 1} and before {n + 1} in the row" for n in range(900)
    ]
    text = put("text", "\n".join(lines), "text.txt")
    put("empty", "", "empty.txt")
    put("blank", "\n" * 50, "blank.txt")
    put("one_line", "one line of text\n", "one.txt")
    put("short", "".join(f"{line}\n" for line in lines[:25]), "short.txt")
    put("image", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "image.png")
    put("archive", b"PK\x03\x04\x14\0\0\0\x08\0", "archive.zip")
    put("weights", b"\x40\0\0\0\0\0\0\0" + b"{}".ljust(64), "w.safetensors")
    put("latin", "schön und größer\n".encode("latin-1") * 50, "latin.txt")
    put("utf16", "some text\n".encode("utf-16") * 50, "utf16.txt")
    put("counts", "\n".join(str(900 - n) for n in range(300)), "counts.txt")
    put("yaml_broken", "train: [1, 2\n", "broken.yaml")
    put("yaml_list", "- train\n- steps\n", "list.yaml")
    put("yaml_unknown", "train:\n  step: 3\n", "unknown.yaml")
    put("yaml_types", "train:\n  steps: many\n", "types.yaml")
    put("yaml_section", "train: 3\n", "section.yaml")
    put("yaml_other", "ponder:\n  max_passes: 3\n", "other.yaml")
    put("csv_empty", "", "empty.csv")
    put("csv_headless", "good film,1\nbad film,0\n", "headless.csv")
    put("csv_binary", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "binary.csv")
    put("csv_labels", "text,label\ngood,1\nbad,zero\n", "labels.csv")
    put("csv_rows", "text,label\ngood,1\nbad,0,3,4\n", "rows.csv")
    put("jsonl_broken", '{"text": "good", "label": 1}\n{"text": "bad"\n', "broken.jsonl")
    put("pictures", b"\x89PNG", "pictures/a.png")
    put("thesis", "years of work", "own_work/chapter.tex")
    places["pictures"], places["own_work"] = str(top / "pictures"), str(top / "own_work")
    put("text_in_folder", "\n".join(lines[:30]), "texts/a.txt")
    places["text_folder"] = str(top / "texts")
    (top / "empty_folder").mkdir()
    places["empty_folder"] = str(top / "empty_folder")
    for split, number in (("train", 60), ("dev", 20)):
        rows = [("good", 1) if n % 2 else ("bad", 0) for n in range(number)]
        rows_text = "".join(f"a {word} film\t{label}\n" for word, label in rows)
        put("reviews", f"sentence\tlabel\n{rows_text}", f"reviews/{split}.tsv")
    places["reviews"] = str(top / "reviews")
    for language in ("en", "de"):
        pairs_text = "".join(f"{language} sentence {n}\n" for n in range(120))
        put("pairs", pairs_text, f"pairs/train.{language}")
        uneven = pairs_text if language == "en" else pairs_text[: len(pairs_text) // 2]
        put("pairs_uneven", uneven, f"uneven/train.{language}")
    places["pairs"], places["pairs_uneven"] = str(top / "pairs"), str(top / "uneven")
    _models(top, places, lines)
    _runs(top, places, text)
    places["readonly"] = "/proc/self"  # where not even the superuser may write
    return places


def _models(top: Path, places: dict[str, str], lines: list[str]) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    from deepenough.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(lines, 300)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=300, **sizes, **ids))
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=64,
        )
    )
    for name, model in {"gpt2": gpt2, "bert": bert, "pickled": gpt2, "no_tokenizer": gpt2}.items():
        folder = top / name
        model.save_pretrained(folder)
        if name != "no_tokenizer":
            tokenizer.save_pretrained(folder)
        places[name] = str(folder)
    (top / "pickled" / "model.safetensors").unlink()
    torch.save(gpt2.state_dict(), top / "pickled" / "pytorch_model.bin")
    content = json.loads((top / "bert" / "config.json").read_text())
    (top / "bert" / "config.json").write_text(json.dumps(content | ids))


def _runs(top: Path, places: dict[str, str], text: str) -> None:
    from deepenough.__main__ import main

    small = "--steps 3 --d_model 16 --num_heads 2 --d_ff 16 --vocab_size 300"
    streams = "--num_blocks 2 --batch_size 4 --length 8 --mem_len 8 --model.dropout 0"
    commands = {
        "par": f"par train --data {text} {small} {streams}",
        "search": f"par search --data {text} {small} {streams} --cost flops",
        "ponder": f"ponder train --data {places['reviews']} --model.encoder {places['bert']}"
        " --epochs 0.5 --batch_size 8",
        "lazy": f"lazy train --data {places['pairs']} {small} --epochs null --model.encoder_steps 2"
        " --model.decoder_steps 2 --batch_tokens 128 --max_length 32",
        "shortcut": f"shortcut fit {places['gpt2']} --data {text} --lines 30",
    }
    for name, words in commands.items():
        places[name] = str(top / name)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main([*words.split(), "--out", places[name]])
        if code:
            raise RuntimeError(f"{words}: {said.getvalue()}")
    places["maps"] = str(top / "shortcut" / "shortcuts")


def main(argv: list[str]) -> int:
    """Run all of the table and print what went wrong; return 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults mistakes")
    parser.add_argument("--only", default="", help="only lines that contain these words")
    parser.add_argument("--list", metavar="FILE", help="write every sentence to a file")
    options = parser.parse_args(argv)
    outcomes = run(only=options.only)
    if options.list:
        said = [f"{each.words}\n    {each.said}\n" for each in outcomes]
        Path(options.list).write_text("\n".join(said), encoding="utf-8")
    bad = [each for each in outcomes if each.wrong]
    for each in bad:
        print(f"{each.words}\n    {each.said}\n    {'; '.join(each.wrong)}")
    print(f"{len(outcomes)} wrong command lines, {len(bad)} not refused as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
