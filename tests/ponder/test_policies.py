"""Exit policies one by one, on answers and probabilities made for them."""

import pytest
import torch

from deepenough import UserError
from deepenough.ponder.distribution import log_halting
from deepenough.ponder.inference import replay
from deepenough.ponder.loss import MULTI_LABEL
from deepenough.ponder.policies import (
    ConfidenceExit,
    FixedExit,
    PatienceExit,
    QuantileExit,
    SampledExit,
    make_policy,
)
from deepenough.ponder.settings import PonderSettings


def logit(*lambdas: float) -> torch.Tensor:
    return torch.tensor([lambdas]).logit()


def answers(*labels: int, num_labels: int = 3) -> torch.Tensor:
    """The logits of one example that gives these answers pass by pass."""
    return torch.eye(num_labels)[list(labels)][:, None]


ONE = torch.arange(1)


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.1, 1), (0.3, 2), (0.5, 3), (0.9, 4), (0.95, 5), (1.0, 5)]
)
def test_quantile_stops_at_the_first_pass_that_reaches_it(threshold, expected):
    halts = logit(0.2, 0.2, 0.5, 0.8)  # sums of p: 0.2, 0.36, 0.68, 0.936, 1
    assert replay(QuantileExit(threshold), answers(0, 0, 0, 0, 0), halts, ONE) == expected


def test_quantile_of_one_never_stops_early():
    certain = torch.full((1, 4), 80.0)
    assert replay(QuantileExit(1.0), answers(0, 0, 0, 0, 0), certain, ONE) == 5


def test_sampled_passes_follow_the_halting_distribution():
    examples, halts = 5_000, logit(0.2, 0.5, 0.1)
    expected = log_halting(halts, 4).exp()[0]
    logits = answers(0, 0, 0, 0).expand(4, examples, 3)
    for policy in (SampledExit(seed=3), SampledExit()):
        torch.manual_seed(0)
        passes = replay(policy, logits, halts.expand(examples, -1), torch.arange(examples))
        shares = torch.bincount(passes, minlength=5)[1:] / examples
        assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.025)


def test_seeded_draws_belong_to_the_example():
    ids = torch.arange(10)
    all_at_once = SampledExit(7).start(ids, 2)
    assert torch.equal(SampledExit(7).start(ids[[8, 3]], 2), all_at_once[[8, 3]])
    assert not torch.equal(SampledExit(8).start(ids, 2), all_at_once)
    assert len(set(all_at_once.flatten().tolist())) == 10


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, 1), (0.7, 2), (0.9, 3), (0.99, 4)])
def test_confidence_stops_once_the_answer_is_probable(threshold, expected):
    sure = torch.tensor([0.6, 0.8, 0.95, 0.96])
    logits = torch.stack([sure.logit(), torch.zeros(4)], -1)[:, None]
    assert replay(ConfidenceExit(threshold), logits, None, ONE) == expected


def test_confidence_of_several_labels_is_that_of_the_least_certain():
    policy = ConfidenceExit(0.9, MULTI_LABEL)
    logits = torch.tensor([[[4.0, -0.1]], [[4.0, -3.0]], [[4.0, -5.0]]])
    assert replay(policy, logits, None, ONE) == 2


def test_confidence_of_a_number_is_refused():
    with pytest.raises(UserError, match="use patience"):
        ConfidenceExit(0.9, "regression")


@pytest.mark.parametrize(
    ("patience", "expected"), [(1, 3), (2, 6), (3, 7)]
)  # repeated once at pass 3, twice in a row at pass 6
def test_patience_waits_for_agreement_in_a_row(patience, expected):
    given = answers(0, 1, 1, 2, 2, 2, 0)
    assert replay(PatienceExit(patience), given, None, ONE) == expected


def test_patience_of_numbers_and_of_several_labels():
    numbers = torch.tensor([1.0, 3.0, 3.2, 9.0])[:, None, None]
    assert replay(PatienceExit(1), numbers, None, ONE) == 3
    assert replay(PatienceExit(1, tolerance=0.1), numbers, None, ONE) == 4
    several = torch.tensor([[2.0, -1.0], [1.0, 3.0], [2.0, 0.5], [1.0, 1.0]])[:, None]
    assert replay(PatienceExit(1, MULTI_LABEL), several, None, ONE) == 3
    assert replay(PatienceExit(1), several, None, ONE) == 4  # the likeliest label alone changes


def test_fixed_stops_where_it_says():
    given = answers(0, 0, 0, 0)
    assert replay(FixedExit(2), given, None, ONE) == 2
    assert replay(FixedExit(), given, None, ONE) == 4
    assert replay(FixedExit(9), given, None, ONE) == 4


def test_settings_name_policies():
    assert make_policy(PonderSettings(exit_threshold=0.7)).threshold == 0.7
    assert make_policy(PonderSettings(exit="sampled", exit_seed=4)).seed == 4
    assert make_policy(PonderSettings(exit="patience", exit_patience=3)).patience == 3
    assert make_policy(PonderSettings(exit="fixed", exit_pass=1)).num_passes == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantileExit(0.0), "above 0 and at most 1"),
        (lambda: QuantileExit(1.1), "above 0 and at most 1"),
        (lambda: QuantileExit(float("nan")), "above 0 and at most 1"),
        (lambda: PatienceExit(0), "at least 1"),
        (lambda: PatienceExit(1, tolerance=0.0), "must be positive"),
        (lambda: FixedExit(0), "at least 1"),
    ],
)
def test_impossible_exits_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
