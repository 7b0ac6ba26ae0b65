"""Tokenizers: any text comes back, saved ones are the same, ids are SentencePiece's own."""

import json

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from deepenough.data import tokenizer as training
from deepenough.data.encoding import encoder_of, lower
from deepenough.data.tokenizer import (
    MODEL_FILE,
    load_tokenizer,
    lowers_case,
    save_tokenizer,
    train_tokenizer,
)
from deepenough.errors import UserError

# SentencePiece's visible space is a space: the one character that trained tokenizers change.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))
# Text near what the pieces are made of: words, spaces, symbols and byte pieces spelled out.
FRAGMENTS = st.lists(
    st.sampled_from(["the ", "  ", " class", "@-@", "<0x41>", "<", "0x41>", "é", "I", "\t"])
).map("".join)
HARD_TEXT = [
    "",
    " ",
    "  two  spaces  ",
    "tab\tand\nnewline\r\n",
    "<0x41><0xE2>",
    "\x00\x7f\u200b\ufeff\U0010ffff",
    "<unk> </s> <s> [UNK]",
    "e\u0301 \u00e9 \ufb01 \u2460 \u3000 \u00a0",
    "日本語 العربية 🙂👩‍👩‍👧",
]


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def scores(tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return [score for _, score in model["vocab"]]


def assert_same_or_tied(tokenizer, mine, theirs):
    """The same ids, or as good ones: SentencePiece sums in 32 bits, so ties fall either way."""
    if mine != theirs:
        score = scores(tokenizer)
        assert len(mine) == len(theirs)
        assert sum(score[i] for i in mine) == pytest.approx(sum(score[i] for i in theirs), rel=1e-6)


@pytest.mark.parametrize("text", HARD_TEXT)
def test_hard_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids_of(tokenizer, text)) == text
    assert tokenizer.decode(encoder_of(tokenizer)([text])[0]) == text


@given(text=TEXT | FRAGMENTS)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


@given(text=TEXT | FRAGMENTS)
def test_any_text_comes_back_up_to_case(lower_tokenizer, text):
    assert lower_tokenizer.decode(ids_of(lower_tokenizer, text)) == lower(text)


@given(text=TEXT | FRAGMENTS)
def test_trained_ids_are_sentencepieces(tokenizer, lower_tokenizer, text):
    for either in (tokenizer, lower_tokenizer):
        assert_same_or_tied(either, ids_of(either, text), encoder_of(either)([text])[0])


def test_real_lines_are_sentencepieces(tokenizer, prose):
    encoded = encoder_of(tokenizer)(prose)
    differing = 0
    for line, ids in zip(prose, encoded, strict=True):
        assert_same_or_tied(tokenizer, ids_of(tokenizer, line), ids)
        differing += ids_of(tokenizer, line) != ids
        assert tokenizer.decode(ids) == line
    assert differing < len(prose) / 100


@given(TEXT)
def test_lower_case_is_letter_by_letter(text):
    # A letter that is new to either side's Unicode tables may be known to the other alone.
    assert lower(text.replace("Σ", "σ")) == lower(text)
    if text.isascii():
        assert lower(text) == text.lower()


def test_lower_case_is_pythons_but_for_the_last_sigma():
    assert lower("ÀÉÎ İ ΣΊΣΥΦΟΣ") == "àéî i̇ σίσυφοσ"


def test_special_ids_are_fixed(tokenizer):
    ids = [getattr(tokenizer, f"{role}_token_id") for role in ("unk", "bos", "eos", "pad")]
    assert ids == [0, 1, 2, 3]
    assert len(tokenizer) == tokenizer.vocab_size == 800
    assert tokenizer("x")["input_ids"] == ids_of(tokenizer, "x")


