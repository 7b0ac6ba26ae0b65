"""The likeliest pattern against all 3^N of them; what blocks cost; the search as a task."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from deepenough import ParConfig, ParForCausalLM, UserError
from deepenough.config import resolve
from deepenough.data.tokens import ContextBatches, prepare
from deepenough.par import search, training
from deepenough.par.config import BRANCHES, ParSearchConfig, interleaved
from deepenough.par.search import (
    CHOICES,
    BlockCosts,
    SearchTask,
    count_block_costs,
    derive,
    entropy,
    measure_block_costs,
    sample_segment,
)
from deepenough.runs import Record, RunFolder, read_records
from deepenough.training.distributed import make_accelerator
from deepenough.training.task import WEIGHTS
from deepenough.training.trainer import Trainer

COSTS = BlockCosts(attention=4.0, dense=2.0, identity=0.0, rest=1.0)


@st.composite
def searches(draw: st.DrawFn) -> list[list[float]]:
    """Probabilities of one to five blocks; rounded, so that ties are common."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        raw = draw(st.lists(st.integers(0, 8), min_size=3, max_size=3).filter(any))
        rows.append([value / sum(raw) for value in raw])
    return rows


cost_values = st.one_of(st.just(0.0), st.floats(0.01, 10.0))
cost_tables = st.builds(
    BlockCosts, cost_values, cost_values, st.floats(0.0, 1.0), rest=st.floats(0.01, 20.0)
)


def log_likelihood(rows: list[list[float]], pattern: str) -> float:
    chosen = [row[BRANCHES.index(kind)] for row, kind in zip(rows, pattern, strict=True)]
    return sum(math.log(max(p, 1e-300)) for p in chosen)


def test_without_a_budget_every_block_takes_its_likeliest_branch():
    rows = [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]]
    assert derive(rows) == "ad-a"
    assert derive(rows, COSTS) == "ad-a"


@given(searches())
def test_without_a_budget_it_is_the_argmax(rows):
    assume(any(max(row[:2]) >= row[2] for row in rows))  # else only identities
    best = "".join(BRANCHES[row.index(max(row))] for row in rows)
    assert log_likelihood(rows, derive(rows)) == pytest.approx(log_likelihood(rows, best))


def test_identities_alone_are_no_pattern():
    rows = [[0.1, 0.2, 0.7], [0.2, 0.1, 0.7]]
    # The smallest loss against `--` is one block of the second choice.
    assert derive(rows) in ("d-", "-a")
    assert derive([[0.3, 0.0, 0.7]]) == "a"


def test_budget_takes_the_least_likely_attention_away():
    rows = [[0.9, 0.05, 0.05], [0.6, 0.4, 0.0], [0.8, 0.2, 0.0], [0.1, 0.8, 0.1]]
    assert derive(rows) == "aaad"
    # Of 13 for `adad`: aaad costs 15, aadd 13, addd 11.
    assert derive(rows, COSTS, 1.1) == "adad"
    assert derive(rows, COSTS, 1.0) == "adad"
    assert derive(rows, COSTS, 0.9) == "addd"


def derive_ref(
    probabilities: list[list[float]], costs: BlockCosts, budget: float
) -> tuple[str, float] | None:
    """Return what `derive` does and its log-likelihood, by trying all patterns."""
    found: tuple[str, float] | None = None
    for kinds in itertools.product(range(len(BRANCHES)), repeat=len(probabilities)):
        pattern = "".join(BRANCHES[kind] for kind in kinds)
        score = sum(
            math.log(max(row[kind], 1e-300)) for row, kind in zip(probabilities, kinds, strict=True)
        )
        fits = bool(set(pattern) - {"-"}) and costs.relative(pattern) <= budget
        if fits and (found is None or score > found[1]):
            found = pattern, score
    return found


@given(searches(), cost_tables, st.floats(0.05, 1.6))
def test_budget_is_kept_and_no_pattern_within_it_is_likelier(rows, costs, budget):
    expected = derive_ref(rows, costs, budget)
    if expected is None:
        with pytest.raises(UserError, match="No pattern"):
            derive(rows, costs, budget)
        return
    pattern = derive(rows, costs, budget)
    assert costs.relative(pattern) <= budget
    assert len(pattern) == len(rows)
    assert set(pattern) != {"-"}
    assert log_likelihood(rows, pattern) == pytest.approx(expected[1])


