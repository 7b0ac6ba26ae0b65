"""One prompt beside the model itself, and runs as a comparison measures them."""

from pathlib import Path

import pytest
import torch

from deepenough import UserError, early_exit, speculate
from deepenough.__main__ import main
from deepenough.decoding.config import DecodeGrid
from deepenough.decoding.early_exit import FixedLayer
from deepenough.decoding.evaluation import (
    generate_timed,
    open_candidate,
    pieces,
    prompt_ids,
)
from deepenough.measurement import ComparedData


@pytest.fixture(scope="module")
def fitted(saved_model: Path, words_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `shortcut fit`."""
    folder = tmp_path_factory.mktemp("runs") / "shortcut"
    words = ["--data", str(words_file), "--min_chars", "8", "--ridge", "1e-3"]
    assert main(["shortcut", "fit", str(saved_model), *words, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tuned(saved_model: Path, words_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `decode tune`."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    words = ["--data", str(words_file), "--min_chars", "8", "--tokens", "400"]
    words += ["--prompt_tokens", "6", "--new_tokens", "20"]
    words += ["--held_out", "4", "--epochs", "1", "--draft_vocab", "20"]
    assert main(["decode", "tune", str(saved_model), *words, "--out", str(folder)]) == 0
    return folder


def measured(run: Path, data: Path, **more: object) -> dict[str, object]:
    sizes = {"limit": 3, "prompt_tokens": 5, "new_tokens": 6}
    compared = ComparedData(str(data), "train", **sizes | {"grid": DecodeGrid()} | more)
    candidate = open_candidate(str(run), "name", compared)
    assert candidate.task.quality == "agreement" and candidate.task.unit == "token"
    return {p.name: (p, candidate.judge(p, candidate.run(p))) for p in candidate.points()}


def test_lossless_ways_agree_and_exits_save_layers(fitted, words_file) -> None:
    found = measured(fitted, words_file, grid=DecodeGrid(exit=[1.0, 0.0]))
    assert list(found) == ["transformers", "full", "speculative", "exit 1", "exit 0"]
    for name in ("transformers", "full", "speculative", "exit 1"):
        assert found[name][1].quality.value == 1.0 and found[name][1].layers == 3.0
    assert found["exit 0"][1].layers < 3.0 and found["exit 0"][1].sample.layers == 3
    assert found["full"][1].flops == pytest.approx(found["transformers"][1].flops)
    assert f"--shortcuts {fitted}/shortcuts" in found["exit 0"][0].command


def test_a_draft_model_takes_part(fitted, tuned, words_file) -> None:
    """As a run of its own, and beside shortcuts."""
    found = measured(tuned, words_file)
    assert list(found) == ["transformers", "full", "speculative", "tuned"]
    beside = measured(fitted, words_file, mechanisms=["full", "tuned"], tuned=str(tuned))
    assert list(beside) == ["full", "tuned"]
    for point, scores in (found["tuned"], beside["tuned"]):
        assert scores.quality.value == 1.0
        assert f"--draft_model {tuned}" in point.command


@pytest.mark.parametrize(
    ("mechanisms", "sentence"),
    [(["tuned"], "give the folder that deepenough decode tune wrote"), (["flying"], "choose from")],
)
def test_mechanisms_that_are_not_there_are_refused(
    fitted, words_file, mechanisms, sentence
) -> None:
    with pytest.raises(UserError, match=sentence):
        measured(fitted, words_file, mechanisms=mechanisms)


def test_a_prompt_is_timed_beside_the_model(small, shortcuts) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    result, full = generate_timed(speculate(small), ids, 10, against=small, rounds=2)
    assert result.ids == full.ids and len(result.ids) <= 10
    assert float(full.trace.flops[0, 0]) == pytest.approx(float(result.trace.flops[0, 0]))
    fast = early_exit(small, shortcuts, policy=FixedLayer(1), exit_layers=[1])
    result, full = generate_timed(fast, ids, 10)
    assert full is None
    depths = result.trace.depth[0].tolist()
    assert depths[0] == 3 and set(depths[1:]) == {1}


def test_characters_of_several_tokens_stay_whole() -> None:
    class Bytes:
        @staticmethod
        def decode(ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    new = list("né!".encode())
    assert pieces(Bytes, list(b"a"), new) == ["n", "", "é", "!"]
    assert "".join(pieces(Bytes, list(b"a"), new[:2])) == "n\ufffd"


def test_a_chat_template_brings_its_own_first_token() -> None:
    def encode(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    class Chatty:
        chat_template = "{{ bos_token }}..."
        __call__ = staticmethod(encode)

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "\x01" + messages[0]["content"]

    assert prompt_ids(Chatty(), "a", chat=True).tolist() == [[1, ord("a")]]
    assert prompt_ids(Chatty(), "a").tolist() == [[1, ord("a")]]
