"""The halting distribution, the loss and the policies: by hand and against plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough import UserError
from deepenough.ponder.config import PonderConfig
from deepenough.ponder.halting import (
    ConfidenceExit,
    FixedExit,
    PatienceExit,
    QuantileExit,
    SampledExit,
    answer_loss,
    fixed_loss,
    kl,
    log_geometric,
    log_halting,
    log_survival,
    make_policy,
    ponder_loss,
)
from deepenough.ponder.inference import replay
from tests.ponder.references import geometric_ref, halting_ref, kl_ref, ponder_loss_ref

LOGITS = st.lists(st.floats(-12, 12), min_size=1, max_size=14)
EXTREME = st.lists(st.floats(-300, 300), min_size=1, max_size=14)
TARGETS = st.floats(0.01, 0.99)


def lambdas(logits: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-z)) for z in logits]


def p_of(logits: list[float]) -> torch.Tensor:
    """`log p` of passes one more than there are logits: the last halts with certainty."""
    return log_halting(torch.tensor(logits, dtype=torch.float64), len(logits) + 1)


def test_distribution_by_hand():
    halves = torch.zeros(3)  # lambda 1/2 each
    assert log_halting(halves, 4).exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert log_survival(halves).exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8])


def test_last_pass_takes_the_remainder_of_the_prior():
    prior = log_geometric(0.2, 12).exp()
    assert prior[-1].item() == pytest.approx(0.8**11)  # 0.086, and not 0.018 of a rescaled one
    assert prior[2].item() == pytest.approx(0.2 * 0.8**2)


def test_one_pass_is_certain():
    assert log_halting(torch.empty(2, 0), 1).exp().tolist() == [[1.0], [1.0]]
    assert log_geometric(0.3, 1).tolist() == [0.0]


@settings(max_examples=40)
@given(LOGITS)
def test_mass_is_one_and_equals_the_loop(logits):
    p = p_of(logits).exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert p.tolist() == pytest.approx(halting_ref([*lambdas(logits), 0.3]), rel=1e-9, abs=1e-15)


@settings(max_examples=40)
@given(EXTREME)
def test_extreme_logits_stay_finite(logits):
    halt = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    log_p = log_halting(halt, len(logits) + 1)
    divergence = kl(log_p, log_geometric(0.2, len(logits) + 1))
    divergence.backward()
    assert log_p.isfinite().all() and divergence.isfinite() and halt.grad.isfinite().all()
    assert log_p.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=40)
@given(LOGITS, TARGETS)
def test_kl_is_that_of_the_model_from_the_prior(logits, target):
    num_passes = len(logits) + 1
    log_p = p_of(logits)
    prior = log_geometric(target, num_passes, like=log_p)
    value = kl(log_p, prior).item()
    expected = kl_ref(log_p.exp().tolist(), geometric_ref(target, num_passes))
    assert value >= -1e-12
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_kl_has_the_stated_direction():
    p, q = [0.7, 0.2, 0.1], [0.2, 0.2, 0.6]
    value = kl(torch.tensor(p).log(), torch.tensor(q).log()).item()
    assert value == pytest.approx(0.7 * math.log(3.5) + 0.1 * math.log(1 / 6))
    assert value != pytest.approx(kl_ref(q, p), rel=0.1)


@settings(max_examples=40)
@given(TARGETS, st.integers(1, 20))
def test_kl_is_zero_where_the_model_halts_as_the_prior(target, num_passes):
    logit = math.log(target) - math.log1p(-target)
    log_p = log_halting(torch.full((num_passes - 1,), logit, dtype=torch.float64), num_passes)
    assert kl(log_p, log_geometric(target, num_passes, like=log_p)).item() == pytest.approx(
        0, abs=1e-12
    )


@settings(max_examples=40)
@given(TARGETS, st.integers(1, 30))
def test_prior_equals_the_loop(target, num_passes):
    prior = log_geometric(target, num_passes, like=torch.empty(0, dtype=torch.float64)).exp()
    assert prior.tolist() == pytest.approx(geometric_ref(target, num_passes), rel=1e-9)
    assert prior.sum().item() == pytest.approx(1.0)


@settings(max_examples=10)
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=6), TARGETS)
def test_gradients_of_the_distribution_equal_finite_differences(logits, target):
    def value(z: torch.Tensor) -> torch.Tensor:
        log_p = log_halting(z, z.shape[-1] + 1)
        prior = log_geometric(target, z.shape[-1] + 1, like=z)
        return kl(log_p, prior) + log_p.sum()

    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, z)


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_impossible_targets_are_refused(target):
    with pytest.raises(UserError, match="halting target must be above 0 and below 1"):
        log_geometric(target, 4)


def test_missing_logits_are_noticed():
    with pytest.raises(ValueError, match="5 passes need 4"):
        log_halting(torch.zeros(2, 3), 5)


def a_case(seed: int, passes: int = 5, examples: int = 4, labels: int = 3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(passes, examples, labels, generator=generator, dtype=torch.float64)
    halt = torch.randn(examples, passes - 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, labels, (examples,), generator=generator)
    return logits, halt, targets


def test_loss_by_hand():
    # Two passes, one example: p = (1/4, 3/4); the answers give the right label 1/2 and 4/5.
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, math.log(4)]]])
    log_p = torch.tensor([[0.25, 0.75]]).log()
    loss = ponder_loss(logits, log_p, torch.tensor([1]), 0.5, kl_weight=2.0)
    task = 0.25 * math.log(2) + 0.75 * math.log(5 / 4)
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # from (1/2, 1/2)
    assert loss.task.item() == pytest.approx(task)
    assert loss.kl.item() == pytest.approx(divergence)
    assert loss.total.item() == pytest.approx(task + 2 * divergence)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.floats(0, 3))
def test_loss_equals_the_loop(seed, target, beta):
    logits, halt, targets = a_case(seed)
    loss = ponder_loss(logits, log_halting(halt, 5), targets, target, beta)
    lambdas = F.pad(halt.sigmoid(), (0, 1))
    expected = ponder_loss_ref(logits, lambdas, targets, target, beta)
    assert [term.item() for term in loss] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_gradients_of_the_loss_equal_finite_differences():
    logits, halt, targets = a_case(1, passes=4, examples=2)

    def value(step_logits: torch.Tensor, halt_logits: torch.Tensor) -> torch.Tensor:
        log_p = log_halting(halt_logits, 4)
        return ponder_loss(step_logits, log_p, targets, 0.3, 0.7).total

    assert torch.autograd.gradcheck(value, (logits.requires_grad_(), halt.requires_grad_()))


def test_depth_does_not_scale_the_task():
    """With the same answer at every pass, the expected loss is that of the answer."""
    logits, halt, targets = a_case(2)
    same = logits[:1].expand(5, -1, -1)
    loss = ponder_loss(same, log_halting(halt, 5), targets, 0.3, 0.0)
    assert loss.total.item() == pytest.approx(F.cross_entropy(logits[0], targets).item())


def test_the_loss_of_answers_equals_torchs():
    logits, _, targets = a_case(3)
    expected = F.cross_entropy(logits[0], targets)
    assert answer_loss(logits[0], targets).item() == pytest.approx(expected.item())


def test_fixed_weights_are_a_weighted_mean():
    logits, _, targets = a_case(5)
    weights = torch.tensor([1.0, 2, 3, 4, 5]) / 15
    each = torch.stack([F.cross_entropy(step, targets) for step in logits])
    loss = fixed_loss(logits, weights, targets)
    assert loss.total.item() == pytest.approx((each * weights).sum().item())
    assert loss.kl.item() == 0


def test_passes_before_the_last_can_learn_from_it():
    logits, _, targets = a_case(6)
    logits.requires_grad_()
    weights = torch.full((5,), 0.2)
    last = logits[-1].detach().softmax(-1)
    losses = [
        0.7 * F.cross_entropy(step, targets) + 0.3 * F.cross_entropy(step, last)
        for step in logits[:-1]
    ]
    expected = 0.2 * (sum(losses) + F.cross_entropy(logits[-1], targets))
    loss = fixed_loss(logits, weights, targets, distill=0.3).total
    assert loss.item() == pytest.approx(expected.item())
    found, wanted = (torch.autograd.grad(each, logits)[0] for each in (loss, expected))
    torch.testing.assert_close(found, wanted)  # the last pass does not learn from the others


def logit(*lambdas: float) -> torch.Tensor:
    return torch.tensor([lambdas]).logit()


def answers(*labels: int, num_labels: int = 3) -> torch.Tensor:
    """The logits of one example that gives these answers pass by pass."""
    return torch.eye(num_labels)[list(labels)][:, None]


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.1, 1), (0.3, 2), (0.5, 3), (0.9, 4), (0.95, 5), (1.0, 5)]
)
def test_quantile_stops_at_the_first_pass_that_reaches_it(threshold, expected):
    halts = logit(0.2, 0.2, 0.5, 0.8)  # sums of p: 0.2, 0.36, 0.68, 0.936, 1
    assert replay(QuantileExit(threshold), answers(0, 0, 0, 0, 0), halts) == expected


def test_quantile_of_one_never_stops_early():
    certain = torch.full((1, 4), 80.0)
    assert replay(QuantileExit(1.0), answers(0, 0, 0, 0, 0), certain) == 5


def test_sampled_passes_follow_the_halting_distribution():
    examples, halts = 5_000, logit(0.2, 0.5, 0.1)
    expected = log_halting(halts, 4).exp()[0]
    logits = answers(0, 0, 0, 0).expand(4, examples, 3)
    for policy in (SampledExit(seed=3), SampledExit()):
        torch.manual_seed(0)
        passes = replay(policy, logits, halts.expand(examples, -1))
        shares = torch.bincount(passes, minlength=5)[1:] / examples
        assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.025)


def test_seeded_draws_belong_to_the_example():
    ids = torch.arange(10)
    all_at_once = SampledExit(7).start(ids)
    assert torch.equal(SampledExit(7).start(ids[[8, 3]]), all_at_once[[8, 3]])
    assert not torch.equal(SampledExit(8).start(ids), all_at_once)
    assert len(set(all_at_once.flatten().tolist())) == 10


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, 1), (0.7, 2), (0.9, 3), (0.99, 4)])
def test_confidence_stops_once_the_answer_is_probable(threshold, expected):
    sure = torch.tensor([0.6, 0.8, 0.95, 0.96])
    logits = torch.stack([sure.logit(), torch.zeros(4)], -1)[:, None]
    assert replay(ConfidenceExit(threshold), logits, None) == expected


@pytest.mark.parametrize(
    ("patience", "expected"), [(1, 3), (2, 6), (3, 7)]
)  # repeated once at pass 3, twice in a row at pass 6
def test_patience_waits_for_agreement_in_a_row(patience, expected):
    given = answers(0, 1, 1, 2, 2, 2, 0)
    assert replay(PatienceExit(patience), given, None) == expected


def test_fixed_stops_where_it_says():
    given = answers(0, 0, 0, 0)
    assert replay(FixedExit(2), given, None) == 2
    assert replay(FixedExit(), given, None) == 4
    assert replay(FixedExit(9), given, None) == 4


def test_settings_name_policies():
    assert make_policy(PonderConfig(exit_threshold=0.7)).threshold == 0.7
    assert make_policy(PonderConfig(exit="sampled", exit_seed=4)).seed == 4
    assert make_policy(PonderConfig(exit="patience", exit_patience=3)).patience == 3
    assert make_policy(PonderConfig(exit="fixed", exit_pass=1)).num_passes == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantileExit(0.0), "above 0 and at most 1"),
        (lambda: QuantileExit(1.1), "above 0 and at most 1"),
        (lambda: QuantileExit(float("nan")), "above 0 and at most 1"),
        (lambda: PatienceExit(0), "at least 1"),
        (lambda: FixedExit(0), "at least 1"),
    ],
)
def test_impossible_exits_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
