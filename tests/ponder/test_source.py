"""The lines of PonderALBERT's description, and what its code computes beside ours."""

import doctest
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import AlbertConfig, AlbertModel, AlbertTokenizer

from deepenough.errors import UserError
from deepenough.ponder.halting import FixedExit, PonderClassificationLoss, SampledExit
from deepenough.ponder.modeling import (
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)

ROOT = Path(__file__).parent.parent.parent
NAME = "albert-base-v2"
PIECES = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁", *"thecasonmywltxÉ."]
TEXTS = ["the cat sat on the mat", "my cool new text", "a cat"]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny ALBERT with its tokenizer, in a folder that its name on the hub means here."""
    monkeypatch.chdir(tmp_path)
    made = Tokenizer(Unigram([(piece, -float(n)) for n, piece in enumerate(PIECES)], unk_id=1))
    made.pre_tokenizer = Metaspace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = AlbertTokenizer(tokenizer_object=made, model_max_length=30)
    tokenizer.save_pretrained(NAME)
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=len(PIECES),
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=30,
        initializer_range=0.3,
    )
    AlbertModel(config).save_pretrained(NAME)
    return tmp_path / NAME


def test_the_lines_of_the_description_run_as_they_stand(checkpoint: Path) -> None:
    page = (ROOT / "docs" / "ponder.md").read_text("utf-8")
    lines = page.partition("```pycon\n")[2].partition("```")[0]
    test = doctest.DocTestParser().get_doctest(lines, {}, "ponder.md", None, 0)
    assert len(test.examples) > 15
    report: list[str] = []
    runner = doctest.DocTestRunner()
    result = runner.run(test, out=report.append)
    assert result.failed == 0, "".join(report)


def test_passes_asked_for_are_made(checkpoint: Path) -> None:
    load = PonderAlbertForSequenceClassification.from_pretrained
    model = load(NAME, num_hidden_layers=7, target_halt_probability=0.3)
    assert model.num_passes == 7 and model.config.halting_target == 0.3
    assert model.config.target_halt_probability == 0.3
    output = model(TEXTS, policy=FixedExit())
    assert output.passes.tolist() == [7, 7, 7] and output.halting.shape == (3, 7)
    model.save_pretrained("again")
    assert load("again").num_passes == 7
    assert load("again", num_hidden_layers=9).num_passes == 9
    assert load("again", num_hidden_layers=9, num_passes=2).num_passes == 2


@pytest.mark.parametrize("training", [True, False])
def test_texts_are_what_the_tokenizer_makes_of_them(checkpoint: Path, training: bool) -> None:
    model = PonderAlbertForSequenceClassification.from_pretrained(NAME, exit="fixed")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.train(training)
    tokenizer = AlbertTokenizer.from_pretrained(NAME)
    how = {"return_tensors": "pt", "padding": True, "truncation": True}
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    second = [pair for _, pair in pairs]
    for given, ids in (
        (TEXTS, tokenizer(TEXTS, **how)),
        ((TEXTS, second), tokenizer(TEXTS, second, return_token_type_ids=True, **how)),
        (pairs, tokenizer(TEXTS, second, return_token_type_ids=True, **how)),
        (["cat " * 30], tokenizer(["cat " * 30], **how)),
    ):
        labels = [0, 1, 1][: len(ids["input_ids"])]
        own, expected = model(given, labels=labels), model(**ids, labels=torch.tensor(labels))
        torch.testing.assert_close(own.logits, expected.logits)
        torch.testing.assert_close(own.loss, expected.loss)


def test_what_is_no_list_of_texts_is_refused(checkpoint: Path) -> None:
    model = PonderAlbertForSequenceClassification(AlbertConfig.from_pretrained(NAME))
    for given, reason in (
        ("a cat", "give a list"),
        ([], "give a list"),
        ((["a cat"], ["a", "b"]), "two lists of as many"),
        ([3], "Text 0 is neither a string nor a pair"),
        (["a cat"], "no tokenizer to read texts with: give one"),
    ):
        with pytest.raises(UserError, match=reason):
            model.config._name_or_path = ""
            model(given)
    with pytest.raises(UserError, match="has no option 'target_halt_probabilty'"):
        PonderAlbertForSequenceClassification(model.config, target_halt_probabilty=0.2)
    with pytest.raises(UserError, match="has no option 'colour'"):
        PonderAlbertForSequenceClassification.from_pretrained(NAME, colour="red")
    own = AlbertTokenizer.from_pretrained(NAME)
    encoder = PonderEncoderForSequenceClassification(AlbertConfig.from_pretrained(NAME), own)
    assert encoder.eval()(TEXTS).logits.shape == (3, 2)
    loaded = PonderEncoderForSequenceClassification.from_pretrained(NAME, halting_target=0.4)
    assert loaded(TEXTS).logits.shape == (3, 2)  # with the checkpoint's tokenizer


def source_terms(logits, lambdas, labels, target: float, factor: float) -> dict[str, torch.Tensor]:
    """The source's loss: `p` scaled up to sum to one, the mean over passes, KL(model || prior)."""

    def mass(stop: torch.Tensor) -> torch.Tensor:
        left = F.pad((1 - stop).cumprod(1)[:, :-1], (1, 0), value=1.0)
        return left * stop / (left * stop).sum(1, keepdim=True)

    p, q = mass(lambdas), mass(torch.full_like(lambdas, target))
    each = F.cross_entropy(
        logits.flatten(0, 1), torch.tensor(labels).repeat(len(logits)), reduction="none"
    )
    weighted = (each * p.T.flatten()).mean()
    kl = factor * F.kl_div(q.log(), p, reduction="batchmean")
    return {"kl_loss": kl, "weighted_ce_loss": weighted, "total_loss": weighted + kl}


