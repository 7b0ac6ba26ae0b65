"""Training: the loss, its kinds of task, the baselines, and labels that cannot be."""

import pytest
import torch
import torch.nn.functional as F

from deepenough import UserError
from deepenough.ponder.distribution import kl, log_geometric
from deepenough.ponder.heads import HaltingHead
from deepenough.ponder.loss import ponder_loss_ref

OBJECTIVES = [
    {"objective": "ponder"},
    {"objective": "ponder", "halting_head": "second_cls"},
    {"objective": "ponder", "halting_head": "answer"},
    {"objective": "weighted", "exit": "patience"},
    {"objective": "last", "exit": "fixed"},
]


def test_loss_is_the_papers(make_model, batch):
    model = make_model(halting_target=0.3, kl_weight=0.7, classifier_dropout=0.0)
    labels = torch.arange(9) % 3
    output = model(**batch, labels=labels, all_passes=True)
    expected = ponder_loss_ref(output.step_logits, output.halt_probabilities, labels, 0.3, 0.7)
    assert output.loss.item() == pytest.approx(expected[0], rel=1e-4)
    assert output.terms["task"].item() == pytest.approx(expected[1], rel=1e-4)
    assert output.terms["kl"].item() == pytest.approx(expected[2], rel=1e-4)
    divergence = kl(output.halting.log(), log_geometric(0.3, 4)).mean()
    assert output.terms["kl"].item() == pytest.approx(divergence.item(), rel=1e-4)


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("kind", ["bert", "ponder_albert"])
def test_every_weight_is_trained(make_model, make_albert, batch, options, kind):
    """None is left out: distributed training stops at weights without a gradient."""
    make = make_albert if kind == "ponder_albert" else make_model
    model = make(**options).train()
    output = model(**batch, labels=torch.arange(9) % 3)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert output.step_logits.shape == (4, 9, 3)
    assert output.logits.shape == (9, 3)
    assert output.trace is None


def test_baselines_weigh_passes(make_model, batch):
    labels = torch.arange(9) % 3
    for objective, weights in (("last", [0, 0, 0, 1]), ("weighted", [0.1, 0.2, 0.3, 0.4])):
        model = make_model(objective=objective, exit="fixed")
        output = model(**batch, labels=labels, all_passes=True)
        each = [F.cross_entropy(step, labels).item() for step in output.step_logits]
        expected = sum(w * value for w, value in zip(weights, each, strict=True))
        assert output.loss.item() == pytest.approx(expected, rel=1e-5)
        assert output.halting is None


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem"),
    [
        (1, [0.5, 1.0, -2.0] * 3, "regression"),
        (3, [0, 1, 2] * 3, "single_label_classification"),
        (3, [[1.0, 0.0, 1.0]] * 9, "multi_label_classification"),
    ],
)
def test_problem_types(make_model, batch, num_labels, labels, problem):
    model = make_model(num_labels=num_labels)
    for given in (labels, torch.tensor(labels)):
        output = model.train()(**batch, labels=given)
        assert model.config.problem_type == problem
        output.loss.backward()
        assert model.eval()(**batch, labels=given).loss.isfinite()


def test_learns(make_albert, make_batch):
    """The first word says the label, another how sure to be: enough to see that all parts move."""
    torch.manual_seed(0)
    model = make_albert(num_passes=3, num_labels=2, kl_weight=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = make_batch(rows=32, length=5)
    labels = (batch["input_ids"][:, 1] > 30).long()
    losses = []
    for _ in range(25):
        output = model.train()(**batch, labels=labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.terms["task"].item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_checkpointing_changes_nothing(make_model, batch):
    labels = torch.arange(9) % 3
    gradients = []
    for enabled in (False, True):
        model = make_model(
            classifier_dropout=0.0,
            encoder={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ).train()
        if enabled:
            model.gradient_checkpointing_enable()
        model(**batch, labels=labels).loss.backward()
        gradients.append(model.trunk.embeddings.word_embeddings.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 0, 5, 1, 2, 0, 1], "label of example 4 is 5"),
        ([0, 1, -1, 0, 0, 1, 2, 0, 1], "label of example 2 is -1"),
        ([0, 1], "9 examples need as many labels"),
    ],
)
def test_labels_that_cannot_be_are_named(make_model, batch, labels, message):
    with pytest.raises(UserError, match=message):
        make_model()(**batch, labels=labels)


def test_fractions_are_no_labels(make_model, batch):
    model = make_model(problem_type="single_label_classification")
    with pytest.raises(UserError, match="whole numbers"):
        model(**batch, labels=[0.5] * 9)
    several = make_model(problem_type="multi_label_classification")
    with pytest.raises(UserError, match=r"shape \[9, 3\]"):
        several(**batch, labels=[1.0] * 9)


def test_a_lead_of_the_best_answer_can_hasten_the_halt():
    head = HaltingHead("answer", width=4)
    with torch.no_grad():
        head.lead.fill_(0.2)
        head.bias.fill_(-1.0)
        head.out.weight.zero_()
    now, before = torch.randn(2, 2, 4)
    logits = torch.tensor([[0.5, 3.0, 1.0], [0.2, 0.1, -1.0]], requires_grad=True)
    halt = head(now, before, logits)
    assert halt.tolist() == pytest.approx([-1.0 + 2.0 * 2.0, -1.0 + 2.0 * 0.1])
    halt.sum().backward()
    assert logits.grad is None


def test_one_label_has_no_lead(make_model):
    with pytest.raises(UserError, match="choose previous"):
        make_model(halting_head="answer", num_labels=1)


def test_early_answers_can_be_kept_from_the_encoder(make_model, batch):
    labels = torch.arange(9) % 3

    model = make_model(objective="weighted", exit="fixed").train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0

    def gradients(objective: str, share: float) -> dict[str, torch.Tensor]:
        model.config.objective, model.config.early_gradient = objective, share
        model.zero_grad()
        model(**batch, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.encoder_model.named_parameters()}

    whole, none = gradients("weighted", 1.0), gradients("weighted", 0.0)
    half, last = gradients("weighted", 0.5), gradients("last", 1.0)
    for name in last:
        # The last of four answers has four tenths of the weight.
        torch.testing.assert_close(none[name], 0.4 * last[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(half[name], (whole[name] + none[name]) / 2, rtol=1e-4, atol=1e-6)
