"""What every test runs under: one thread, no network, no display; and what folders share."""

import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

# Read by libraries when they are first imported, hence set before any test module is.
os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads: xdist already runs one process per core
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import settings

from deepenough.runs import Record, read_records

# What is saved waits for the disk, some forty times a training; no test pulls the plug.
os.fsync = lambda _: None

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what tests import from one another

# A busy machine makes an example slow, not wrong.
settings.register_profile("deepenough", deadline=None)
settings.load_profile("deepenough")

_REVIEW_WORDS = ["good", "fine", "bad", "awful", "film", "plot", "the", "a", "so", "very"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of local corpora; a test that needs it is skipped on a machine without one."""
    folder = os.environ.get("DEEPENOUGH_DATA")
    if not folder:
        pytest.skip("DEEPENOUGH_DATA is not set: no local corpora on this machine")
    return Path(folder)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 700 lines, long enough for a few hundred tiny batches."""
    lines = (line for name in sorted(topics) for line in topics[name].split("\n"))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{line}\n" for line in islice(lines, 700)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that all tests of a session fill together."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(text_file: Path, shared_cache: Path) -> Callable[..., dict[str, Any]]:
    """Settings, by dotted name, of a training that takes a second; keywords go in `train`."""

    def make(folder: Path, changes: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
        settings = {
            "out": str(folder),
            "data": str(text_file),
            "dataset.cache": str(shared_cache),
            "dataset.vocab_size": 400,
            "dataset.batch_size": 4,
            "dataset.length": 8,
            "model.num_blocks": 3,
            "model.d_model": 16,
            "model.num_heads": 2,
            "model.d_ff": 32,
            "model.mem_len": 8,
            "train.steps": 12,
            "train.warmup": 3,
            "train.lr": 0.01,
            "train.log_every": 1,
            "train.valid_every": 6,
            "train.save_every": 4,
            "train.keep": 2,
        }
        return (
            settings | {f"train.{name}": value for name, value in train.items()} | (changes or {})
        )

    return make


def _review(generator: random.Random) -> tuple[str, int]:
    label = generator.randrange(2)
    words = [generator.choice(_REVIEW_WORDS[4:]) for _ in range(generator.randrange(1, 7))]
    telling = _REVIEW_WORDS[2 * (1 - label) + generator.randrange(2)]
    words.insert(generator.randrange(len(words) + 1), telling)
    return " ".join(words), label


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled texts in which one word tells the label, as train.tsv and dev.tsv."""
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(0)
    for split, num in (("train", 160), ("dev", 40)):
        rows = [_review(generator) for _ in range(num)]
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"{split}.tsv").write_text(f"sentence\tlabel\n{lines}")
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of three layers that knows the words of the reviews, with its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(_SPECIAL + _REVIEW_WORDS))
    tokenizer = BertTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def records() -> Callable[[Path], list[Record]]:
    """What a run has recorded, without what a clock decides."""

    def read(folder: Path) -> list[Record]:
        found, corrupted = read_records(folder / "metrics.jsonl")
        assert corrupted == 0
        clock = ("tokens_per_second", "seconds")
        values = [{k: v for k, v in r.values.items() if k not in clock} for r in found]
        return [Record(r.step, r.kind, v, 0.0) for r, v in zip(found, values, strict=True)]

    return read


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Within it, the system refuses to make a file larger than so many bytes."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
