"""Tokenizers: trained on a corpus, or given as a SentencePiece file or a Hugging Face folder.

Trained ones are SentencePiece unigram models with byte fallback and no normalisation, so that any
text comes back from its ids unchanged (with lower-casing: up to case), but for U+2581, which is
SentencePiece's own sign for a space. Spaces are kept as they are and none is put before a line. The
special tokens look like `<|eos|>`, not `<unk>`, of which WikiText is full.
"""

import io
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deepenough.artifacts import cache_folder, entry, key_of, verify
from deepenough.data.config import TokenizerConfig
from deepenough.data.corpus import candidates
from deepenough.data.encoding import ATTRIBUTE, SentencePieceEncoder, lower
from deepenough.errors import UserError
from deepenough.hf.loading import from_pretrained
from deepenough.training.logging import announce

SPECIAL_TOKENS = {"unk": "<|unk|>", "bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}
# Training reads a random sample, so that its memory is bounded: 200,000 stretches of at most 512
# characters, more than a vocabulary needs.
SAMPLE_SIZE = 200_000
SAMPLE_CHARACTERS = 512
MAX_COPIES = 20
SEED = 1
# Not the number of cores: floating-point sums, and so the pieces, depend on how work is shared.
NUM_TRAINING_THREADS = 4
# Part of a trained tokenizer's key: to be changed with the way tokenizers are trained.
TRAINING_RECIPE = "1"


def load_tokenizer(
    path: str | os.PathLike[str], lowercase: bool = False
) -> PreTrainedTokenizerBase:
    """Return a SentencePiece `.model` file, its ids kept, or a folder that `AutoTokenizer` loads.

    A relative path is tried as given, then under `$DEEPENOUGH_DATA`; what is no path is tried as a
    hub name.
    """
    found = next((place for place in candidates(os.fspath(path)) if place.exists()), None)
    if found is not None and found.is_file():
        return fast_tokenizer(found.read_bytes(), lowercase, found)
    if found is not None:
        verify(found, without=".safetensors")
    place, name = os.fspath(found or path), os.fspath(path)
    tokenizer: PreTrainedTokenizerBase
    tokenizer = from_pretrained(AutoTokenizer, place, "tokenizer", name, trust_remote_code=None)
    if lowercase and not lowers_case(tokenizer):
        raise UserError(
            f"The tokenizer {os.fspath(path)!r} does not lower the case of its text: leave "
            "lowercase off, or give a SentencePiece .model file."
        )
    if found is not None and (found / MODEL_FILE).is_file():
        model = (found / MODEL_FILE).read_bytes()
        if len(parse_model(model, found / MODEL_FILE).pieces) == tokenizer.vocab_size:
            setattr(tokenizer, ATTRIBUTE, SentencePieceEncoder(model, lowers_case(tokenizer)))
    return tokenizer


def add_encoder_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer the mask and the padding that an encoder needs, at the end of its ids."""
    needed = {"mask_token": "<|mask|>", "pad_token": SPECIAL_TOKENS["pad"]}
    for role, text in needed.items():
        if getattr(tokenizer, role) is None:
            tokenizer.add_special_tokens({role: text})


def check_text(text: str, what: str = "The prompt") -> str:
    """Return a text; UserError if it holds half a character, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1}"
        raise UserError(f"{what} is no text at {place}, half a one: give valid UTF-8.") from error
    return text


def train_tokenizer(
    lines: Iterable[str], vocab_size: int, lowercase: bool = False
) -> PreTrainedTokenizerBase:
    """Train a tokenizer of `vocab_size` pieces, or of as many as the text can give."""
    sample = _sample(map(lower, lines) if lowercase else lines)
    return fast_tokenizer(_train(sample, vocab_size), lowercase)


def _train(sample: list[str], vocab_size: int) -> bytes:
    written = io.BytesIO()
    special: dict[str, Any] = {}
    for number, (role, token) in enumerate(SPECIAL_TOKENS.items()):
        special |= {f"{role}_id": number, f"{role}_piece": token}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=written,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * SAMPLE_CHARACTERS,
            num_threads=NUM_TRAINING_THREADS,
            minloglevel=2,
            **special,
        )
    except RuntimeError as error:
        largest = re.search(r"value <= (\d+)", str(error))
        if largest and int(largest[1]) < vocab_size:
            return _train(sample, int(largest[1]))
        raise _explained(error, vocab_size) from error
    return written.getvalue()


def _explained(error: RuntimeError, vocab_size: int) -> UserError:
    """Return what SentencePiece says of a vocabulary's size as a sentence about our option."""
    message = str(error)
    if smallest := re.search(r"smaller than required_chars\D*\d+ vs (\d+)", message):
        return UserError(
            f"A vocabulary of {vocab_size} pieces cannot hold the characters of this corpus: "
            f"set vocab_size to more than {smallest[1]}."
        )
    if "sentences_.empty()" in message:
        return UserError(
            "The corpus holds no text that a tokenizer could be trained on: give a longer one."
        )
    return UserError(
        f"SentencePiece could not train a tokenizer ({message.splitlines()[0]}): give more text, "
        "another vocab_size, or a tokenizer."
    )


