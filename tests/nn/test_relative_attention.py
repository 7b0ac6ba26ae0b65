"""Relative attention: both fast paths against the double loop, and what codes must keep."""

import math

import pytest
import torch
from torch import Tensor

from deepenough.nn.relative_attention import (
    RelativeAttention,
    distance_codes,
    projects_queries,
    relative_shift,
    visible_keys,
)

# Streams, heads, head width, new tokens, keys: a first segment, memory shorter and longer than the
# segment, one query on many keys, one head; on either side of `projects_queries`.
SHAPES = [
    (2, 2, 4, 5, 5),
    (3, 2, 4, 4, 7),
    (2, 4, 2, 3, 11),
    (1, 2, 4, 1, 9),
    (1, 3, 8, 2, 6),
    (2, 1, 6, 6, 10),
]


def make_attention(num_heads: int, head_width: int) -> RelativeAttention:
    attention = RelativeAttention(num_heads * head_width, num_heads)
    with torch.no_grad():  # u and v begin at zero, where they would go unnoticed
        attention.query.bias.normal_()
        attention.v_minus_u.normal_()
    return attention.double()


def causal_mask(num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    visible = visible_keys(num_queries, num_keys, num_keys if window is None else window)
    return torch.zeros(num_queries, num_keys).double().masked_fill(~visible, -torch.inf)


def attend(
    attention: RelativeAttention,
    context: Tensor,
    num_queries: int,
    mask: Tensor,
    num_ahead: int = 0,
) -> Tensor:
    num_distances = context.shape[1] + 1 + num_ahead
    codes = distance_codes(num_distances, context.shape[2], -num_ahead).double().flip(0)
    key, value = attention.keys_values(context)
    return attention(context[:, -num_queries:], key, value, codes, mask)


def relative_attention_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    u: Tensor,
    v: Tensor,
    by_distance: Tensor,
    window: int | None = None,
    bidirectional: bool = False,
) -> Tensor:
    """Return one head's output as the equation reads; `by_distance[d]` is `W_r R_d`.

    Where attention looks both ways, the rows of negative distances stand at the end, the last one
    being that of -1, so that `d` may be negative.
    """
    num_queries, num_keys, width = len(query), len(key), query.shape[-1]
    rows = []
    for i in range(num_queries):
        position = num_keys - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        end = num_keys if bidirectional else position + 1
        logits = torch.stack(
            [
                ((query[i] + u) @ key[j] + (query[i] + v) @ by_distance[position - j])
                / math.sqrt(width)
                for j in range(first, end)
            ]
        )
        rows.append(logits.softmax(0) @ value[first:end])
    return torch.stack(rows)


def attend_ref(
    attention: RelativeAttention,
    context: Tensor,
    num_queries: int,
    window: int | None = None,
    bidirectional: bool = False,
) -> Tensor:
    """Stream by stream and head by head, from the parameters alone."""
    width, heads = context.shape[2], attention.num_heads
    u = attention.query.bias.view(heads, -1)
    v = (attention.query.bias + attention.v_minus_u).view(heads, -1)
    key_weight, value_weight = attention.key_value.weight.chunk(2)
    codes = distance_codes(context.shape[1], width)
    if bidirectional:  # the row of -1 is the last one
        codes = torch.cat([codes, distance_codes(num_queries - 1, width, 1 - num_queries)])
    by_distance = codes.double() @ attention.position.weight.T
    streams = []
    for stream in context:
        query = stream[-num_queries:] @ attention.query.weight.T  # without its bias, which is u
        parts = [x.unflatten(-1, (heads, -1)) for x in (query, stream @ key_weight.T)]
        parts.append((stream @ value_weight.T).unflatten(-1, (heads, -1)))
        positions = by_distance.unflatten(-1, (heads, -1))
        mixed = [
            relative_attention_ref(
                *(x[:, h] for x in parts), u[h], v[h], positions[:, h], window, bidirectional
            )
            for h in range(heads)
        ]
        streams.append(torch.cat(mixed, -1) @ attention.output.weight.T)
    return torch.stack(streams)