def test_the_loss_is_the_sources_but_for_its_scalings(checkpoint: Path) -> None:
    """Where the last pass halts for certain nothing is scaled up, and the formulas are the same."""
    model = PonderAlbertForSequenceClassification.from_pretrained(
        NAME, target_halt_probability=0.2, halting_head="second_cls"
    ).train()
    labels = [0, 1, 1]
    prediction = model(TEXTS)
    found = PonderClassificationLoss(kl_penalty_factor=1e-2)(prediction, labels)
    lambdas = prediction["halt_probabilities"]
    assert lambdas.shape == (3, 4) and (lambdas[:, -1] == 1).all()
    expected = source_terms(prediction.step_logits, lambdas, labels, 0.2, 1e-2)
    passes = 4  # over which the source takes a mean
    torch.testing.assert_close(found["weighted_ce_loss"], passes * expected["weighted_ce_loss"])
    p, q = prediction["model_halt_dist"], prediction["target_halt_dist"]
    torch.testing.assert_close(p.probs, prediction.halting)
    assert q.probs[0].tolist() == pytest.approx([0.2, 0.16, 0.128, 0.512])
    divergence = torch.distributions.kl_divergence(p, q).mean()
    torch.testing.assert_close(found["kl_loss"], 1e-2 * divergence)
    torch.testing.assert_close(found["total_loss"], found["weighted_ce_loss"] + found["kl_loss"])
    own = model(TEXTS, labels=labels)
    assert own.loss.item() == pytest.approx((own.terms["task"] + 0.5 * own.terms["kl"]).item())


def test_the_loss_needs_all_passes(checkpoint: Path) -> None:
    model = PonderAlbertForSequenceClassification.from_pretrained(NAME).eval()
    with pytest.raises(UserError, match="call the model in training mode, or with all_passes"):
        PonderClassificationLoss()(model(TEXTS), [0, 1, 1])
    PonderClassificationLoss()(model(TEXTS, all_passes=True), [0, 1, 1])
    with pytest.raises(UserError, match="3 examples need as many labels"):
        PonderClassificationLoss()(model(TEXTS, all_passes=True), [0])


def test_draws_differ_as_in_the_source_and_stop_where_lambda_says(checkpoint: Path) -> None:
    model = PonderAlbertForSequenceClassification.from_pretrained(
        NAME, num_hidden_layers=12, target_halt_probability=0.2, exit="sampled"
    ).eval()
    torch.manual_seed(0)
    found = {model(["my cool new text"])["passes"].item() for _ in range(40)}
    assert len(found) > 3
    whole, part = model(TEXTS, all_passes=True), model(TEXTS, policy=SampledExit(seed=3))
    for row, passes in enumerate(part.passes.tolist()):
        own, expected = part["halt_probabilities"][row], whole["halt_probabilities"][row]
        torch.testing.assert_close(own[:passes], expected[:passes])
        assert not own[passes:].any()