@given(cost_tables, st.integers(2, 8))
def test_budget_of_one_admits_every_order_of_the_baselines_blocks(costs, num_blocks):
    """Sums in another order may differ in the last bit, which must not cost a pattern its place."""
    pattern = "".join(sorted(interleaved(num_blocks)))
    rows = [[float(kind == letter) for kind in BRANCHES] for letter in pattern]
    assert costs.relative(pattern) == 1.0
    assert derive(rows, costs, 1.0) == pattern


def test_impossible_budget_names_the_cheapest_pattern_and_a_budget_that_works():
    rows = [[0.9, 0.05, 0.05]] * 3
    with pytest.raises(UserError) as caught:
        derive(rows, COSTS, 0.2)
    message = str(caught.value)
    assert message.startswith("No pattern of 3 blocks costs at most 0.2 of the interleaved")
    # (1 + 2) / (1 + 4 + 2 + 4), rounded up.
    assert message.endswith("needs a budget of 0.273.")
    assert derive(rows, COSTS, 0.273).count("d") == 1


def test_budget_without_costs_is_refused():
    with pytest.raises(UserError, match="needs the costs"):
        derive([[0.3, 0.3, 0.4]], budget=0.5)


@pytest.mark.parametrize(
    ("rows", "fixed", "said"),
    [
        ([], None, "there is no block"),
        ([[0.5, 0.5]], None, "not 3 probabilities"),
        ([[0.5, 0.5, "0"]], None, "not 3 probabilities"),
        ([[True, False, False]], None, "not 3 probabilities"),
        ([[math.nan, 0.5, 0.5]], None, "not 3 probabilities"),
        ([[-0.5, 1.0, 0.5]], None, "not 3 probabilities"),
        ([[0.5, 0.4, 0.4]], None, "do not sum to 1"),
        ([[0.5, 0.3, 0.2]], "ad", "not one of 1 blocks"),
        ([[0.5, 0.3, 0.2]], "x", "unknown letter"),
        ([[0.5, 0.3, 0.2]], 3, "A pattern is letters"),
    ],
)
def test_rows_that_are_no_search_are_refused(rows: Any, fixed: Any, said: str):
    with pytest.raises(UserError, match=said):
        derive(rows, fixed=fixed)


def test_a_damaged_record_of_costs_is_refused():
    for wrong in ({"attention": "3"}, {"rest": -1.0}, {"dense": 1e300}, {"else": 1.0}):
        record = Record(0, "cost", asdict(COSTS) | {"unit": "flops"} | wrong)
        with pytest.raises(UserError, match="record of block costs is damaged"):
            training.recorded_costs([record])


def test_costs_by_hand():
    costs = BlockCosts(attention=3.0, dense=2.0, identity=0.5, rest=10.0)
    assert costs.of("aad-") == 18.5
    assert costs.relative("aad-") == 18.5 / 20.0


def test_what_was_given_stays_whatever_the_budget():
    rows = [[0.1, 0.1, 0.8]] * 4
    assert derive(rows, fixed="aa**") == "aa--"
    # (1 + 2 * 4) / (1 + 2 * (4 + 2)) = 0.69
    assert derive(rows, COSTS, 0.7, fixed="aa**") == "aa--"
    with pytest.raises(UserError, match=r"the cheapest, aa--, needs a budget of 0\.693"):
        derive(rows, COSTS, 0.6, fixed="aa**")


def test_how_unlikely_a_choice_is_matters():
    rows = [[1 - 4e-7, 4e-7, 1e-12], [1.0, 1e-12, 1e-12]]
    costs = BlockCosts(attention=2.0, dense=1.0, identity=0.0, rest=1.0)
    assert derive(rows, costs, 1.0) == "da"


# -- what blocks cost ----------------------------------------------------------------------------