def cached_tokenizer(
    lines: Callable[[], Iterable[str]], content: str, config: TokenizerConfig
) -> PreTrainedTokenizerBase:
    """Return a tokenizer trained on the lines, from the cache if there is one of that content."""
    size, lowercase = config.vocab_size, config.lowercase
    key = key_of(TRAINING_RECIPE, content, str(size), str(lowercase))

    def fill(folder: Path) -> None:
        announce(f"Training a tokenizer of {size} pieces.")
        save_tokenizer(train_tokenizer(lines(), size, lowercase), folder)

    folder = entry(cache_folder(config.cache) / "tokenizers" / key, fill)
    tokenizer = fast_tokenizer((folder / MODEL_FILE).read_bytes(), lowercase, folder / MODEL_FILE)
    if len(tokenizer) < size:
        announce(f"The vocabulary has {len(tokenizer)} pieces, not {size}: the text gives no more.")
    return tokenizer


def _sample(lines: Iterable[str]) -> list[str]:
    """Stretches of text chosen evenly from all of it by reservoir sampling, in random order.

    SentencePiece takes hours over text that repeats itself for long (one line, thousands of times),
    so copies of a stretch are scattered, and few are kept.
    """
    random_ = random.Random(SEED)
    sample: list[str] = []
    # SentencePiece skips a sentence with a tab in it; tabs are left to byte fallback.
    clean = (line.replace("\t", " ") for line in lines)
    for number, stretch in enumerate(
        line[start : start + SAMPLE_CHARACTERS]
        for line in clean
        for start in range(0, len(line), SAMPLE_CHARACTERS)
    ):
        if number < SAMPLE_SIZE:
            sample.append(stretch)
        elif (place := random_.randrange(number + 1)) < SAMPLE_SIZE:
            sample[place] = stretch
    random_.shuffle(sample)
    copies = Counter[str]()
    kept = []
    for stretch in sample:
        copies[stretch] += 1
        if copies[stretch] <= MAX_COPIES:
            kept.append(stretch)
    return kept


# -- saving, with the SentencePiece model ----------------------------------------------------------

MODEL_FILE = "sentencepiece.model"


def lowers_case(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's first step is to lower the case of its text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return False
    normalizer = json.loads(backend.to_str())["normalizer"]
    first = normalizer["normalizers"][0] if normalizer["type"] == "Sequence" else normalizer
    return bool(first["type"] == "Lowercase")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """`save_pretrained`, and the SentencePiece model beside it, which makes encoding faster."""
    tokenizer.save_pretrained(folder)
    encoder = getattr(tokenizer, ATTRIBUTE, None)
    if encoder is not None:
        (folder / MODEL_FILE).write_bytes(encoder.model)


# -- SentencePiece models as fast tokenizers ------------------------------------------------------
#
# transformers 5.22 converts SentencePiece files in two ways, and both change ids on ordinary lines
# (leading spaces, user-defined symbols). Here each rule of the model file becomes the `tokenizers`
# step that does the same. Differences remain where two cuts of a line score exactly alike (runs of
# one character; rounding decides), in the text of special tokens, and, in models that bring a
# character map, in combining accents. Token files are therefore written by SentencePiece itself.

SPACE = "\u2581"  # SentencePiece's visible space

_NO_MODEL = "{} is not a SentencePiece model file: give one, or a folder with tokenizer.json."
# Protobuf makes its classes at run time, out of a type checker's sight.
_spm: Any = sentencepiece_model_pb2
Model = Any
Piece: Any = _spm.ModelProto.SentencePiece


def parse_model(content: bytes, path: Path | None = None) -> Model:
    """Return the model in the bytes of a SentencePiece file; `path` is for the error alone."""
    model = _spm.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise UserError(_NO_MODEL.format(path)) from error
    if not model.pieces:
        raise UserError(_NO_MODEL.format(path))
    if model.trainer_spec.model_type != _spm.TrainerSpec.UNIGRAM:
        raise UserError(
            f"{path} is not a unigram SentencePiece model: give the folder of a Hugging Face "
            "tokenizer instead."
        )
    return model


def fast_tokenizer(
    content: bytes, lowercase: bool, path: Path | None = None
) -> PreTrainedTokenizerBase:
    """Return a SentencePiece model as a Hugging Face tokenizer, lower-casing first if asked for."""
    model = parse_model(content, path)
    spec = model.trainer_spec
    # A user-defined symbol is a piece with the score that SentencePiece's own search gives it.
    best = max(piece.score for piece in model.pieces if piece.type == Piece.NORMAL)
    vocab = []
    for piece in model.pieces:
        given = len(piece.piece.encode("utf-8")) * best - 0.1
        vocab.append((piece.piece, given if piece.type == Piece.USER_DEFINED else piece.score))
    backend = Tokenizer(models.Unigram(vocab, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback))
    backend.normalizer, backend.decoder = _normalizer(model, lowercase), _decoder(model)
    if spec.byte_fallback:  # the text of a byte piece, such as "<0x41>", stands for itself
        backend.pre_tokenizer = pre_tokenizers.Split(
            Regex("<(?=0x[0-9A-F]{2}>)"), behavior="merged_with_previous"
        )
    ids = {role: getattr(spec, f"{role}_id") for role in SPECIAL_TOKENS}
    known = {role: number for role, number in ids.items() if 0 <= number < len(model.pieces)}
    tokenizer = as_tokenizer(backend, {r: model.pieces[n].piece for r, n in known.items()})
    setattr(tokenizer, ATTRIBUTE, SentencePieceEncoder(content, lowercase))
    return tokenizer


def as_tokenizer(backend: Tokenizer, special: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Return a backend as transformers uses it; `special` are the tokens of roles such as eos."""
    tokens = {
        f"{role}_token": AddedToken(text, normalized=False, special=True)
        for role, text in special.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )


def _normalizer(model: Model, lowercase: bool) -> normalizers.Normalizer:
    spec = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if lowercase:
        steps.append(normalizers.Lowercase())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: Model) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
