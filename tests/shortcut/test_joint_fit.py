"""One pass for all fits gives what each gives by itself."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deepenough.shortcut.joint_fit import collect, fit
from deepenough.shortcut.shortcuts import Shortcuts
from deepenough.shortcut.submodules import Submodules


def test_together_as_one_by_one() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
        )
    ).eval()
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    texts = [
        " ".join(f"w{i}" for i in torch.randint(0, 60, (5 + n % 7,)).tolist()) for n in range(90)
    ]
    seen: list[tuple[int, int | None]] = []
    statistics = collect(
        model, words, texts, seed=4, progress=lambda done, total: seen.append((done, total))
    )
    found = fit(model, statistics)
    assert seen[-1] == (90, 90)
    linear = Shortcuts.fit(model, words, texts, positions="random", seed=4)
    affine = Shortcuts.fit(model, words, texts, positions="random", seed=4, affine=True)
    for mine, theirs in ((found.linear, linear), (found.affine, affine)):
        assert (mine.mode, mine.targets, mine.pairs) == (theirs.mode, theirs.targets, theirs.pairs)
        for pair in theirs.pairs:
            torch.testing.assert_close(
                mine.matrix(*pair), theirs.matrix(*pair), rtol=1e-3, atol=1e-3
            )
        torch.testing.assert_close(mine.cka(), theirs.cka())
        assert mine.meta["model"] == theirs.meta["model"]
        assert mine.meta["fit"]["positions"] == theirs.meta["fit"]["positions"] == 90
    parts = Submodules.fit(model, words, texts, seed=4)
    assert parts.maps.keys() == found.submodules.maps.keys()
    for place, linear_map in parts.maps.items():
        torch.testing.assert_close(
            found.submodules.maps[place].weight, linear_map.weight, rtol=1e-3, atol=1e-3
        )