def sized(**changes) -> ParConfig:
    sizes = {"vocab_size": 50, "d_model": 32, "num_heads": 2, "d_ff": 32, "num_blocks": 2}
    return ParConfig(**(sizes | {"mem_len": 96, "length": 96, "dropout": 0.0} | changes))


def test_a_sampled_segment_has_full_memory():
    model = ParForCausalLM(sized(pattern="ad")).eval()
    ids, memories = sample_segment(model, streams=3)
    assert ids.shape == (3, 96)
    assert memories[0].shape == (3, 96, 32)
    assert memories[1] is None
    assert model(ids, targets=ids, memories=memories).loss.isfinite()


def test_costs_are_the_best_rounds_of_every_kind(monkeypatch):
    """By a clock that moves one second a reading: no pass is faster than another."""
    ticks = itertools.count()
    monkeypatch.setattr(search, "_seconds_now", lambda _: float(next(ticks)))
    costs = measure_block_costs(sized(num_blocks=4), streams=1, rounds=2)
    assert (costs.attention, costs.dense, costs.identity) == (1.0, 1.0, 1.0)
    # Two readings a block of five and one at either end: eleven seconds, five of them in blocks.
    assert costs.rest == 11.0 - 5.0


@pytest.mark.parametrize(("whole", "warned"), [(9.0, False), (20.0, True)])
def test_a_busy_machine_is_noticed(monkeypatch, caplog, whole, warned):
    """Parts of 8 seconds in all: two attention, two dense, one identity block, and the rest."""
    slow = whole - 8.0  # once in the rest, once in a block: the best round of neither shows it
    first = [1.0 + slow, 2.0, 0.0, 1.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    second = [1.0, 2.0 + slow, 0.0, 1.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    times = torch.tensor([first, second], dtype=torch.float64)
    monkeypatch.setattr(search, "_time_blocks", lambda *_: times)
    costs = measure_block_costs(sized(num_blocks=4), streams=1)
    assert (costs.attention, costs.dense, costs.identity, costs.rest) == (2.5, 1.0, 0.0, 1.0)
    assert ("busy" in caplog.text) is warned


@pytest.mark.parametrize("form", [{}, {"cutoffs": [10]}])
def test_counted_costs_add_up_to_the_whole_pass(form):
    config = sized(num_blocks=4, **form)
    costs = count_block_costs(config, streams=3)
    model = ParForCausalLM(config.with_pattern("aad-")).eval()
    counter = FlopCounterMode(display=False)
    backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    ids, memories = sample_segment(model, streams=3)
    with torch.no_grad(), backend, counter:
        model(ids, targets=ids, memories=memories)
    assert costs.of("aad-") == pytest.approx(counter.get_total_flops())
    assert costs.identity == 0
    assert costs.relative(interleaved(4)) == 1.0


def test_measuring_leaves_nothing_in_the_way_of_training():
    """Neither what was made in inference mode nor what other models of the shape share."""
    config = sized(pattern="ad", length=8, mem_len=8)
    costs = measure_block_costs(config, streams=2, rounds=3)
    assert min(costs.attention, costs.dense, costs.rest) > 0 and costs.identity >= 0
    model = ParForCausalLM(config).train()
    ids = torch.zeros(2, 8, dtype=torch.long)
    memories = model(ids, targets=ids).memories
    model(ids, targets=ids, memories=memories).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- the task ------------------------------------------------------------------------------------

Make = Callable[..., tuple[Any, Trainer]]


@pytest.fixture
def make(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Make:
    """The task of a search, and its trainer."""

    def build(changes: dict[str, Any] | None = None, **train: Any) -> Any:
        config = resolve(ParSearchConfig, None, tiny(tmp_path / "run", changes, **train))
        prepared = prepare(config.data, config.dataset)
        accelerator = make_accelerator(config.train)
        torch.manual_seed(config.train.seed)
        model = ParForCausalLM(
            ParConfig(
                len(prepared.tokenizer),
                length=config.dataset.length,
                learn_tau=config.search.tau == "learned",
                **asdict(config.model),
            )
        ).train()
        task = SearchTask(
            model, prepared, config.dataset, config.train, accelerator, config.search, COSTS
        )
        run = RunFolder.create(tmp_path / "run", resume=True)
        return task, Trainer(task, config.train, run, accelerator)

    return build


def weights(task: SearchTask) -> dict[str, torch.Tensor]:
    named = task.model.named_parameters()
    return {name: value.detach().clone() for name, value in named if not name.startswith("choice")}


def choices(task: SearchTask) -> dict[str, torch.Tensor]:
    return {n: value.detach().clone() for n, value in task.choice.named_parameters()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_simultaneous_moves_both_at_once(make: Make) -> None:
    task, trainer = make()
    before, scores = weights(task), choices(task)
    trainer._step(0)
    assert list(trainer.optimizers) == [WEIGHTS]
    assert changed(before, weights(task)) == set(before)
    assert changed(scores, choices(task)) == {"alpha"}


def test_alternating_keeps_each_to_its_own_part(make: Make) -> None:
    changes = {"search.optimise": "alternating", "search.alternate_every": 2, "model.dropout": 0.0}
    task, trainer = make(changes, warmup=0)
    train_ids = task.prepared.tokens["train"].ids
    border = int(len(train_ids) * 0.8)
    first = {phase: task.batches[phase][0]["input_ids"][0].tolist() for phase in task.batches}
    assert first[WEIGHTS] == train_ids[:8].tolist()
    assert first[CHOICES] == train_ids[border : border + 8].tolist()
    used: list[tuple[str, int]] = []
    for phase, batches in task.batches.items():
        task.batches[phase] = Watched(batches, phase, used)

    before, scores = weights(task), choices(task)
    trainer._step(0)
    assert changed(before, weights(task)) == set(before)
    assert changed(scores, choices(task)) == set()
    before = weights(task)
    trainer.task.begin_step(1)
    trainer._phase(1, WEIGHTS)
    assert changed(scores, choices(task)) == set()
    between = weights(task)
    assert changed(before, between) == set(before)
    trainer._phase(1, CHOICES)
    assert changed(between, weights(task)) == set()
    assert changed(scores, choices(task)) == {"alpha"}
    for step in (2, 3, 4, 5):
        trainer._step(step)
    assert [index for phase, index in used if phase == WEIGHTS] == [0, 1, 2, 3, 4, 5]
    # The held-out text is read in its order too, so that memory follows on.
    assert [index for phase, index in used if phase == CHOICES] == [0, 1, 2]


class Watched:
    def __init__(self, batches: ContextBatches, phase: str, used: list[tuple[str, int]]) -> None:
        self.batches, self.phase, self.used = batches, phase, used

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.used.append((self.phase, index))
        return self.batches[index]


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_tau_begins_and_ends_as_asked(make: Make, kind: str) -> None:
    changes = {"search.tau": kind, "search.tau_start": 0.9, "search.tau_end": 0.3}
    task, _ = make(changes, steps=7)
    taus = []
    for step in range(7):
        task.begin_step(step)
        taus.append(task.train_values()["tau"])
    assert taus[0] == pytest.approx(0.9, abs=1e-7) and taus[-1] == pytest.approx(0.3, abs=1e-7)
    assert taus == sorted(taus, reverse=True) and len(set(taus)) == 7


def test_constant_tau_stays(make: Make) -> None:
    task, _ = make({"search.tau": "constant", "search.tau_start": 0.7})
    for step in (0, 5, 11):
        task.begin_step(step)
        assert task.train_values()["tau"] == pytest.approx(0.7)


def test_learned_tau_begins_as_asked_and_moves(make: Make) -> None:
    task, trainer = make({"search.tau": "learned", "search.tau_start": 0.5}, warmup=0)
    assert task.train_values()["tau"] == pytest.approx(0.5)
    trainer._step(0)  # Adam's first step is the learning rate, 0.01, whatever the gradient's size
    assert abs(math.log(task.train_values()["tau"] / 0.5)) == pytest.approx(0.01, rel=0.05)


def test_cost_pushes_away_from_the_expensive_branch(make: Make) -> None:
    rows = {}
    for weight in (0.0, 50.0):
        task, trainer = make({"search.cost_weight": weight, "model.dropout": 0.0}, warmup=0)
        task.costs = BlockCosts(attention=5.0, dense=1.0, identity=0.0, rest=1.0)
        result = [trainer._step(step) for step in range(5)]
        rows[weight] = task.choice.probabilities().detach()
        if weight == 0.0:
            losses = [step.loss for step in result]
    assert (rows[50.0][:, 0] < rows[0.0][:, 0]).all()
    assert (rows[50.0].argmin(1) == 0).all() and not (rows[0.0].argmin(1) == 0).all()
    # The recorded loss is the language model's alone, so the first one is the same with the term.
    assert result[0].loss == losses[0]


def test_only_cost_above_the_budget_counts(make: Make) -> None:
    """At a third each the blocks cost 9 of the baseline's 16, and the rest 1."""
    costs = BlockCosts(attention=6.0, dense=3.0, identity=0.0, rest=1.0)
    plain, _ = make({"model.dropout": 0.0})
    kept = plain.loss(plain.model, "weights", 0, 0)
    for budget, excess in ((0.7, 0.0), (0.5, 10 / 16 - 0.5)):
        changes = {"model.dropout": 0.0, "search.budget": budget, "search.budget_weight": 20.0}
        task, _ = make(changes)
        task.costs = costs
        batch = task.loss(task.model, "weights", 0, 0)
        added = float((batch.objective - kept.objective).detach())
        assert added == pytest.approx(20.0 * excess**2, abs=1e-5)
        assert batch.loss.item() == pytest.approx(kept.loss.item())


def test_expected_cost_by_hand(make: Make) -> None:
    task, _ = make()
    task.costs = BlockCosts(attention=6.0, dense=3.0, identity=0.0, rest=1.0)
    # Three blocks at a third each of 6 and 3, over attention, dense, attention and the rest.
    assert task.expected_cost().item() == pytest.approx(3 * 3.0 / 16.0)
    assert task.train_values()["expected_cost"] == pytest.approx(9 / 16)


def test_a_pattern_may_leave_some_blocks_open(make: Make) -> None:
    task, trainer = make({"model.pattern": "a*-", "search.cost_weight": 5.0}, warmup=0)
    task.costs = BlockCosts(attention=5.0, dense=1.0, identity=0.0, rest=1.0)
    for step in range(4):
        trainer._step(step)
    rows = task.train_values()["pi"]
    assert rows[0] == pytest.approx([1.0, 0.0, 0.0]) and rows[2] == pytest.approx([0.0, 0.0, 1.0])
    assert rows[1] != pytest.approx([1 / 3] * 3, abs=1e-3)


def test_noise_is_one_for_all_processes(make: Make) -> None:
    task, _ = make()
    whole = task._model_arguments(WEIGHTS, 5)["noise"]
    assert whole.shape == (3, 4, 3)
    shares = []
    for rank in range(2):
        task.rank, task.world_size = rank, 2
        shares.append(task._model_arguments(WEIGHTS, 5)["noise"])
    assert torch.equal(torch.cat(shares, 1), whole)
    task.rank, task.world_size = 0, 1
    assert not torch.equal(task._model_arguments(WEIGHTS, 6)["noise"], whole)
    assert not torch.equal(task._model_arguments(CHOICES, 5)["noise"], whole)


def test_choices_stay_uniform_until_their_time_has_come(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    changes = {"search.choose_after": 0.5, "search.alpha_lr": 10.0, "search.cost": "flops"}
    training.search(resolve(ParSearchConfig, overrides=tiny(tmp_path / "run", changes)))
    records, _ = read_records(tmp_path / "run" / "metrics.jsonl")
    rows = {r.step: r.values["pi"] for r in records if r.kind == "train"}
    uniform = [[round(1 / 3, 6)] * 3] * 3
    assert all(rows[step] == uniform for step in range(1, 7))
    assert rows[12] != uniform


def test_entropy_from_undecided_to_decided():
    assert entropy(torch.full((4, 3), 1 / 3)) == pytest.approx(1.0)
    assert entropy(torch.eye(3)) == 0.0
    halves = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert entropy(halves) == pytest.approx(0.5 * math.log(2) / math.log(3))
