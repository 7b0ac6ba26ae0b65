"""Every file in examples/ runs, on small models and texts."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"

Main = Callable[..., Any]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Main]:
    """A function that gives the `main` of an example, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def main_of(name: str) -> Main:
        for module in (name, "texts"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        main: Main = importlib.import_module(name).main
        return main

    return main_of


def test_every_example_is_listed_and_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"texts"}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    assert [name for name in sorted(names) if f"({name}.py)" not in listed] == []
    assert [name for name in sorted(names) if f'example("{name}")' not in tests] == []


def test_speed_up_generate(example: Any, tiny_llama: Path) -> None:
    assert example("speed_up_generate")(str(tiny_llama), tokens=6) > 0


def test_lens_of_a_model(example: Any, tiny_llama: Path) -> None:
    words = example("lens_of_a_model")(str(tiny_llama), num_texts=40)
    assert len(words) == 31  # the embeddings and every layer


def test_early_exit_with_a_guarantee(example: Any, shallow_llama: Path) -> None:
    main = example("early_exit_with_a_guarantee")
    found = main(str(shallow_llama), max_disagreement=0.5, num_texts=60, new_tokens=4)
    assert found.max_disagreement == 0.5


def test_smaller_model(example: Any, shallow_llama: Path, tmp_path: Path) -> None:
    assert example("smaller_model")(str(shallow_llama), keep=0.8, num_texts=150) < 1
    assert (tmp_path / "smaller" / "config.json").is_file()


def test_pondering_classifier(example: Any, tiny_bert: Path) -> None:
    assert 0 <= example("pondering_classifier")(str(tiny_bert), num_texts=40) <= 1


def test_lazy_translator(example: Any) -> None:
    assert isinstance(example("lazy_translator")(num_pairs=60, steps=3), str)


def test_par_search(example: Any, text_file: Path) -> None:
    assert set(example("par_search")(str(text_file), steps=3)) <= set("ad-")


def test_chat_with_streaming(example: Any, tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).symlink_to(file)
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (folder / file).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    first, second = example("chat_with_streaming")(str(folder), ("One?", "Two?"), tokens=4)
    assert first == 0 and second > 0


def test_lm_eval_of_early_exit(example: Any, shallow_llama: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: deepenough[eval]")
    scores = example("lm_eval_of_early_exit")(str(shallow_llama), num_texts=60)
    assert scores