def test_special_tokens_are_left_out_when_asked(tokenizer):
    ids = [tokenizer.bos_token_id, *ids_of(tokenizer, "two words"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "two words"


@pytest.mark.parametrize("save", [lambda t, f: t.save_pretrained(f), save_tokenizer])
@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, load_tokenizer])
def test_saved_and_loaded_is_the_same(tmp_path, lower_tokenizer, prose, save, load):
    save(lower_tokenizer, tmp_path)
    loaded = load(str(tmp_path))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert lowers_case(loaded)
    for text in [*prose[:300], *HARD_TEXT, "ROLE @-@ Playing"]:
        assert ids_of(loaded, text) == ids_of(lower_tokenizer, text)
    assert loaded.eos_token_id == lower_tokenizer.eos_token_id
    assert loaded.decode(ids_of(loaded, "A  b ")) == "a  b "


def test_training_is_repeatable_also_on_a_sample(monkeypatch, prose):
    monkeypatch.setattr(training, "SAMPLE_SIZE", 1500)
    vocabularies = [train_tokenizer(iter(prose), 500).get_vocab() for _ in range(2)]
    assert vocabularies[0] == vocabularies[1]


def test_lower_case_reaches_pieces(prose):
    small = train_tokenizer(prose, 500, lowercase=True)
    learned = list(small.get_vocab())[:]
    assert not any(piece != piece.lower() for piece in learned if not piece.startswith("<0x"))


def test_a_vocabulary_too_large_is_what_the_text_can_give(prose):
    largest = train_tokenizer(prose[:200], 90000)
    assert 300 < len(largest) < 90000
    same = train_tokenizer(prose[:200], len(largest))
    assert same.get_vocab() == largest.get_vocab()
    assert len(train_tokenizer(prose[:200], len(largest) - 1)) == len(largest) - 1


def test_vocabulary_too_small_says_what_is_needed(prose):
    with pytest.raises(
        UserError,
        match=r"set vocab_size to more than \d+",
    ):
        train_tokenizer(prose[:200], 100)


@pytest.mark.parametrize("vocab_size", [0, -5])
def test_no_vocabulary(prose, vocab_size):
    with pytest.raises(UserError):
        train_tokenizer(prose[:200], vocab_size)


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_nothing_to_train_on(lines):
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(lines, 500)


def test_long_lines_and_tabs_are_trained_on():
    lines = ["\t".join(f"word{number % 50}" for number in range(20_000))]
    assert any("word" in piece for piece in train_tokenizer(lines, 280).get_vocab())


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("num_other", "vocab_size"), [(0, 288), (1000, 400)])
def test_repeated_lines_take_no_time(prose, num_other, vocab_size):
    # Given as they are, they would keep SentencePiece busy for hours.
    lines = ["the quick brown fox jumps over the lazy dog"] * 20_000 + prose[:num_other]
    assert len(train_tokenizer(lines, vocab_size)) == vocab_size


def test_a_hub_style_folder_decides_about_case_itself(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=False)
    tokenizer.save_pretrained(tmp_path)
    plain = load_tokenizer(tmp_path)
    assert ids_of(plain, "HELLO hello") == encoder_of(plain)(["HELLO hello"])[0] == [1, 5]
    with pytest.raises(UserError, match="does not lower the case of its text: leave lowercase off"):
        load_tokenizer(tmp_path, lowercase=True)


def test_a_foreign_model_file_is_not_attached(tmp_path, tokenizer, lower_tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / MODEL_FILE).write_bytes(lower_tokenizer.sentencepiece_encoder.model)
    assert not hasattr(load_tokenizer(tmp_path), "sentencepiece_encoder")


@pytest.mark.parametrize("content", [b"", b"no model", b"\x0a\x03abc"])
def test_no_model_file(tmp_path, content):
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.model is not a SentencePiece model"):
        load_tokenizer(path)


def test_not_a_unigram_model(tmp_path, prose):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose),
        model_prefix=str(tmp_path / "bpe"),
        model_type="bpe",
        vocab_size=300,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="not a unigram"):
        load_tokenizer(tmp_path / "bpe.model")


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="No tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="tokenizer of 'no/where' was not found"):
        load_tokenizer("no/where")
