"""From settings to tokens in one call, cached."""

import pytest

from deepenough import config as settings_module
from deepenough.data import tokenizer as training
from deepenough.data.config import DatasetConfig
from deepenough.data.tokens import prepare


@pytest.fixture
def text(tmp_path, prose):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(prose), encoding="utf-8")
    return str(path)


def test_trains_a_tokenizer_and_encodes_every_split(text, prose):
    prepared = prepare(text, DatasetConfig(vocab_size=600, lowercase=True))
    assert set(prepared.tokens) == {"train", "valid", "test"}
    assert len(prepared.tokenizer) == 600
    ids = prepared.tokens["train"].ids
    num_ends = (ids == prepared.tokenizer.eos_token_id).sum()
    assert num_ends == prepared.tokens["train"].num_lines
    assert prepared.tokenizer.decode(ids[:200]).startswith(prose[0].lower())


def test_everything_is_cached(text, monkeypatch):
    settings = DatasetConfig(vocab_size=500)
    first = prepare(text, settings)
    monkeypatch.setattr(training, "train_tokenizer", None)
    again = prepare(text, settings)
    assert again.tokens == first.tokens
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    with pytest.raises(TypeError):  # another size is trained anew
        prepare(text, DatasetConfig(vocab_size=501))


@pytest.mark.parametrize(("end_of_line", "has_ends"), [(None, False), (True, True), (False, False)])
def test_a_given_tokenizer_adds_line_ends_only_when_asked(
    text, tokenizer, tmp_path, end_of_line, has_ends
):
    tokenizer.save_pretrained(tmp_path / "t")
    settings = DatasetConfig(
        tokenizer=str(tmp_path / "t"), end_of_line=end_of_line, cache=str(tmp_path)
    )
    ids = prepare(text, settings).tokens["train"].ids
    assert (ids == tokenizer.eos_token_id).any() == has_ends


def test_the_cache_can_be_elsewhere(text, tmp_path, own_cache):
    prepare(text, DatasetConfig(vocab_size=500, cache=str(tmp_path / "mine")))
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["tokenizers", "tokens"]
    assert not own_cache.exists()


def test_a_vocabulary_too_large_is_said_every_time(text, own_cache, capsys):
    for _ in range(2):  # the second time it comes from the cache
        prepared = prepare(text, DatasetConfig(vocab_size=1_000_000))
        size = len(prepared.tokenizer)
        assert f"The vocabulary has {size} pieces, not 1000000" in capsys.readouterr().err


def test_every_setting_has_a_text():
    options = settings_module.options(DatasetConfig)
    assert len(options) > 8
    assert all(option.text for option in options)
