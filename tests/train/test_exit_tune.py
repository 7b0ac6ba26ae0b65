"""A draft head from a model's own text: written in parts, gone on with, trained, chosen, used."""

from pathlib import Path

import pytest
import torch

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.adaptive.exit.making import make_engine
from deepenough.adaptive.exit.own_text import continue_prompts
from deepenough.data.instructions import instructions
from deepenough.train.exit_tune_text import OwnTexts, OwnTextSettings, make_prompts, write_texts


class Numbers:
    """A tokenizer whose words are numbers; others are told apart by their length."""

    chat_template = None

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(w) if w.isdigit() else 3 + len(w) for w in text.split()]}


@pytest.fixture
def small():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(3, 40, (120, 6), generator=generator).tolist()
    path = tmp_path / "numbers.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in lines) + "\n")
    return str(path)


def text_settings(corpus: str, **changes: int) -> OwnTextSettings:
    own = {"tokens": 300, "prompt_tokens": 6, "new_tokens": 20, "min_chars": 4, "batch": 8}
    return OwnTextSettings(data=corpus, **{**own, **changes})


def test_an_interrupted_writing_goes_on(small, corpus, tmp_path) -> None:
    whole = write_texts(tmp_path / "whole", small, Numbers(), text_settings(corpus), 0)
    assert whole.num_new >= 300 and whole.num_parts > 2
    parts = tmp_path / "parts"
    write_texts(parts, small, Numbers(), text_settings(corpus, tokens=100), 0)
    again = write_texts(parts, small, Numbers(), text_settings(corpus), 0)
    assert len(again) == len(whole) == len(OwnTexts(parts))
    for one, other in zip(again, whole, strict=True):
        assert torch.equal(one.ids_T, other.ids_T) and one.prompt == other.prompt
        assert torch.equal(one.states_TD, other.states_TD)
        assert one.states_TD.shape == (len(one.ids_T) - 1, 32)
        assert one.states_TD.dtype == torch.float16
    with pytest.raises(UserError, match="new_tokens was 20 and is now 21"):
        write_texts(parts, small, Numbers(), text_settings(corpus, new_tokens=21), 0)


def test_greedy_and_drawn_texts(small) -> None:
    engine = make_engine(small)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    greedy = continue_prompts(engine, prompts, 12)
    for text, prompt in zip(greedy, prompts, strict=True):
        ids = torch.tensor([prompt])
        expected = small.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert torch.equal(text.ids_T, expected[0])
    drawn = [
        continue_prompts(engine, prompts, 12, torch.Generator().manual_seed(seed))[0].ids_T.tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(UserError, match="at most 58 new tokens"):
        continue_prompts(engine, prompts, 60)


def test_prompts_are_lines_and_instructions_in_turn(corpus) -> None:
    settings = text_settings(corpus)
    found = list(make_prompts(Numbers(), settings))
    assert len(found) >= 200 and len(found[0]) == 6
    assert found[1] == Numbers()(next(instructions()))["input_ids"]
    settings.instructions = False
    assert list(make_prompts(Numbers(), settings)) == found[::2]


def test_instructions_are_not_repeated() -> None:
    found = list(instructions())
    assert len(set(found)) == len(found) > 2000


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--text.tokens", "0"], "text.tokens must be at least 1"),
        (["--data", "nowhere.txt", "--folder", "F"], "nowhere.txt"),
    ],
)
def test_wrong_settings_are_refused(words, match, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["exit", "tune", "smollm2", *words]) == 2
    assert match in capsys.readouterr().err
