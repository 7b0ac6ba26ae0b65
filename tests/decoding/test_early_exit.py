"""Early exit: against a slow reference that runs the whole model and puts in what was filled."""

import math

import pytest
import torch

from deepenough import Shortcuts, UserError
from deepenough.decoding.api import early_exit
from deepenough.decoding.early_exit import (
    KV_PROPAGATIONS,
    ConfidenceGap,
    ExitObservation,
    ExitPolicy,
    FixedLayer,
    LowEntropy,
    TopProbability,
    make_policy,
)
from deepenough.hf.adapter import adapt

GREEDY = {"do_sample": False, "max_new_tokens": 12}


class ByPlace(ExitPolicy):
    """Depths that a row's tokens get in turn, whatever they are: all combinations come up."""

    depths = (1, 1, 3, 2, 1, 2, 3, 3, 1)

    def exits(self, seen: ExitObservation):
        wanted = torch.tensor([self.depths[int(place) % 9] for place in seen.num_generated_B])
        return wanted == seen.layer


@torch.no_grad()
def generate_ref(model, shortcuts: Shortcuts, ids: list[int], fill: str, new_tokens: int):
    """One row, from the definition: the whole text through the whole model for every token.

    Where a token left, each later layer is given the state that the fill says instead of its own.
    """
    adapter, last = adapt(model), model.config.num_hidden_layers
    depths: dict[int, int] = {}
    found = []
    for number in range(new_tokens):
        left: dict[int, torch.Tensor] = {}

        def put_in(index, hidden, left=left):
            hidden = hidden.clone()
            for place, depth in depths.items():
                if depth == index:
                    left[place] = hidden[0, place].clone()
                if depth <= index and fill != "deferred":
                    state = left[place]
                    moved = state if fill == "copy" else shortcuts.apply(state, depth, index)
                    hidden[0, place] = moved
            return hidden

        handles = []
        for index, layer in enumerate(adapter.layers):

            def hook(_, args, kwargs, index=index):
                if args:
                    return (put_in(index, args[0]), *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": put_in(index, kwargs["hidden_states"])}

            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        # The hooks that capture come after, and see what was put in.
        states = adapter.states(torch.tensor([ids]))
        for handle in handles:
            handle.remove()
        wanted = ByPlace.depths[number % 9] if number else last
        depth = min(wanted, last)
        state = states[depth][0, -1]
        logits = adapter.logits(shortcuts.apply(state, depth, last))
        if number:
            depths[len(ids) - 1] = depth
        if depths.get(len(ids) - 1) == last:
            del depths[len(ids) - 1]
        found.append(int(logits.argmax()))
        ids = [*ids, found[-1]]
        if found[-1] == 2:
            break
    return found


#: The last two through their own layers, where a token cannot wait.
WAYS = [
    *((name, fill) for name in ("llama", "gpt2") for fill in KV_PROPAGATIONS),
    *((name, fill) for name in ("gpt_neox", "opt") for fill in ("shortcut", "copy")),
]


@pytest.mark.parametrize(("name", "fill"), WAYS)
def test_batches_are_what_the_definition_says(make_model, prompts, shortcuts, name, fill) -> None:
    model = make_model(name)
    fast = early_exit(model, shortcuts, policy=ByPlace(), exit_layers=[1, 2], kv_propagation=fill)
    given = prompts(3)
    found = fast.generate(**given, **GREEDY, return_dict_in_generate=True)
    for row in range(3):
        ids = given["input_ids"][row][given["attention_mask"][row] == 1].tolist()
        expected = generate_ref(model, shortcuts, ids, fill, 12)
        assert found.sequences[row, 7 : 7 + len(expected)].tolist() == expected
        depths = [3, *(min(ByPlace.depths[n % 9], 3) for n in range(1, len(expected)))]
        assert found.trace.depth[row, : len(expected)].tolist() == depths
    assert 0 < found.trace.mean_blocks < 3


@pytest.mark.parametrize("name", ["gpt_neox", "opt"])
def test_layers_behind_the_exit_do_not_run(make_model, prompts, shortcuts, name) -> None:
    """Their attention hands over keys and values, and stops there."""
    model = make_model(name)
    options = {"policy": FixedLayer(1), "exit_layers": [1], "kv_propagation": "copy"}
    fast = early_exit(model, shortcuts, **options)
    ran = []
    for index, layer in enumerate(adapt(model).layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    assert fast.decoding_engine  # hooked layers are compared with the model first
    ran.clear()
    fast.generate(**prompts(1), **GREEDY, min_new_tokens=12)
    # The prompt goes through all three layers, each of the eleven tokens after it through one.
    assert (ran.count(0), ran.count(1), ran.count(2)) == (12, 1, 1)


@pytest.mark.parametrize("fill", KV_PROPAGATIONS)
@pytest.mark.parametrize("policy", [ConfidenceGap(0.6), TopProbability(0.5), LowEntropy(0.5)])
def test_rows_are_as_one_by_one(small, prompts, shortcuts, fill, policy) -> None:
    fast = early_exit(small, shortcuts, policy=policy, exit_layers=[1, 2], kv_propagation=fill)
    given = prompts(4)
    together = fast.generate(**given, **GREEDY, return_dict_in_generate=True)
    for row in range(4):
        kept = given["attention_mask"][row] == 1
        alone = fast.generate(
            input_ids=given["input_ids"][row : row + 1, kept], **GREEDY,
            attention_mask=torch.ones(1, int(kept.sum()), dtype=torch.long),
            return_dict_in_generate=True,
        )  # fmt: skip
        new = alone.sequences[0, int(kept.sum()) :]
        assert torch.equal(together.sequences[row, 7 : 7 + len(new)], new)
        assert torch.equal(together.trace.depth[row, : len(new)], alone.trace.depth[0])


@pytest.mark.parametrize("fill", KV_PROPAGATIONS)
def test_tokens_that_never_leave_are_the_models_own(small, prompts, shortcuts, fill) -> None:
    expected = small.generate(**prompts(3), **GREEDY)
    options = {"policy": TopProbability(1.0), "exit_layers": [1, 2], "kv_propagation": fill}
    found = early_exit(small, shortcuts, **options).generate(**prompts(3), **GREEDY)
    assert torch.equal(found, expected)


def test_leaving_early_costs_less(small, prompts, shortcuts) -> None:
    costs = []
    for layer in (1, 2, 3):
        fast = early_exit(small, shortcuts, policy=FixedLayer(layer), exit_layers=[1, 2])
        fast.generate(**prompts(1), **GREEDY, min_new_tokens=12)
        assert fast.trace.depth[0, 1:].tolist() == [layer] * 11
        costs.append(fast.trace.total_flops)
    assert costs[0] < costs[1] < costs[2]


def test_a_shortlist_only_decides_when(small, prompts, shortcuts) -> None:
    """The word itself is chosen among all."""
    options = {"policy": FixedLayer(1), "exit_layers": [1]}
    whole = early_exit(small, shortcuts, **options).generate(**prompts(2), **GREEDY)
    words = torch.arange(5)
    short = early_exit(small, shortcuts, **options, exit_vocab=words).generate(
        **prompts(2), **GREEDY
    )
    assert torch.equal(whole, short)


@pytest.mark.parametrize("policy", [ConfidenceGap(0.3), TopProbability(0.4), LowEntropy(0.3)])
def test_a_shortlist_lets_nobody_go_earlier(small, prompts, shortcuts, policy) -> None:
    """With all words in it, it changes nothing; with few, what it lets go is asked again."""
    options = {"policy": policy, "exit_layers": [1, 2], "kv_propagation": "deferred"}
    given = {**prompts(3), **GREEDY, "min_new_tokens": 12}
    fast = early_exit(small, shortcuts, **options)
    whole = fast.generate(**given)
    depth = fast.trace.depth
    assert depth[:, 1:].float().mean() < 3
    every = early_exit(small, shortcuts, **options, exit_vocab=torch.arange(40))
    assert torch.equal(every.generate(**given), whole)
    assert torch.equal(every.trace.depth, depth)
    assert every.trace.total_flops > fast.trace.total_flops  # each leaving is tested twice
    few = early_exit(small, shortcuts, **options, exit_vocab=torch.arange(8))
    ids = few.generate(**given)
    same = (ids[:, 7:] == whole[:, 7:]).cumprod(1)[:, :-1].bool()
    assert same.any()
    assert bool((few.trace.depth >= depth)[:, 1:][same].all())


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox"])
def test_a_shortlist_that_lets_nobody_go(make_model, prompts, shortcuts, name) -> None:
    model, words = make_model(name), torch.arange(3, 20)
    options = {"policy": TopProbability(1.0), "exit_layers": [1, 2], "exit_vocab": words}
    fast = early_exit(model, shortcuts, **options)
    assert torch.equal(
        fast.generate(**prompts(2), **GREEDY), model.generate(**prompts(2), **GREEDY)
    )
    first = torch.tensor([[5]])  # has nothing that may leave
    assert torch.allclose(fast(first).logits, model(first).logits, atol=1e-5)


def seen(probabilities: list[list[float]], place: int = 0) -> ExitObservation:
    places = torch.full((len(probabilities),), place)
    return ExitObservation(4, torch.tensor(probabilities), places)


def test_policies_by_name() -> None:
    assert make_policy("gap", 0.5) == ConfidenceGap(0.5)
    assert make_policy("top", 0.5) == TopProbability(0.5)
    assert make_policy("entropy", 0.5) == LowEntropy(0.5)
    assert make_policy("layer", 4) == FixedLayer(4)
    assert make_policy("gap") == ConfidenceGap(0.9)


def test_policies_by_hand() -> None:
    two = [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]]
    # 0.9 * 0.4 + 0.1 = 0.46 at first, 0.36 + 0.1 e^-4 = 0.3618 at the mean length.
    assert ConfidenceGap(0.4, 10).exits(seen(two)).tolist() == [True, False]
    assert ConfidenceGap(0.5, 10).exits(seen([[0.72, 0.2, 0.08]])).tolist() == [False]
    assert ConfidenceGap(0.5, 10).exits(seen([[0.72, 0.2, 0.08]], place=10)).tolist() == [True]
    assert TopProbability(0.5).exits(seen(two)).tolist() == [True, False]
    entropy = -sum(p * math.log(p) for p in two[0]) / math.log(3)
    assert LowEntropy(1 - entropy - 0.01).exits(seen(two)).tolist() == [True, False]
    assert LowEntropy(1 - entropy + 0.01).exits(seen(two)).tolist() == [False, False]
    assert FixedLayer(4).exits(seen(two)).tolist() == [True, True]
    assert FixedLayer(5).exits(seen(two)).tolist() == [False, False]


def test_bad_settings_are_refused(small, make_model, shortcuts) -> None:
    for policy in (ConfidenceGap, TopProbability, LowEntropy):
        with pytest.raises(UserError, match="between 0 and 1"):
            policy(1.5)
    with pytest.raises(UserError, match="needs shortcuts"):
        early_exit(small, None)
    with pytest.raises(UserError, match="threshold of its own"):
        early_exit(small, shortcuts, 0.5, policy=FixedLayer(2))
    with pytest.raises(UserError, match="layers 1 to 2"):
        early_exit(small, shortcuts, exit_layers=[3])
    with pytest.raises(UserError, match="two token ids"):
        early_exit(small, shortcuts, exit_vocab=torch.tensor([1]))
    with pytest.raises(UserError, match="mean_length must be above 0"):
        ConfidenceGap(0.5, 0)
    for value in (None, 0.5, float("inf")):
        with pytest.raises(UserError, match="layer needs to know which"):
            make_policy("layer", value)
    with pytest.raises(UserError, match=r"a number, not FixedLayer.*policy=\.\.\."):
        early_exit(small, shortcuts, FixedLayer(2))
    with pytest.raises(UserError, match="no policy 'guess'"):
        make_policy("guess", 0.5)
    with pytest.raises(UserError, match="got 'guess'"):
        early_exit(small, shortcuts, kv_propagation="guess")
    with pytest.raises(UserError, match="own layers"):
        early_exit(make_model("gpt_neox"), shortcuts, kv_propagation="deferred")
    last_only = Shortcuts(
        3, 32, {p: m for p, m in shortcuts.maps.items() if p[1] == 3}, targets="last"
    )
    with pytest.raises(UserError, match="cannot fill"):
        early_exit(small, last_only)
