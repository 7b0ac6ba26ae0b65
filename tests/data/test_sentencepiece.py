"""Given SentencePiece models keep their ids, with and without each of their rules."""

import itertools
import unicodedata

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deepenough.data.encoding import encoder_of
from deepenough.data.tokenizer import load_tokenizer

NAMES = ("par/wiki2_12k.model", "tokenizers/albert-base-v2/spiece.model")

# Where the two libraries read a model's character map differently: combining marks, joined after
# the letter before them, and the visible space, which SentencePiece then takes for a space.
EXACT = st.text(
    st.characters(
        exclude_categories=["Cs", "Mn", "Mc", "Me", "Cf", "Cn", "Co"],
        exclude_characters="\u2581",
    ),
    max_size=60,
)
# Special tokens spelled out are Hugging Face's business.
SPELLED = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<unk>", "<pad>")


@pytest.fixture(scope="module", params=itertools.product(NAMES, (False, True)))
def given_model(request, data_dir):
    name, lowercase = request.param
    processor = sentencepiece.SentencePieceProcessor(model_file=str(data_dir / name))
    return processor, load_tokenizer(data_dir / name, lowercase), lowercase


@pytest.fixture(scope="module")
def wiki_lines(data_dir):
    text = (data_dir / "wikitext-2" / "test.txt").read_text("utf-8")
    raw = (data_dir / "wikitext-2-raw" / "test.txt").read_text("utf-8")
    lines = [*text.split("\n")[:400], *raw.split("\n")[:400]]
    return [line for line in lines if not any(token in line for token in SPELLED)]


def test_real_lines(given_model, wiki_lines):
    processor, tokenizer, lowercase = given_model
    expected = processor.encode([line.lower() for line in wiki_lines] if lowercase else wiki_lines)
    assert len(wiki_lines) > 500
    assert tokenizer(wiki_lines, add_special_tokens=False)["input_ids"] == expected
    assert encoder_of(tokenizer)(wiki_lines) == expected


@given(text=EXACT)
def test_random_text(given_model, text):
    _, tokenizer, _ = given_model
    if not any(token in text for token in SPELLED):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == encoder_of(tokenizer)([text])[0]


def test_single_characters(given_model):
    """Every assigned character of the first plane, inside a word and alone."""
    _, tokenizer, _ = given_model
    characters = [chr(code) for code in range(1, 0xD800) if unicodedata.category(chr(code)) != "Cn"]
    lines = [f"ab{character}cd {character} x" for character in characters if character != "\u2581"][
        ::7
    ]
    assert tokenizer(lines, add_special_tokens=False)["input_ids"] == encoder_of(tokenizer)(lines)


def test_saved_folder_gives_the_same(given_model, wiki_lines, tmp_path):
    processor, tokenizer, lowercase = given_model
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    expected = processor.encode([line.lower() for line in wiki_lines] if lowercase else wiki_lines)
    assert loaded(wiki_lines, add_special_tokens=False)["input_ids"] == expected
    assert len(loaded) == processor.get_piece_size()
    assert loaded.unk_token_id == processor.unk_id()


def test_special_ids_of_the_par_model(data_dir):
    tokenizer = load_tokenizer(data_dir / "par/wiki2_12k.model")
    ids = [getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos", "unk")]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.convert_tokens_to_ids("@-@") == 4


def test_relative_to_the_data_folder(data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPENOUGH_DATA", str(data_dir))
    monkeypatch.chdir(tmp_path)
    assert len(load_tokenizer("par/wiki2_12k.model")) == 12_000


@pytest.mark.parametrize(
    "rules",
    [
        {"normalization_rule_name": "nfkc_cf", "byte_fallback": True},
        {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "identity", "byte_fallback": True},
    ],
    ids=str,
)
def test_each_rule_of_a_model(tmp_path, prose, rules):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose),
        model_prefix=str(tmp_path / "m"),
        vocab_size=500,
        user_defined_symbols=["@-@", "<sep>"],
        minloglevel=2,
        **rules,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    tokenizer = load_tokenizer(tmp_path / "m.model")
    texts = [
        "",
        " ",
        "  a  b ",
        "a@-@b @-@  <sep><sep> x",
        "日本 ½ É x",
        "A\u00a0\u3000B",
        *prose[:200],
    ]
    texts = [text for text in texts if "<s>" not in text and "---" not in text]
    own, expected = tokenizer(texts, add_special_tokens=False)["input_ids"], processor.encode(texts)
    for ids, reference in zip(own, expected, strict=True):
        # Two segmentations of the same score are equally right; which is found, no rule says.
        scores = [sum(processor.get_score(token) for token in part) for part in (ids, reference)]
        assert ids == reference or (
            sorted(ids) == sorted(reference) and scores[0] == pytest.approx(scores[1], abs=1e-4)
        )
    assert sum(ids == reference for ids, reference in zip(own, expected, strict=True)) > 190
    for text in texts:
        ids = processor.encode(text)
        if processor.unk_id() not in ids:
            assert tokenizer.decode(ids) == processor.decode(ids)