@pytest.mark.parametrize(("streams", "heads", "width", "new", "keys"), SHAPES)
def test_both_paths_equal_the_double_loop(streams, heads, width, new, keys):
    torch.manual_seed(0)
    attention = make_attention(heads, width)
    context = torch.randn(streams, keys, heads * width).double()
    mask = causal_mask(new, keys)
    expected = attend_ref(attention, context, new)
    trained = attend(attention, context, new, mask)
    assert trained.requires_grad
    with torch.no_grad():
        evaluated = attend(attention, context, new, mask)
    torch.testing.assert_close(trained, expected)
    torch.testing.assert_close(evaluated, expected)


def test_shapes_cover_both_ways_to_project():
    ways = {projects_queries(streams * new, width) for streams, _, width, new, _ in SHAPES}
    assert ways == {True, False}


@pytest.mark.parametrize(("streams", "heads", "width", "new", "keys"), SHAPES)
def test_gradients_equal_those_through_the_double_loop(streams, heads, width, new, keys):
    torch.manual_seed(1)
    attention = make_attention(heads, width)
    context = torch.randn(streams, keys, heads * width).double().requires_grad_()
    wanted = [context, *attention.parameters()]
    weights = torch.randn(streams, new, heads * width).double()
    fast = (attend(attention, context, new, causal_mask(new, keys)) * weights).sum()
    slow = (attend_ref(attention, context, new) * weights).sum()
    for got, expected in zip(
        torch.autograd.grad(fast, wanted), torch.autograd.grad(slow, wanted), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("streams", "heads", "width", "new", "keys"), SHAPES)
def test_both_ways_equal_the_double_loop(streams, heads, width, new, keys):
    """In both paths, with their gradients; the last key is seen by the first query."""
    torch.manual_seed(5)
    attention = make_attention(heads, width)
    context = torch.randn(streams, keys, heads * width).double().requires_grad_()
    mask = torch.zeros(new, keys).double()
    expected = attend_ref(attention, context, new, bidirectional=True)
    trained = attend(attention, context, new, mask, num_ahead=new - 1)
    with torch.no_grad():
        evaluated = attend(attention, context, new, mask, num_ahead=new - 1)
    torch.testing.assert_close(trained, expected)
    torch.testing.assert_close(evaluated, expected)
    wanted, weights = [context, *attention.parameters()], torch.randn_like(expected)
    found = torch.autograd.grad((trained * weights).sum(), wanted)
    for own, slow in zip(
        found, torch.autograd.grad((expected * weights).sum(), wanted), strict=True
    ):
        torch.testing.assert_close(own, slow)
    assert (found[0][:, -1] != 0).all()


def test_ahead_and_behind_are_told_apart():
    """A text read backwards gives other states, unless the sines that tell the sign are gone."""
    torch.manual_seed(6)
    attention = make_attention(2, 4)
    context, mask = torch.randn(1, 6, 8).double(), torch.zeros(6, 6).double()
    with torch.no_grad():
        found = attend(attention, context, 6, mask, num_ahead=5)
        backwards = attend(attention, context.flip(1), 6, mask, num_ahead=5).flip(1)
        assert not torch.allclose(found, backwards)
        attention.position.weight[:, :4] = 0
        found = attend(attention, context, 6, mask, num_ahead=5)
        backwards = attend(attention, context.flip(1), 6, mask, num_ahead=5).flip(1)
        torch.testing.assert_close(found, backwards)


def test_without_sines_both_ways_are_the_first_codes_distance_alone():
    """The first public code has one position term for either side, that of `|i - j|`."""
    torch.manual_seed(7)
    attention = make_attention(2, 4)
    context, mask = torch.randn(2, 6, 8).double(), torch.zeros(6, 6).double()
    with torch.no_grad():
        attention.position.weight[:, :4] = 0  # the sines', which tell the sign
        found = attend(attention, context, 6, mask, num_ahead=5)
        by_distance = distance_codes(6, 8).double() @ attention.position.weight.T
        near = torch.arange(6)[:, None].sub(torch.arange(6)).abs()
        key, value = attention.keys_values(context)
        query = attention.query(context).unflatten(-1, (2, 4)).transpose(1, 2)  # q + u
        shifted = query + attention.v_minus_u.view(2, 1, 4)
        terms = torch.einsum("bhse,skhe->bhsk", shifted, by_distance[near].unflatten(-1, (2, 4)))
        weights = ((query @ key.mT + terms) / 2).softmax(-1)
        expected = (weights @ value).transpose(1, 2).flatten(2) @ attention.output.weight.T
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [1, 3, 6])
def test_window_limits_the_reach(window):
    torch.manual_seed(2)
    attention = make_attention(2, 4)
    context = torch.randn(2, 7, 8).double()
    with torch.no_grad():
        got = attend(attention, context, 4, causal_mask(4, 7, window))
        torch.testing.assert_close(got, attend_ref(attention, context, 4, window))


