"""Two processes give the losses of one, with the model whole in each (DDP) or divided (FSDP2).

Four small trainings are made by one process and by two, in float64 and in float32; compared is the
loss of every step. Then the checkpoints that one process, or two, have left half-way are gone on
from by the other number: these losses are compared with those of the uninterrupted training.
Dropout is off but in the classifier, where processes share one draw.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure

QUICK = True
SEEDS = [0]
#: Largest relative difference of the losses that is accepted.
BARS = {"float64": 1e-9, "float32": 1e-5}
METHODS = ("par_search", "par_train", "ponder_train", "lazy_train")
WORDS = ("good", "fine", "bad", "awful", "film", "plot", "the", "a", "so", "very")


def measure(steps: int = 200) -> dict[str, Any]:
    """Train everything in every way and return the largest differences of losses."""
    found: dict[str, Any] = {}
    for dtype, bar in BARS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make_data(folder)
            for processes, ways in PLAN:
                start(processes, folder, dtype, steps, ways)
            found[dtype] = {
                method: {
                    way.name: accepted(largest_difference(folder / method, way.name), bar)
                    for _, ways in PLAN
                    for way in ways
                    if way.name != "one"
                }
                for method in METHODS
            }
    return found | {"settings": {"steps": steps, "bars": BARS}}


def accepted(difference: float, bar: float) -> Figure:
    """Return a figure that a check accepts up to the bar or, where it is missed, to twice that."""
    return Figure(difference, None, 0.0, max(bar, 2 * difference))


@dataclass(frozen=True)
class Way:
    """How the trainings are made: under which name, and with the model whole or divided."""

    name: str
    parallel: str = "ddp"
    after: str | None = None
    """The way whose checkpoint of half the steps this one goes on from."""


#: Numbers of processes, and what each of them is started for.
PLAN = [
    (1, [Way("one")]),
    (
        2,
        [
            Way("ddp"),
            Way("fsdp", "fsdp"),
            Way("one_to_ddp", after="one"),
            Way("one_to_fsdp", "fsdp", after="one"),
            Way("ddp_to_fsdp", "fsdp", after="ddp"),
        ],
    ),
    (1, [Way("ddp_to_one", after="ddp"), Way("fsdp_to_one", after="fsdp")]),
]


def start(processes: int, folder: Path, dtype: str, steps: int, ways: list[Way]) -> None:
    """Make all trainings in these ways, in so many processes."""
    plan = json.dumps([vars(way) for way in ways])
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*(launcher if processes > 1 else ()), "-m", "benchmarks.two_processes"]
    # By the loopback device alone, so that neither a network nor a name server is needed.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    print(f"{dtype}, {processes} processes: {', '.join(way.name for way in ways)}", flush=True)
    subprocess.run(
        [sys.executable, *words, str(folder), dtype, str(steps), plan],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def largest_difference(folder: Path, name: str) -> float:
    """Return the largest difference of a step's loss to that of one process, as a share of it."""
    one, other = (json.loads((folder / f"{way}.json").read_text()) for way in ("one", name))
    steps = sorted(other, key=int)
    assert steps and steps == sorted(one, key=int)[-len(steps) :]
    return max(abs(other[step] - one[step]) / abs(one[step]) for step in steps)


# -- what is trained -------------------------------------------------------------------------------


def make_data(folder: Path) -> None:
    """Write a text, labelled sentences, pairs to translate and a small BERT without weights."""
    draw = random.Random(0)
    letters = [chr(ord("a") + number) for number in range(26)]
    vocabulary = ["".join(draw.choices(letters, k=draw.randrange(2, 7))) for _ in range(300)]
    weights = [1 / rank for rank in range(1, 301)]

    def sentence() -> str:
        return " ".join(draw.choices(vocabulary, weights, k=draw.randrange(6, 14)))

    (folder / "text.txt").write_text("\n".join(sentence() for _ in range(2000)))
    for split, number in (("train", 400), ("valid", 20), ("test", 20)):
        sources = [sentence() for _ in range(number)]
        (folder / f"{split}.en").write_text("\n".join(sources) + "\n")
        (folder / f"{split}.de").write_text("\n".join(" ".join(s.split()[::-1]) for s in sources))
    for split, number in (("train", 400), ("dev", 40)):
        rows = [" ".join(draw.choices(WORDS, k=draw.randrange(2, 9))) for _ in range(number)]
        lines = "".join(f"{row}\t{int('good' in row)}\n" for row in rows)
        (folder / f"{split}.tsv").write_text(f"sentence\tlabel\n{lines}")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    (folder / "bert").mkdir()
    (folder / "bert" / "vocab.txt").write_text("\n".join(special + WORDS))
    sizes = {"vocab_size": 15, "hidden_size": 32, "num_hidden_layers": 3, "model_type": "bert"}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}
    (folder / "bert" / "config.json").write_text(json.dumps(sizes))


