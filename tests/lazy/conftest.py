"""Tiny Lazy Transformers in double precision, so that rounding decides nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough import cli
from deepenough.config import dump
from deepenough.data.config import TranslationDataConfig
from deepenough.data.tokenizer import save_tokenizer
from deepenough.data.translation import joint_tokenizer, open_parallel
from deepenough.lazy.config import (
    LazyModelConfig,
    ProgramConfig,
    ProgramTrainConfig,
    TranslationTrainConfig,
)
from deepenough.lazy.modeling import (
    LazyTransformerConfig,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.lazy.programs import character_tokenizer
from deepenough.lazy.training import new_translator
from deepenough.runs import Record, append_record

LINES = ["a man rides a red bike", "a woman walks her dog", "two dogs", "a red dog walks"]
TINY = {"d_model": 16, "num_heads": 2, "d_ff": 32}


def _config(**changes: Any) -> LazyTransformerConfig:
    values = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "encoder_steps": 3}
    values |= {"decoder_steps": 2, "max_positions": 64, "dropout": 0.0}
    return LazyTransformerConfig(**(values | changes))


@pytest.fixture
def make_translator() -> Callable[..., LazyTransformerForConditionalGeneration]:
    def make(**changes: Any) -> LazyTransformerForConditionalGeneration:
        torch.manual_seed(0)
        return LazyTransformerForConditionalGeneration(_config(**changes)).double().eval()

    return make


@pytest.fixture
def make_writer() -> Callable[..., LazyTransformerForCausalLM]:
    def make(**changes: Any) -> LazyTransformerForCausalLM:
        torch.manual_seed(0)
        return LazyTransformerForCausalLM(_config(**changes)).double().eval()

    return make


@pytest.fixture
def sources() -> dict[str, torch.Tensor]:
    """Three sources of 7, 4 and 5 tokens."""
    ids = torch.randint(4, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5]])).long()
    return {"input_ids": ids * mask + 3 * (1 - mask), "attention_mask": mask}


@pytest.fixture(scope="session")
def lazy() -> Callable[..., int]:
    """Run `deepenough lazy ...` in this process; a user's mistake is raised."""
    return lambda *words: cli.run(["lazy", *map(str, words)])


@pytest.fixture(scope="session")
def lines() -> list[str]:
    return LINES


@pytest.fixture(scope="session")
def make_run(tmp_path_factory, shared_cache) -> Callable[..., Path]:
    """Folders of runs, as training leaves them, with translators that have learned nothing."""
    corpus = tmp_path_factory.mktemp("parallel")
    for split in ("train", "val", "test_a", "test_b"):
        for language in ("en", "de"):
            (corpus / f"{split}.{language}").write_text("\n".join(LINES * 10))

    def make(**model: Any) -> Path:
        options = TINY | {"encoder_steps": 4, "decoder_steps": 2} | model
        config = TranslationTrainConfig(
            data=str(corpus),
            dataset=TranslationDataConfig(vocab_size=280, max_length=24, cache=str(shared_cache)),
            model=LazyModelConfig(**options),
        )
        tokenizer = joint_tokenizer(open_parallel(config.data, config.dataset), config.dataset)
        return _save(config, tokenizer, tmp_path_factory.mktemp("run"))

    return make


@pytest.fixture(scope="session")
def programs_run(tmp_path_factory) -> Path:
    """The folder of a run with a model that executes programs, and has learned nothing."""
    config = ProgramTrainConfig(
        dataset=ProgramConfig(length=2, eval_size=12),
        model=LazyModelConfig(**TINY, encoder_steps=3, decoder_steps=2),
    )
    return _save(config, character_tokenizer(), tmp_path_factory.mktemp("programs"))


def _save(config: Any, tokenizer: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = new_translator(config.model, tokenizer, config.dataset.max_length)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    dump(config, folder / "config.yaml")
    append_record(folder / "metrics.jsonl", Record(1, "train", {"loss": 1.0}))
    return folder
