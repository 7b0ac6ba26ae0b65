"""Tiny models, tokenizers and texts."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from deepenough.hf.adapter import Adapter
from deepenough.shortcut.lens import PRECISIONS, TokenScores
from deepenough.shortcut.reading import TokenBatch, batches, make_reading, run_batch

WORDS = [f"w{number}" for number in range(90)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(wraps: bool, **tokens: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if wraps:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


@pytest.fixture(scope="session")
def plain() -> PreTrainedTokenizerFast:
    """Words as ids, nothing around them, no padding token: as GPT-2's."""
    return make_tokenizer(wraps=False)


@pytest.fixture(scope="session")
def wrapped() -> PreTrainedTokenizerFast:
    """[CLS] before and [SEP] after: as BERT's."""
    return make_tokenizer(
        wraps=True,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Of 0 to 39 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(40))) for _ in range(150)]


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=95, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=95,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config).eval()


@pytest.fixture
def states() -> list[Tensor]:
    """Four layers of width 6 at 700 positions, far from centred, in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    layers = [draw(700, 6) + 3]
    for _ in range(3):
        layers.append(layers[-1] + torch.tanh(layers[-1] @ draw(6, 6)) + 0.1 * draw(700, 6))
    return layers


@pytest.fixture(scope="session")
def score_ref() -> Callable[..., TokenScores]:
    """Scores of predictions straight from their definitions, token by token."""

    def score(
        logits_NV: Tensor, last_logits_NV: Tensor, targets: Tensor | None = None
    ) -> TokenScores:
        """The definitions, token by token."""
        rows: list[tuple[float, ...]] = []
        for n, (logits, last) in enumerate(
            zip(logits_NV.double(), last_logits_NV.double(), strict=True)
        ):
            p, q = last.softmax(0), logits.softmax(0)
            token = int(q.argmax())
            one, two = q.sort(descending=True).values[:2].tolist()
            rank = min(int((p > p[token]).sum()), PRECISIONS[-1])
            kl = float((p * (p.log() - q.log())).sum())
            entropy = float(-(q * q.log()).nansum())
            real = -1 if targets is None else int(targets[n])
            cross_entropy = -float(q[real].log()) if real >= 0 else float("nan")
            place = 1 + int((q > q[real]).sum()) if real >= 0 else -1
            rows.append(
                (one - two, rank, -float(p[token].log()), kl, entropy, cross_entropy, place)
            )
        columns = (torch.tensor(column) for column in zip(*rows, strict=True))
        return TokenScores(*columns, torch.empty(len(rows), 0, dtype=torch.long))

    return score


@pytest.fixture(scope="session")
def iterate_states() -> Callable[..., Iterator[tuple[TokenBatch, list[Tensor]]]]:
    """Every batch of texts with its states; options are those of `make_reading`."""

    def iterate(
        adapter: Adapter, tokenizer: Any, texts: Any, tally: Any = None, **options: Any
    ) -> Iterator[tuple[TokenBatch, list[Tensor]]]:
        for batch in batches(tokenizer, texts, make_reading(adapter, **options), tally):
            yield batch, run_batch(adapter, batch)

    return iterate
