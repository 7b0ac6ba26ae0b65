"""SentencePiece unigram models as Hugging Face fast tokenizers with the same ids.

transformers 5.22 converts SentencePiece files in two ways, and both change ids on ordinary lines:
`TokenizersBackend` neither adds the leading space nor collapses others, and `SpmConverter` cuts
user-defined symbols out first and then strips the text before each of them. Here each rule of the
model file becomes the `tokenizers` step that does the same:

- A user-defined symbol is a piece like any other whose score is the one SentencePiece's own Viterbi
  search gives it (its bytes times the best score, less 0.1), not a token cut out beforehand.
- No pre-tokenizer splits words: the search runs over the whole line, as in SentencePiece.
- The text of a byte piece, such as "<0x41>", stands for itself: SentencePiece keeps byte pieces out
  of its search, `tokenizers` does not, so the text is cut there.

Differences remain in four rare places. Where two cuts of a line score exactly alike (runs of one
character), rounding decides, and SentencePiece rounds to 32 bits. The text of a special token, such
as `<|eos|>`, becomes that token, as always in Hugging Face. And in models that bring a character
map, which those trained here do not, letters followed by combining accents and the visible space
U+2581 can come out otherwise. Token files are therefore written by SentencePiece itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepenough.errors import UserError

SPACE = "\u2581"  # SentencePiece's visible space
# Trained tokenizers write the visible space itself as this noncharacter, which Unicode keeps out of
# exchanged text: else it would come back as a space.
STAND_IN = "\ufdd0"

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
        raise UserError(f"{path} is not a SentencePiece model file: {error}.") from error
    if not model.pieces:
        raise UserError(f"{path} is not a SentencePiece model file: it holds no pieces.")
    if model.trainer_spec.model_type != _spm.TrainerSpec.UNIGRAM:
        raise UserError(
            f"{path} is not a unigram SentencePiece model: give the folder of a Hugging Face "
            "tokenizer instead."
        )
    return model


def fast_tokenizer(model: Model, lowercase: bool) -> PreTrainedTokenizerFast:
    """Return a SentencePiece model as a Hugging Face tokenizer, lower-casing first if asked for."""
    spec = model.trainer_spec
    backend = Tokenizer(
        models.Unigram(_vocabulary(model), unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    )
    backend.normalizer = _normalizer(model, lowercase)
    if spec.byte_fallback:
        backend.pre_tokenizer = pre_tokenizers.Split(
            Regex("<(?=0x[0-9A-F]{2}>)"), behavior="merged_with_previous"
        )
    backend.decoder = _decoder(model)
    special = {
        f"{role}_token": AddedToken(model.pieces[number].piece, normalized=False, special=True)
        for role, number in special_ids(model).items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )


def special_ids(model: Model) -> dict[str, int]:
    """Return the ids of unk, bos, eos and pad, as far as the model has them."""
    spec = model.trainer_spec
    ids = {"unk": spec.unk_id, "bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id}
    return {role: number for role, number in ids.items() if 0 <= number < len(model.pieces)}


def _vocabulary(model: Model) -> list[tuple[str, float]]:
    best = max(piece.score for piece in model.pieces if piece.type == Piece.NORMAL)
    return [
        (
            piece.piece,
            len(piece.piece.encode("utf-8")) * best - 0.1
            if piece.type == Piece.USER_DEFINED
            else piece.score,
        )
        for piece in model.pieces
    ]


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
    if is_lossless(model):
        steps.append(normalizers.Replace(SPACE, STAND_IN))
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
    if is_lossless(model):
        steps.append(decoders.Replace(STAND_IN, SPACE))
    return decoders.Sequence(steps)


def is_lossless(model: Model) -> bool:
    """Return whether the model changes nothing of its input, as those trained here do not."""
    spec = model.normalizer_spec
    changes = spec.precompiled_charsmap or spec.remove_extra_whitespaces or spec.add_dummy_prefix
    return model.trainer_spec.byte_fallback and not changes