@pytest.mark.parametrize("grad", [True, False])
def test_mask_of_one_stream_leaves_the_others(grad):
    """A mask `[B, 1, S, K]` hides stream 0's first two keys, which equals stream 0 without them."""
    torch.manual_seed(3)
    attention = make_attention(2, 4)
    context = torch.randn(2, 6, 8).double()
    mask = causal_mask(4, 6).repeat(2, 1, 1, 1)
    mask[0, :, :, :2] = torch.finfo(torch.float64).min
    with torch.set_grad_enabled(grad):
        mixed = attend(attention, context, 4, mask)
        torch.testing.assert_close(mixed[:1], attend_ref(attention, context[:1, 2:], 4))
        torch.testing.assert_close(mixed[1:], attend_ref(attention, context[1:], 4))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (4, 4), (3, 8), (1, 5)])
def test_shift_takes_each_key_from_the_column_of_its_distance(num_queries, num_keys):
    distances = torch.arange(num_keys, -1, -1.0).expand(2, num_queries, -1).contiguous()
    shifted = relative_shift(distances, num_keys)
    ahead = torch.arange(num_keys, -num_queries, -1.0).expand(2, num_queries, -1).contiguous()
    both_ways = relative_shift(ahead, num_keys)
    assert shifted.shape == both_ways.shape == (2, num_queries, num_keys)
    for i in range(num_queries):
        for j in range(num_keys):
            distance = num_keys - num_queries + i - j
            assert (both_ways[:, i, j] == distance).all()
            assert distance < 0 or (shifted[:, i, j] == distance).all()


def test_shift_has_the_gradient_of_its_index_arithmetic():
    scores = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: relative_shift(x, 7), scores)
    assert torch.autograd.gradcheck(lambda x: relative_shift(x, 4), scores)


def test_code_of_a_distance_does_not_depend_on_the_number_of_keys():
    for width in (6, 7, 8):
        many = distance_codes(20, width)
        assert many.shape == (20, width)
        assert torch.equal(distance_codes(5, width), many[:5])
        assert torch.equal(distance_codes(9, width, first=-4)[4:], many[:5])
    assert torch.equal(many[0], torch.tensor([0.0] * 4 + [1.0] * 4))
    torch.testing.assert_close(many[3, :2], torch.tensor([3.0, 0.3]).sin())
    torch.testing.assert_close(many[3, 4:6], torch.tensor([3.0, 0.3]).cos())


def test_logit_of_a_distance_does_not_depend_on_the_number_of_keys():
    """With empty keys the position term is all there is: more keys must not move it."""
    torch.manual_seed(4)
    attention = make_attention(2, 4)
    torch.nn.init.eye_(attention.output.weight)
    hidden = torch.randn(1, 1, 8).double()
    ratios = []
    for num_keys in (3, 5, 9):
        key = torch.zeros(1, 2, num_keys, 4).double()
        value = torch.zeros(1, 2, num_keys, 4).double()
        value[:, :, -2, 0] = value[:, :, -1, 1] = 1.0  # reads the weights of distances 1 and 0
        codes = distance_codes(num_keys + 1, 8).double().flip(0)
        with torch.no_grad():
            out = attention(hidden, key, value, codes, causal_mask(1, num_keys)).view(2, 4)
        ratios.append(out[:, 0] / out[:, 1])
    assert (ratios[0] - 1).abs().max() > 1e-3  # the term is there at all
    torch.testing.assert_close(ratios[1], ratios[0])
    torch.testing.assert_close(ratios[2], ratios[0])


def test_visible_keys_by_hand():
    expected = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    assert torch.equal(visible_keys(3, 5, window=2), expected)
    assert visible_keys(3, 5, window=None).all()