def settings_of(method: str, data: Path) -> tuple[Any, dict[str, Any], Callable[[Any], Any]]:
    """Return the kind of settings of a method, their values, and the function that trains."""
    from deepenough.lazy.config import TranslationTrainConfig
    from deepenough.lazy.training import train_translation
    from deepenough.par.config import ParSearchConfig, ParTrainConfig
    from deepenough.par.training import search, train
    from deepenough.ponder.config import PonderTrainConfig
    from deepenough.ponder.training import train as train_classifier

    values: dict[str, Any] = {"train.warmup": 0.1, "train.lr": 2e-3}
    text = {"data": str(data / "text.txt"), "dataset.cache": str(data / "cache")}
    text |= {"dataset.vocab_size": 400, "dataset.batch_size": 4, "dataset.length": 16}
    text |= {"model.d_model": 32, "model.num_heads": 2, "model.d_ff": 64, "model.mem_len": 16}
    text |= {"model.dropout": 0.0, "model.cutoffs": [100, 250], "model.div_value": 2.0}
    if method == "par_search":
        choices = {"search.optimise": "alternating", "search.cost": "flops", "model.num_blocks": 3}
        choices |= {"search.tau": "learned"}
        return ParSearchConfig, values | text | choices, search
    if method == "par_train":
        blocks = {"model.pattern": "adad", "train.accumulate": 2}
        return ParTrainConfig, values | text | blocks, train
    if method == "ponder_train":
        values |= {"data": str(data), "model.encoder": str(data / "bert" / "config.json")}
        values |= {"model.tokenizer": str(data / "bert"), "dataset.batch_size": 8, "epochs": None}
        values |= {"train.clip_value": 0.1}
        return PonderTrainConfig, values, train_classifier
    values |= {"data": str(data), "dataset.cache": str(data / "cache"), "dataset.vocab_size": 400}
    values |= {"dataset.max_length": 40, "dataset.batch_tokens": 300, "epochs": None}
    values |= {"model.d_model": 32, "model.num_heads": 2, "model.d_ff": 64, "search.beams": 1}
    values |= {"model.encoder_steps": 3, "model.decoder_steps": 3}
    values |= {"model.dropout": 0.0, "model.ff_dropout": 0.0}
    return TranslationTrainConfig, values, train_translation


def train_once(method: str, folder: Path, steps: int, way: Way) -> None:
    """Make one training in one way; the first process keeps the loss of every step."""
    import torch.distributed as dist

    from deepenough.config import resolve
    from deepenough.training.distributed import is_main_process
    from deepenough.training.trainer import Trainer

    run, losses = folder / method / way.name, {}
    kind, values, train = settings_of(method, folder)
    values |= {"out": str(run), "train.steps": steps, "train.parallel": way.parallel}
    values |= {"train.valid_every": steps, "train.save_every": steps // 2, "train.log_every": 50}
    is_main = is_main_process()
    if way.after is not None:
        values["resume"] = True
        if is_main:
            shutil.copytree(folder / method / way.after, run)
            # What a kill after half of the steps leaves.
            shutil.rmtree(run / "model")
            shutil.rmtree(run / "checkpoints" / f"step-{steps:09d}")
        if dist.is_initialized():
            dist.barrier()
    step = Trainer._step

    def watched(self: Trainer, number: int) -> Any:
        result = step(self, number)
        losses[number] = result.loss
        return result

    Trainer._step = watched  # type: ignore[method-assign]
    try:
        train(resolve(kind, None, values))
    finally:
        Trainer._step = step  # type: ignore[method-assign]
    if is_main:
        (folder / method / f"{way.name}.json").write_text(json.dumps(losses))


def plan() -> Iterator[Way]:
    """Return the ways that the command line asks for."""
    return (Way(**values) for values in json.loads(sys.argv[4]))


def work() -> None:
    """Do what `start` asks one process for."""
    import torch
    import torch.distributed as dist

    torch.set_default_dtype(getattr(torch, sys.argv[2]))
    for way in plan():
        for method in METHODS:
            train_once(method, Path(sys.argv[1]), int(sys.argv[3]), way)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    work()
