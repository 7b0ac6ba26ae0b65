"""What reads a prompt, each with a tiny random model behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = ["ein mann faehrt rad", "eine frau geht aus", "der hund geht aus", "ein hund geht rad"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for every byte, and the usual special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def readers(folder: Path) -> dict[str, Callable[[str], Any]]:
    """Return a function of a prompt for every part of the product that takes one."""
    from deepenough.config import ContinueConfig
    from deepenough.data.config import TranslationDataConfig
    from deepenough.data.translation import joint_tokenizer, open_parallel
    from deepenough.decoding.api import speculate
    from deepenough.decoding.evaluation import generate_timed, prompt_ids
    from deepenough.lazy.config import BeamSearchConfig, LazyModelConfig
    from deepenough.lazy.inference import TrainedModel, translate_lines
    from deepenough.lazy.training import new_translator
    from deepenough.par import evaluation
    from deepenough.par.modeling import ParConfig, ParForCausalLM
    from deepenough.ponder.inference import predict
    from deepenough.ponder.modeling import PonderAlbertConfig, PonderAlbertForSequenceClassification
    from deepenough.shortcut.lens import lens
    from deepenough.shortcut.modeling import Shortcuts

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    par = folder / "par-model"
    ParForCausalLM(
        ParConfig(size, pattern="ad", d_model=16, num_heads=2, d_ff=16, mem_len=8)
    ).save_pretrained(par)
    tokenizer.save_pretrained(par)

    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=size, **shape, max_position_embeddings=128)
    ).eval()
    texts = [sentence * 3 for sentence in SENTENCES]
    shortcuts = Shortcuts.fit(llama, tokenizer, texts)
    fast = speculate(llama)

    (folder / "parallel").mkdir()
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            (folder / "parallel" / f"{split}.{language}").write_text("\n".join(SENTENCES * 10))
    dataset = TranslationDataConfig(vocab_size=280, max_length=24, cache=str(folder / "cache"))
    both = joint_tokenizer(open_parallel(str(folder / "parallel"), dataset), dataset)
    small = LazyModelConfig(
        "lazy", d_model=16, num_heads=2, d_ff=16, encoder_steps=2, decoder_steps=2
    )
    translator = TrainedModel(new_translator(small, both, 24).eval(), both)

    sizes = {"embedding_size": 8, "max_position_embeddings": 64, "num_labels": 2}
    config = PonderAlbertConfig(vocab_size=size, **shape, **sizes, pad_token_id=0)
    classifier = PonderAlbertForSequenceClassification(config).eval()

    def answer(prompt: str) -> Any:
        first, tab, second = prompt.partition("\t")
        return list(predict(classifier, [(first, second) if tab else first], tokenizer))

    # The model is loaded once and not at every prompt.
    loaders = {
        "load_model": functools.cache(evaluation.load_model),
        "load_tokenizer": functools.cache(evaluation.load_tokenizer),
    }

    def continued(prompt: str) -> Any:
        with mock.patch.multiple(evaluation, **loaders):
            return evaluation.continue_text(ContinueConfig(str(par), prompt[:300], tokens=2))

    def written(prompt: str) -> Any:
        ids = prompt_ids(tokenizer, prompt)[:, :64]
        return tokenizer.decode(generate_timed(fast, ids, 3)[0].ids)

    return {
        "par": continued,
        "lens": lambda prompt: lens(llama, tokenizer, shortcuts, prompt).to_json(),
        "decode": written,
        "ponder": answer,
        "translate": lambda prompt: list(
            translate_lines(translator, [prompt], BeamSearchConfig(beams=1))
        ),
    }
