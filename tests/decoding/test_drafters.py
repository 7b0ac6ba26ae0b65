"""Drafts change nothing: whoever drafts, greedy tokens are the model's own."""

import pytest
import torch

from deepenough import Shortcuts, UserError
from deepenough.decoding.api import speculate
from deepenough.decoding.drafters import (
    Drafter,
    FallbackDrafter,
    LinearDrafter,
    LookupDrafter,
    Proposal,
    ShortcutDrafter,
)

GREEDY = {"do_sample": False, "max_new_tokens": 16}


class Oracle(Drafter):
    """Knows what will be written, and says so always, never, or in part."""

    def __init__(self, sequences, width: int, right) -> None:
        super().__init__(3)
        self.sequences, self.width, self.right = sequences.tolist(), width, right

    def propose(self, rows, state_BD, engine) -> Proposal:
        drafts = []
        for row in rows:
            start = self.width + len(row.tokens)
            coming = self.sequences[row.index][start : start + 3]
            known = [self.right(start + place, row.index) for place in range(len(coming))]
            drafts.append([t if k else (t + 1) % 40 for t, k in zip(coming, known, strict=True)])
        return Proposal(drafts)


RIGHT = {
    "always": lambda place, row: True,
    "never": lambda place, row: False,
    "sometimes": lambda place, row: (place + row) % 3 > 0,
}


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("rows", [1, 3])
def test_whatever_is_guessed(small, prompts, rows, right) -> None:
    expected = small.generate(**prompts(rows), **GREEDY)
    source = Oracle(expected, 7, RIGHT[right])
    for backend in (None, "general"):
        fast = speculate(small, drafter=[source], backend=backend)
        found = fast.generate(**prompts(rows), **GREEDY, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected)
        if right == "always":
            # One token from the prompt, then four a pass.
            assert found.passes == -(-(expected.shape[1] - 7 - 1) // 4)
            # Beyond the end of a row there is only padding to guess.
            ended = int((expected[:, 7:] == 2).sum())
            assert found.drafted - 3 * ended <= found.accepted and found.accepted > 0
        if right == "never":
            assert found.passes == expected.shape[1] - 7 - 1 and found.accepted == 0


def random_shortcuts(width: int = 32, layers: int = 3) -> Shortcuts:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(200, width, generator=generator) for _ in range(layers + 1)]
    return Shortcuts.fit_states(states)


def random_linear(width: int = 32, words: int = 20) -> LinearDrafter:
    generator = torch.Generator().manual_seed(0)
    maps = [
        (torch.randn(width, (n + 1) * width, generator=generator), torch.zeros(width))
        for n in (1, 2)
    ]
    return LinearDrafter(maps, torch.arange(3, 3 + words))


def sources() -> dict[str, Drafter]:
    shortcuts = random_shortcuts()
    return {
        "lookup": LookupDrafter(3),
        "linear": random_linear(),
        "shortcut": ShortcutDrafter(shortcuts, layer=1, num_draft_tokens=2),
        "shortlisted": ShortcutDrafter(shortcuts, layer=2, draft_vocab=torch.arange(5, 30)),
        "all": FallbackDrafter([LookupDrafter(2), random_linear(), ShortcutDrafter(shortcuts, 1)]),
    }


@pytest.mark.parametrize("name", sources())
def test_every_source_with_every_architecture(model, prompts, name) -> None:
    expected = model.generate(**prompts(3), **GREEDY)
    fast = speculate(model, drafter=[sources()[name]])
    found = fast.generate(**prompts(3), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert found.drafted > 0
    assert int(found.trace.depth.gt(0).sum()) == int((found.trace.flops > 0).sum())


@pytest.mark.parametrize("name", ["linear", "shortlisted"])
def test_a_model_may_be_cast_between_two_generations(make_model, prompts, name) -> None:
    model = make_model()
    fast = speculate(model, drafter=[sources()[name]])
    fast.generate(**prompts(2), **GREEDY)
    model.double()
    expected = model.generate(**prompts(2), **GREEDY)
    assert torch.equal(fast.generate(**prompts(2), **GREEDY), expected)


def test_what_is_given_drafts_by_default(small) -> None:
    """The best of what was fitted, after lookup."""
    linear, shortcuts = random_linear(), random_shortcuts()
    for given, kind in (
        ({"shortcuts": shortcuts}, ShortcutDrafter),
        ({"shortcuts": shortcuts, "linear_drafter": linear}, LinearDrafter),
    ):
        lookup, other = speculate(small, num_draft_tokens=1, **given).drafter.drafters
        assert isinstance(lookup, LookupDrafter) and isinstance(other, kind)
        assert lookup.num_draft_tokens == other.num_draft_tokens == 1
    assert isinstance(speculate(small).drafter, LookupDrafter)


def test_processors_see_the_same_history(small, prompts) -> None:
    options = {**GREEDY, "repetition_penalty": 1.3, "min_new_tokens": 10}
    expected = small.generate(**prompts(3), **options)
    fast = speculate(small, drafter=[Oracle(expected, 7, RIGHT["sometimes"])])
    assert torch.equal(fast.generate(**prompts(3), **options), expected)


def test_drafts_that_were_in_vain_are_paid_for(small, prompts) -> None:
    expected = small.generate(**prompts(1), **GREEDY)
    costs = {}
    for name, right in RIGHT.items():
        fast = speculate(small, drafter=[Oracle(expected, 7, right)])
        fast.generate(**prompts(1), **GREEDY)
        costs[name] = fast.trace.total_flops
    plain = speculate(small, "none")
    plain.generate(**prompts(1), **GREEDY)
    assert plain.trace.total_flops <= costs["always"]
    assert costs["always"] < costs["sometimes"] < costs["never"]


def test_wrong_drafts_are_refused(small, make_model) -> None:
    with pytest.raises(UserError, match="give linear_drafter"):
        speculate(small, drafter="linear")
    with pytest.raises(UserError, match="give shortcuts"):
        speculate(small, drafter=["shortcut"])
    with pytest.raises(UserError, match="not 'eagle'"):
        speculate(small, drafter=["eagle"])
    with pytest.raises(UserError, match="at least one"):
        speculate(small, drafter=[])
    with pytest.raises(UserError, match="width 16"):
        speculate(small, shortcuts=random_shortcuts(16))
    with pytest.raises(UserError, match="drafts are made with were made for"):
        speculate(small, linear_drafter=random_linear(16))
    with pytest.raises(UserError, match="layers 0 to 2"):
        ShortcutDrafter(random_shortcuts(), layer=3)
