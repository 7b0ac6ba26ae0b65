"""The recurrent network against torch's own cell, its mechanisms, saving and loading."""

from pathlib import Path

import pytest
import torch
from torch import nn

from deepenough.errors import UserError
from deepenough.ponder.loss import ponder_loss_ref
from deepenough.ponder.parity_data import parity_batch
from deepenough.ponder.parity_model import INPUTS, MECHANISMS, ParityConfig, ParityModel, Passes


def make(**changes: object) -> ParityModel:
    torch.manual_seed(0)
    return ParityModel(ParityConfig(**({"size": 6, "width": 8, "max_passes": 4} | changes)))  # type: ignore[arg-type]


def passes_ref(model: ParityModel, inputs: torch.Tensor, num_passes: int) -> Passes:
    """The same with torch's cell, the input given anew at every pass."""
    hidden = torch.zeros(len(inputs), model.config.width)
    logits, halts = [], []
    for _ in range(num_passes):
        hidden = model.cell(inputs, hidden)
        logits.append(model.classifier(hidden))
        halts.append(model.halt(hidden)[:, 0])
    return Passes(torch.stack(logits), torch.stack(halts, -1))


@pytest.mark.parametrize("kind", INPUTS)
def test_passes_equal_torchs_cell(kind: str) -> None:
    model = make(input=kind)
    vectors = parity_batch(10, 6, 1, 6, seed=1).vectors
    inputs = vectors
    if kind == "entries":
        inputs = torch.stack([(vectors == 1).sum(1), (vectors == -1).sum(1)], -1) / 6**0.5
    expected, found = passes_ref(model, inputs, 5), model(vectors, 5)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.halt_logits, expected.halt_logits)


def test_entries_do_not_care_for_places_or_zeros() -> None:
    model = make(input="entries")
    vectors = torch.tensor([[1.0, -1, 1, 0, 0, 0], [0, 1, 0, 0, -1, 1]])
    logits = model(vectors).logits
    torch.testing.assert_close(logits[:, 0], logits[:, 1])


def test_the_ponder_loss_equals_the_plain_loop() -> None:
    model = make(halting_target=0.3, kl_weight=0.2)
    batch = parity_batch(7, 6, 1, 6, seed=2)
    with torch.no_grad():
        passes = model(batch.vectors)
        loss = model.loss(passes, batch.labels)
    expected = ponder_loss_ref(
        passes.logits, passes.halt_logits.sigmoid(), batch.labels, target=0.3, beta=0.2
    )
    assert [float(term) for term in loss] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_learns_something(mechanism: str) -> None:
    model = make(mechanism=mechanism, act_cost=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = last = 0.0
    for step in range(60):
        batch = parity_batch(64, 6, 1, 1, seed=step)
        loss = model.loss(model(batch.vectors), batch.labels)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        first, last = first or loss.task.item(), loss.task.item()
    assert last < 0.3 * first
    answer = model.answer(model(batch.vectors))
    assert torch.equal(answer.logits.argmax(-1), batch.labels)


def test_ponder_answers_with_the_pass_at_which_it_halts() -> None:
    model = make()
    logits = torch.arange(4.0)[:, None, None].expand(4, 3, 2)
    halts = torch.tensor([[0.6, 0.1, 0.1, 0.1], [0.3, 0.3, 0.1, 0.1], [0.01, 0.01, 0.01, 0.01]])
    answer = model.answer(Passes(logits, halts.logit()))
    assert answer.passes.tolist() == [1, 2, 4]
    assert answer.logits[:, 0].tolist() == [0.0, 1.0, 3.0]


def test_a_new_model_halts_about_as_the_prior_does() -> None:
    halts = make(halting_target=0.3)(torch.zeros(1, 6)).halt_logits.sigmoid()
    assert (halts - 0.3).abs().max() < 0.12


def test_fixed_answers_with_the_last_pass() -> None:
    model = make(mechanism="fixed")
    passes = model(parity_batch(3, 6, 1, 6, seed=0).vectors)
    answer = model.answer(passes)
    assert answer.passes.tolist() == [4, 4, 4]
    assert torch.equal(answer.logits, passes.logits[-1])


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    model = make(input="vector", mechanism="act")
    model.save_pretrained(tmp_path)
    loaded = ParityModel.from_pretrained(tmp_path)
    vectors = parity_batch(5, 6, 1, 6, seed=0).vectors
    assert torch.equal(model(vectors).logits, loaded(vectors).logits)
    assert isinstance(loaded.cell, nn.GRUCell) and loaded.cell.input_size == 6


@pytest.mark.parametrize(
    "changes", [{"mechanism": "luck"}, {"input": "pixels"}, {"max_passes": 0}, {"width": 0}]
)
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UserError):
        make(**changes)
