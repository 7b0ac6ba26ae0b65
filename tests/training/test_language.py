"""Language modelling and search as tasks: what is trained on what, and what is recorded."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.config import resolve
from deepenough.data import ContextBatches, Prepared, prepare
from deepenough.errors import UserError
from deepenough.par import ParForCausalLM
from deepenough.par.derive import BlockCosts
from deepenough.par.search import CHOICES, SearchTask
from deepenough.par.training import ParSearch
from deepenough.runs import RunFolder
from deepenough.training.distributed import make_accelerator
from deepenough.training.language import LanguageTask, evaluate_language
from deepenough.training.task import WEIGHTS
from deepenough.training.trainer import Trainer

Make = Callable[..., tuple[Any, Trainer]]


@pytest.fixture
def make(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Make:
    """A task and its trainer: of a search, or with a pattern of a fixed model."""

    def build(changes: dict[str, Any] | None = None, fixed: bool = False, **train: Any) -> Any:
        folder = tmp_path / "run"
        settings = resolve(ParSearch, None, tiny(folder, changes, **train))
        prepared = prepare(settings.data, settings.dataset)
        accelerator = make_accelerator(settings.train)
        torch.manual_seed(settings.train.seed)
        config = settings.model.config(
            len(prepared.tokenizer),
            settings.dataset.length,
            settings.model.pattern,
            learn_tau=settings.search.tau == "learned",
        )
        common = (ParForCausalLM(config), prepared, settings.dataset, settings.train, accelerator)
        task = LanguageTask(*common) if fixed else SearchTask(*common, settings.search)
        task.model.train()
        run = RunFolder.create(folder, resume=True)
        return task, Trainer(task, settings.train, run, accelerator)

    return build


def weights(task: LanguageTask) -> dict[str, torch.Tensor]:
    named = task.model.named_parameters()
    return {name: value.detach().clone() for name, value in named if not name.startswith("choice")}


def choices(task: SearchTask) -> dict[str, torch.Tensor]:
    return {n: value.detach().clone() for n, value in task.choice.named_parameters()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


# -- the model -------------------------------------------------------------------------------


def test_only_matrices_decay(make: Make) -> None:
    task, trainer = make({"model.pattern": "ad"}, fixed=True, weight_decay=0.5, lr=0.1, warmup=0)
    groups = trainer.optimizers[WEIGHTS].param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    kept = {id(p) for g in groups if not g["weight_decay"] for p in g["params"]}
    matrices = {id(p) for p in task.model.parameters() if p.dim() > 1}
    vectors = {id(p) for p in task.model.parameters() if p.dim() <= 1}
    assert decayed == matrices and kept == vectors and vectors
    # Without a gradient, what is left of a step is the decay: 1 - lr * weight_decay.
    before = {name: value.clone() for name, value in task.model.named_parameters()}
    for parameter in task.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizers[WEIGHTS].step()
    for name, value in task.model.named_parameters():
        share = 0.95 if value.dim() > 1 else 1.0
        assert torch.allclose(value, before[name] * share), name


def test_batches_follow_on_with_their_memory(make: Make) -> None:
    task, trainer = make({"model.pattern": "ada", "model.dropout": 0.0}, fixed=True, accumulate=2)
    reference = ParForCausalLM(task.model.config).train()
    reference.load_state_dict(task.model.state_dict())
    memories, losses = None, []
    for index in range(2):
        batch = task.batches[WEIGHTS][index]
        output = reference(batch["input_ids"], targets=batch["labels"], memories=memories)
        (output.loss / 2).backward()
        memories = output.memories
        losses.append(output.loss.item())
    result = trainer._step(0)
    # With memory two batches in turn are one step's text, not one batch of twice the lanes: the
    # second of them remembers the first.
    assert result.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert all(
        torch.allclose(kept, made)
        for kept, made in zip(task.memories[WEIGHTS], memories, strict=True)
        if kept is not None
    )
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_without_memory_accumulation_is_a_larger_batch(make: Make) -> None:
    changes = {"model.pattern": "ada", "model.dropout": 0.0, "model.mem_len": 0}
    task, trainer = make(changes, fixed=True, accumulate=2, clip=0.0, warmup=0)
    reference = ParForCausalLM(task.model.config).train()
    reference.load_state_dict(task.model.state_dict())
    pair = [task.batches[WEIGHTS][index] for index in range(2)]
    joined = {name: torch.cat([batch[name] for batch in pair]) for name in pair[0]}
    loss = reference(joined["input_ids"], targets=joined["labels"]).loss
    loss.backward()
    result = trainer._step(0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_the_text_begins_anew_without_memory(make: Make) -> None:
    task, _ = make({"model.pattern": "ad", "model.dropout": 0.0}, fixed=True)
    turns = len(task.batches[WEIGHTS])
    first = task.loss(task.model, WEIGHTS, 0, 0).loss
    second = task.loss(task.model, WEIGHTS, 1, 0).loss
    assert task.loss(task.model, WEIGHTS, turns, 0).loss == first
    assert task.loss(task.model, WEIGHTS, turns + 1, 0).loss == second


def test_evaluation_is_the_mean_over_all_tokens(make: Make) -> None:
    task, _ = make({"model.pattern": "ad"}, fixed=True)
    tokens, data = task.prepared.tokens["valid"], task.data
    values = evaluate_language(task.model, tokens, data)
    total, count, memories = 0.0, 0, None
    for batch in ContextBatches(tokens.ids, data.batch_size, data.length):
        with torch.no_grad():
            output = task.model(batch["input_ids"], targets=batch["labels"], memories=memories)
        memories, size = output.memories, batch["labels"].numel()
        total, count = total + output.loss.item() * size, count + size
    assert values["tokens"] == count
    assert values["loss"] == pytest.approx(total / count, rel=1e-6)
    assert len(tokens) - count <= data.batch_size * data.length


def test_a_short_text_is_measured_in_fewer_lanes(make: Make) -> None:
    task, _ = make({"model.pattern": "ad", "dataset.batch_size": 4}, fixed=True)
    tokens = task.prepared.tokens["valid"]
    wide = replace(task.data, batch_size=100_000)
    values = evaluate_language(task.model, tokens, wide)
    assert len(tokens) - values["tokens"] <= wide.length
    with pytest.raises(UserError, match="too few to be measured"):
        evaluate_language(task.model, tokens, replace(task.data, length=len(tokens)))


def test_a_split_too_short_is_refused_at_once(make: Make) -> None:
    task, _ = make({"model.pattern": "ad"}, fixed=True)
    tokens = task.prepared.tokens
    swapped = {"train": tokens["train"], "valid": tokens["train"], "test": tokens["valid"]}
    prepared = Prepared(task.prepared.corpus, task.prepared.tokenizer, swapped)
    data = replace(task.data, length=len(tokens["valid"]) + 1, batch_size=1)
    accelerator = make_accelerator(task.train)
    with pytest.raises(UserError, match=r"test text has .* too few"):
        LanguageTask(task.model, prepared, data, task.train, accelerator)


def test_evaluation_leaves_training_on(make: Make) -> None:
    task, trainer = make({"model.pattern": "ad"}, fixed=True)
    assert task.evaluate(trainer.accelerator, "valid")["loss"] > 0
    assert task.model.training
    assert task.evaluate(trainer.accelerator, "unknown") == {}


# -- the search ------------------------------------------------------------------------------


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


def test_cost_pushes_away_from_the_dear_branch(make: Make) -> None:
    rows = {}
    for weight in (0.0, 50.0):
        task, trainer = make({"search.cost_weight": weight, "model.dropout": 0.0}, warmup=0)
        task.costs = BlockCosts(attention=5.0, dense=1.0, identity=0.0, rest=1.0)
        result = [trainer._step(step) for step in range(5)]
        rows[weight] = task.model.probabilities()
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


def test_blocks_close_when_decided_and_stay_so(make: Make) -> None:
    changes = {"search.decide_at": 0.8, "search.decide_after": 0.25, "search.cost_weight": 5.0}
    task, trainer = make(changes, steps=13, warmup=0)
    task.costs = BlockCosts(attention=5.0, dense=1.0, identity=0.0, rest=1.0)
    with torch.no_grad():
        task.choice.alpha[0] = torch.tensor([5.0, 0.0, 0.0])
    trainer._step(0)
    assert task.model.pattern == "***"  # the share of the search left free
    trainer._step(3)
    assert task.model.pattern == "a**"
    row = task.model.probabilities()[0]
    for step in range(4, 13):
        trainer._step(step)
    assert torch.equal(task.model.probabilities()[0], row)  # neither cost nor momentum moves it
    assert not torch.equal(task.model.probabilities()[1], torch.full((3,), 1 / 3))


def test_the_last_block_is_not_closed_as_identity(make: Make) -> None:
    task, trainer = make({"search.decide_at": 0.8, "search.decide_after": 0.0})
    with torch.no_grad():
        task.choice.alpha[:] = torch.tensor([0.0, 0.0, 5.0])
    trainer._step(0)
    assert task.model.pattern == "--*"


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
