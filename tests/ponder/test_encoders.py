"""Every encoder of the installed transformers: pass n is a model of n layers, or it is refused."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from deepenough.cli import main
from deepenough.errors import UserError
from deepenough.par.modeling import ParConfig, ParModel
from deepenough.ponder.config import BaseEncoderConfig, PonderConfig
from deepenough.ponder.evaluation import load_classifier
from deepenough.ponder.halting import FixedExit
from deepenough.ponder.modeling import PonderEncoderForSequenceClassification
from deepenough.ponder.training import make_classifier
from deepenough.runs import read_records

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "embedding_size": 16,
    "pad_token_id": 0,
    "n_layers": 3,
    "n_heads": 2,
    "dim": 16,
    "hidden_dim": 24,
    "emb_dim": 16,
}
LARGEST = 3_000_000
KINDS = sorted(
    set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    | set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
)
RIGHT = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
    *("deberta-v2", "distilbert", "electra", "ernie", "esm", "fnet", "layoutlm", "mobilebert"),
    *("modernbert", "mpnet", "nystromformer", "rembert", "roberta", "roberta-prelayernorm"),
    *("roformer", "xlm-roberta", "xlm-roberta-xl", "yoso"),
)
REFUSED = ("flaubert", "xlm", "longformer", "squeezebert", "canine", "bart")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("albert", {"num_hidden_groups": 3}),
    ("deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    (
        "deberta-v2",
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    ("modernbert", {"local_attention": 4}),
]


class NotBuiltError(Exception):
    """The usual names of a config do not make a small encoder of this type."""


def tiny(kind: str, **changes: Any) -> Any:
    """Build an encoder with weights that matter."""
    try:
        known = AutoConfig.for_model(kind)
        values = {name: value for name, value in SMALL.items() if hasattr(known, name)}
        config = AutoConfig.for_model(kind, **values | changes)
        with torch.device("meta"):
            size = AutoModel.from_config(config).num_parameters()
        if size > LARGEST:
            raise NotBuiltError
        torch.manual_seed(0)
        encoder = AutoModel.from_config(config).eval()
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            encoder(**inputs(padded=True))
    except Exception as error:  # each config and each model has its own ways to say no
        raise NotBuiltError(kind) from error
    return encoder


def inputs(padded: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 9), generator=generator)
    if not padded:
        return {"input_ids": ids[:1]}
    mask = (torch.arange(9) < torch.tensor([9, 6, 3])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def shallower(encoder: Any, num_layers: int) -> Any:
    """Build the same encoder with its first layers alone."""
    config = copy.deepcopy(encoder.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    if getattr(config, "num_hidden_groups", 1) > 1:  # as many groups as layers
        config.num_hidden_groups = num_layers
    other = AutoModel.from_config(config).eval()
    own = encoder.state_dict()
    fitting = {n: own[n] for n, value in other.state_dict().items() if own[n].shape == value.shape}
    missing = other.load_state_dict(fitting, strict=False).missing_keys
    assert all("contact_head" in name for name in missing)  # ESM's is as wide as it is deep
    return other


@torch.no_grad()
def check(encoder: Any) -> None:
    """Compare every pass with a model of as many layers, and with what an exit there answers."""
    model = PonderEncoderForSequenceClassification.from_encoder(
        copy.deepcopy(encoder), num_labels=3
    ).eval()
    scaled = encoder.config.model_type == "esmc"
    for given in (inputs(padded=False), inputs(padded=True)):
        kept = given.get("attention_mask", torch.ones(1, 9)).bool()
        calls = model.stack.begin(**model.prepare(**given))
        hidden = calls[0].hidden
        for passes in range(1, model.num_passes + 1):
            hidden = model.stack.run(passes - 1, hidden, calls)
            expected = shallower(encoder, passes)(**given)[0]
            # DPR returns what it pools first; ESM C scales its layers by their number.
            if expected.ndim == 3 and (passes == SMALL["num_hidden_layers"] or not scaled):
                found = model.adapter.final_norm(hidden)
                torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
                by_hand = model.classifiers[passes - 1](expected[:, 0])
                exits = model(**given, policy=FixedExit(passes)).logits
                torch.testing.assert_close(exits, by_hand, rtol=1e-4, atol=1e-5)


def verdict(kind: str) -> str:
    try:
        check(tiny(kind))
    except NotBuiltError:
        return "not built"
    except UserError as error:
        assert str(error).endswith(".")
        return "refused"
    return "right"


def test_every_encoder_is_right_at_every_pass_or_refused() -> None:
    found = {kind: verdict(kind) for kind in KINDS}
    assert {kind: found.get(kind) for kind in RIGHT} == dict.fromkeys(RIGHT, "right")
    assert {kind: found.get(kind) for kind in REFUSED} == dict.fromkeys(REFUSED, "refused")


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_variants_of_an_architecture(kind: str, changes: dict[str, Any]) -> None:
    check(tiny(kind, **changes))


def test_work_between_the_layers_is_refused() -> None:
    """The larger DeBERTa-v2 convolve what the first layer returns; single steps would not."""
    with pytest.raises(UserError, match="layer 2 does not read what layer 1 returned"):
        check(tiny("deberta-v2", conv_kernel_size=3))


# -- an encoder of our own


def par_encoder(pattern: str = "ad-a", **changes: Any) -> ParModel:
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24, "objective": "masked"}
    torch.manual_seed(0)
    encoder = ParModel(ParConfig(60, pattern=pattern, **(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def par_classifier(**options: Any) -> PonderEncoderForSequenceClassification:
    encoder, options = par_encoder(), {"num_labels": 3, **options}
    return PonderEncoderForSequenceClassification.from_encoder(encoder, **options).eval()


@torch.no_grad()
def test_every_block_of_a_par_encoder_is_a_pass() -> None:
    model, encoder = par_classifier(), par_encoder()
    for given in (inputs(padded=False), inputs(padded=True)):
        for passes in range(1, 5):
            shallow = encoder.with_pattern(encoder.pattern[:passes])
            expected = model.classifiers[passes - 1](shallow(**given)[0][:, 0])
            found = model(**given, policy=FixedExit(passes)).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 3, 4])
@pytest.mark.parametrize("padded", [True, False])
def test_trace_of_a_par_encoder_equals_torchs_counter(passes: int, padded: bool) -> None:
    """Attention, dense and identity cost what they do, and positions are projected once."""
    model, given = par_classifier(), inputs(padded)
    model(**given)  # the first call also learns what layers return
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        trace = model(**given, policy=FixedExit(passes)).trace
    assert trace.total_flops == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_a_par_model_without_a_way_to_see_the_text_is_refused() -> None:
    with pytest.raises(UserError, match="lets its first token see nothing of the text"):
        check(par_encoder("dd"))
    with pytest.raises(UserError, match="'par' has a decoder, which reads from left to right"):
        check(par_encoder(objective="causal"))


def test_a_par_encoder_is_fine_tuned_and_loads_where_nothing_of_it_is_known(
    tmp_path: Path, text_file: Path, shared_cache: Path, reviews: Path
) -> None:
    common = f"--d_model 16 --num_heads 2 --d_ff 32 --cache {shared_cache} --data {text_file}"
    words = f"par train {common} --objective masked --pattern aad --vocab_size 400 --length 16"
    assert main([*words.split(), "--batch_size=4", "--steps=2", f"--out={tmp_path}/encoder"]) == 0
    words = f"ponder train --encoder {tmp_path}/encoder --data {reviews} --batch_size 16 --lr 0.01"
    words += f" --pooling mean --dropout 0.25 --out {tmp_path}/run --epochs 4 --objective"
    for objective in ("ponder", "last"):
        assert main([*words.split(), objective, "--overwrite"]) == 0
        model, _ = load_classifier(str(tmp_path / "run"))
        trunk = model.encoder_model
        assert type(trunk) is ParModel and model.has_halting == (objective == "ponder")
        records, _ = read_records(tmp_path / "run" / "metrics.jsonl")
        accuracy = [r.values["accuracy"] for r in records if r.kind == "valid"][-1]
        assert accuracy > 0.8
    alone = [sys.executable, "-m", "deepenough", "ponder", "eval", str(tmp_path / "run")]
    found = subprocess.run(alone, capture_output=True, text=True)
    assert found.returncode == 0 and "accuracy" in found.stdout, found.stderr


def test_dropout_of_a_par_encoder_can_be_set(tmp_path: Path, tokenizer: Any) -> None:
    par_encoder().save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    settings = BaseEncoderConfig(encoder=str(tmp_path / "encoder"), dropout=0.25)
    model, _ = make_classifier(settings, PonderConfig(), ["bad", "good"])
    parts = [part for part in model.encoder_model.modules() if isinstance(part, torch.nn.Dropout)]
    assert len(parts) == 5 and {part.p for part in parts} == {0.25}


def test_an_encoder_that_reads_one_way_is_refused() -> None:
    """CLIP's text model is in no list of decoders, and its first token never sees the text."""
    with pytest.raises(UserError, match="lets its first token see nothing of the text"):
        check(tiny("clip_text_model"))


def test_the_check_leaves_modes_and_random_numbers_as_they_were() -> None:
    model = PonderEncoderForSequenceClassification.from_encoder(tiny("bert"), num_labels=3)
    model.train().trunk.embeddings.eval()
    torch.manual_seed(0)
    model.stack  # noqa: B018 - checks the layers
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert model.trunk.encoder.training and not model.trunk.embeddings.training
