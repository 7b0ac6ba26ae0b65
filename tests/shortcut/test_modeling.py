"""Maps, r^2 and CKA are those of scikit-learn and of their definitions."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from torch import Tensor
from transformers import ModernBertConfig, ModernBertModel

from deepenough.artifacts import sha256
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.statistics import R2


def solve_ref(source: Tensor, target: Tensor, affine: bool) -> tuple[Tensor, Tensor | None]:
    """One map straight from its definition, by least squares on the states themselves."""
    if not affine:
        return torch.linalg.lstsq(source, target).solution.T, None
    mean_i, mean_j = source.mean(0), target.mean(0)
    matrix = torch.linalg.lstsq(source - mean_i, target - mean_j, driver="gelsd").solution.T
    return matrix, mean_j - matrix @ mean_i


def r2_ref(target: Tensor, predicted: Tensor) -> float:
    """The mean over dimensions, none of which is constant."""
    residual = (target - predicted).square().sum(0)
    return float((1 - residual / (target - target.mean(0)).square().sum(0)).mean())


def cka_ref(first: Tensor, second: Tensor) -> Tensor:
    """From the two Gram matrices of positions."""
    first, second = first - first.mean(0), second - second.mean(0)
    gram_i, gram_j = first @ first.T, second @ second.T
    return (gram_i * gram_j).sum() / (gram_i.norm() * gram_j.norm())


def close(ours: Tensor, theirs: np.ndarray, relative: float = 1e-8) -> bool:
    return bool(np.abs(ours.numpy() - theirs).max() <= relative * np.abs(theirs).max())


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("targets", ["all", "last"])
def test_maps_and_r2_are_scikit_learns(states: list[Tensor], affine: bool, targets: str) -> None:
    fitted, others = [h[:500] for h in states], [h[500:] for h in states]
    shortcuts = Shortcuts.fit_states(fitted, targets, affine)  # type: ignore[arg-type]
    table = shortcuts.r2(others)
    assert shortcuts.affine is affine and shortcuts.mode == ("affine" if affine else "mat")
    assert len(shortcuts.pairs) == (6 if targets == "all" else 3)
    for i, j in shortcuts.pairs:
        model = LinearRegression(fit_intercept=affine).fit(fitted[i].numpy(), fitted[j].numpy())
        assert shortcuts.matrix(i, j).dtype == torch.float64
        assert close(shortcuts.matrix(i, j), model.coef_)
        if affine:
            assert close(shortcuts.biases[i, j], model.intercept_)
        predicted = model.predict(others[i].numpy())
        assert close(shortcuts.apply(others[i], i, j), predicted)
        assert float(table[i, j]) == pytest.approx(r2_score(others[j].numpy(), predicted), rel=1e-8)
        matrix, bias = solve_ref(fitted[i], fitted[j], affine)
        torch.testing.assert_close(shortcuts.matrix(i, j), matrix, rtol=1e-9, atol=1e-9)
        if bias is not None:
            torch.testing.assert_close(shortcuts.bias(i, j), bias, rtol=1e-9, atol=1e-9)


def test_float32_states_give_float32_maps_near_those_of_float64(states: list[Tensor]) -> None:
    exact = Shortcuts.fit_states(states)
    single = Shortcuts.fit_states([h.float() for h in states])
    for pair in exact.pairs:
        assert single.matrix(*pair).dtype == torch.float32
        assert close(single.matrix(*pair).double(), exact.matrix(*pair).numpy(), 1e-5)


def test_ridge_is_scikit_learns(states: list[Tensor]) -> None:
    for affine in (False, True):
        shortcuts = Shortcuts.fit_states(states, affine=affine, ridge=50.0)
        for i, j in shortcuts.pairs:
            model = Ridge(50.0, fit_intercept=affine).fit(states[i].numpy(), states[j].numpy())
            assert close(shortcuts.matrix(i, j), model.coef_)


def test_a_map_by_hand() -> None:
    turn = torch.tensor([[0.0, -2.0], [3.0, 0.0]])
    start = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    shortcuts = Shortcuts.fit_states([start, start @ turn.T])
    torch.testing.assert_close(shortcuts.matrix(0, 1), turn)
    assert torch.equal(shortcuts.matrix(1, 1), torch.eye(2))
    assert shortcuts.bias(0, 1) is None
    torch.testing.assert_close(
        shortcuts.apply(torch.tensor([[[1.0, 2.0]]]), 0, 1), torch.tensor([[[-4.0, 3.0]]])
    )
    assert torch.equal(shortcuts.apply(start, 0, 1, "id"), start)


def test_states_in_a_subspace_are_predicted_as_by_least_squares(states: list[Tensor]) -> None:
    """A layer norm without bias: entries sum to zero, in single precision only nearly so."""
    for dtype in (torch.float64, torch.float32):
        normed = [(h - h.mean(1, keepdim=True)).to(dtype) for h in states]
        normed[1][:, 2] = 0.0
        for affine in (False, True):
            shortcuts = Shortcuts.fit_states(normed, affine=affine)
            assert shortcuts.meta["fit"]["dependent"] == [0, 1, 2]
            for i, j in shortcuts.pairs:
                assert float(shortcuts.matrix(i, j).abs().max()) < 10
                x, y = normed[i].double().numpy(), normed[j].double().numpy()
                predicted = LinearRegression(fit_intercept=affine).fit(x, y).predict(x)
                ours = shortcuts.apply(normed[i], i, j).double()
                assert close(ours, predicted, 1e-8 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("affine", [False, True])
def test_of_many_best_maps_the_smallest_is_taken(
    states: list[Tensor], affine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As scikit-learn's, also where dimensions are of very different size, and said."""
    size = torch.tensor([1e3, 1, 1e-2, 1, 30, 1], dtype=torch.float64)
    deficient = [(h - h.mean(1, keepdim=True)) * size for h in states]
    deficient[1][:, 2] = deficient[1][:, 4] * 0.3 - deficient[1][:, 0]
    deficient[1][:, 5] = 0.0
    shortcuts = Shortcuts.fit_states(deficient, affine=affine)
    assert "layers 0, 1, 2 lie in a subspace" in caplog.text
    for i, j in shortcuts.pairs:
        x, y = deficient[i].numpy(), deficient[j].numpy()
        model = LinearRegression(fit_intercept=affine).fit(x, y)
        assert close(shortcuts.matrix(i, j), model.coef_, 1e-7)
        if affine:
            assert close(shortcuts.biases[i, j], model.intercept_, 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_bias_gives_no_huge_maps(dtype: torch.dtype) -> None:
    """ModernBERT's h_0: half precision gives the maps of float32, but for rounding."""
    torch.manual_seed(0)
    size = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2}
    config = ModernBertConfig(**size, **tokens, num_attention_heads=2, sep_token_id=2)
    model = ModernBertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(3, 300, (40, 30))
    single = [state.flatten(0, 1) for state in adapt(model).states(ids)]
    states = [state.flatten(0, 1) for state in adapt(model.to(dtype)).states(ids)]
    reference = Shortcuts.fit_states([state[:900] for state in single])
    shortcuts = Shortcuts.fit_states([state[:900] for state in states])
    assert shortcuts.meta["fit"]["dependent"] == reference.meta["fit"]["dependent"] == [0]
    table, expected = (
        each.r2([state[900:] for state in own])
        for each, own in ((shortcuts, states), (reference, single))
    )
    eps = torch.finfo(dtype).eps
    for i, j in shortcuts.pairs:
        matrix = reference.matrix(i, j)
        model_ = LinearRegression(fit_intercept=False)
        model_.fit(single[i][:900].double().numpy(), single[j][:900].double().numpy())
        assert close(matrix, model_.coef_, 1e-4)
        torch.testing.assert_close(shortcuts.matrix(i, j), matrix, rtol=0, atol=20 * eps)
        assert float(table[i, j]) == pytest.approx(float(expected[i, j]), abs=max(1e-6, eps / 2))


def test_dimensions_of_very_different_size(states: list[Tensor]) -> None:
    """As in GPT-2, whose largest dimensions are thousands of times the rest; none is dropped."""
    size = torch.tensor([1e4, 1, 1e-3, 1, 30, 1], dtype=torch.float64)
    plain = Shortcuts.fit_states(states)
    shortcuts = Shortcuts.fit_states([h * size for h in states])
    assert shortcuts.meta["fit"]["dependent"] == []
    for i, j in shortcuts.pairs:
        unscaled = shortcuts.matrix(i, j) / size[:, None] * size
        torch.testing.assert_close(unscaled, plain.matrix(i, j), rtol=1e-8, atol=1e-8)


def test_too_few_positions_are_refused_with_the_number_needed(states: list[Tensor]) -> None:
    few = [h[:5] for h in states]
    with pytest.raises(UserError, match="at least 6 positions"):
        Shortcuts.fit_states(few)
    assert len(Shortcuts.fit_states(few, ridge=0.1).pairs) == 6
    with pytest.raises(UserError, match="no position"):
        Shortcuts.fit_states([h[:0] for h in states], ridge=0.1)
    with pytest.raises(UserError, match="ridge of -1"):
        Shortcuts.fit_states(states, ridge=-1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_with_nan_or_infinity_is_named(states: list[Tensor], bad: float) -> None:
    states[2][17, 3] = bad
    with pytest.raises(UserError, match="layer 2 hold"):
        Shortcuts.fit_states(states)


@pytest.mark.parametrize("affine", [False, True])
def test_r2_is_that_of_the_definition(states: list[Tensor], affine: bool) -> None:
    shortcuts = Shortcuts.fit_states([h[:500] for h in states], affine=affine)
    others = [h[500:] for h in states]
    for mode in (None, "id"):
        table = shortcuts.r2(others, mode)
        for i in range(4):
            for j in range(4):
                if i > j:
                    assert math.isnan(table[i, j])
                else:
                    predicted = shortcuts.apply(others[i], i, j, mode)
                    assert float(table[i, j]) == pytest.approx(
                        r2_ref(others[j], predicted), rel=1e-8, abs=1e-9
                    )


def test_r2_of_dimensions_that_never_vary() -> None:
    """As scikit-learn: 1 where the constant is met, 0 where it is missed."""
    start = torch.tensor([[1.0, 5.0, 0.0], [2.0, 5.0, 0.0], [4.0, 5.0, 0.0]]).double()
    target = torch.tensor([[2.0, 7.0, 0.0], [3.0, 7.0, 0.0], [4.0, 7.0, 0.0]]).double()
    stream = R2([(0, 1)], lambda hidden, i, j: hidden)
    stream.update([start, target])
    expected = r2_score(target.numpy(), start.numpy())
    assert float(stream.table()[0, 1]) == pytest.approx(expected)


def test_r2_of_a_stream_is_that_of_the_whole(states: list[Tensor]) -> None:
    shortcuts = Shortcuts.fit_states(states)
    stream = shortcuts.r2_stream()
    for start in range(0, 700, 90):
        stream.update([h[start : start + 90] for h in states])
    torch.testing.assert_close(stream.table(), shortcuts.r2(states), equal_nan=True)
    with pytest.raises(UserError, match="2 layers of width 6 were given"):
        shortcuts.r2(states[:3])


def test_cka_is_that_of_the_gram_matrices(states: list[Tensor]) -> None:
    table = Shortcuts.fit_states(states).cka()
    for i in range(4):
        for j in range(4):
            assert float(table[i, j]) == pytest.approx(float(cka_ref(states[i], states[j])))
    last = Shortcuts.fit_states(states, targets="last").cka()
    torch.testing.assert_close(last[:, 3], table[:, 3])
    assert math.isnan(last[0, 1])


def test_maps_that_are_not_there(states: list[Tensor]) -> None:
    shortcuts = Shortcuts.fit_states(states, targets="last")
    for ask, said in (
        (lambda: shortcuts.matrix(0, 1), "0 to 2 to layer 3"),
        (lambda: shortcuts.matrix(3, 0), "no map from layer 3 to layer 0"),
        (lambda: shortcuts.matrix(7, 7), "no map"),
        (lambda: shortcuts.bias(0, 2), "no map"),
        (lambda: shortcuts.apply(states[0], 0, 3, "tuned"), "tune the shortcuts first"),
        (lambda: shortcuts.apply(states[0], 0, 3, "affine"), "'mat', not 'affine'"),
    ):
        with pytest.raises(UserError, match=said):
            ask()


@pytest.fixture
def saved(states: list[Tensor], tmp_path: Path) -> tuple[Shortcuts, Path]:
    shortcuts = Shortcuts.fit_states(states, affine=True)
    shortcuts.tuned = {1: (torch.eye(6), torch.ones(6))}
    shortcuts.meta["model"] = {"model": "some/model", "revision": "abc", "fingerprint": "12"}
    shortcuts.save_pretrained(tmp_path / "maps")
    return shortcuts, tmp_path / "maps"


def assert_equal(one: Shortcuts, two: Shortcuts) -> None:
    for name in ("num_layers", "width", "affine", "targets", "pairs", "meta", "mode"):
        assert getattr(one, name) == getattr(two, name), name
    for pair in one.pairs:
        assert torch.equal(one.matrix(*pair), two.matrix(*pair))
        assert one.affine == (one.bias(*pair) is not None)
        if one.affine:
            assert torch.equal(one.biases[pair], two.biases[pair])
    assert one.tuned.keys() == two.tuned.keys()
    for layer, (matrix, bias) in one.tuned.items():
        assert torch.equal(matrix, two.tuned[layer][0]) and torch.equal(bias, two.tuned[layer][1])
    torch.testing.assert_close(one.cka(), two.cka(), rtol=0, atol=0, equal_nan=True)


def test_round_trip(saved: tuple[Shortcuts, Path], states: list[Tensor], tmp_path: Path) -> None:
    shortcuts, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "shortcuts.json",
        "shortcuts.safetensors",
    ]
    read = Shortcuts.from_pretrained(folder)
    assert_equal(shortcuts, read)
    read.save_pretrained(folder)  # over the files it is mapped from
    assert_equal(shortcuts, read)
    assert_equal(shortcuts, Shortcuts.from_pretrained(folder))
    torch.testing.assert_close(read.r2(states), shortcuts.r2(states), equal_nan=True)
    tuned = read.apply(states[1].float(), 1, 3, "tuned")
    torch.testing.assert_close(tuned, states[1].float() + 1)
    linear = Shortcuts.fit_states([h.float() for h in states], targets="last")
    linear.save_pretrained(folder)  # in place of what was there
    assert_equal(linear, Shortcuts.from_pretrained(folder))


def change_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_tampered_and_truncated_files(saved: tuple[Shortcuts, Path]) -> None:
    _, folder = saved
    maps, index = folder / "shortcuts.safetensors", folder / "shortcuts.json"
    whole, about = maps.read_bytes(), index.read_text()
    change_byte(maps)
    with pytest.raises(UserError, match="not the file it describes"):
        Shortcuts.from_pretrained(folder)
    maps.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not the file it describes"):
        Shortcuts.from_pretrained(folder)
    maps.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        Shortcuts.from_pretrained(folder)
    maps.write_bytes(whole)
    index.write_text(about[: len(about) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        Shortcuts.from_pretrained(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"there is no shortcuts\.json"):
        Shortcuts.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 2}, "has the shape"),
        ({"width": 7}, "has the shape"),
        ({"affine": False}, "no map of these layers"),
        ({"targets": "last"}, "no map of these layers"),
        ({"targets": "some"}, "targets must be all or last"),
        ({"meta": 3}, "cannot be read"),
        ({"format": "else"}, "format is not"),
        ({"version": 99}, "version 2"),
        ({"sha256": None}, "not the file it describes"),
    ],
)
def test_an_altered_index(
    saved: tuple[Shortcuts, Path], changes: dict[str, Any], said: str
) -> None:
    _, folder = saved
    index = folder / "shortcuts.json"
    content = json.loads(index.read_text()) | changes
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="not what its checksum says"):
        Shortcuts.from_pretrained(folder)
    del content["checksum"]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        Shortcuts.from_pretrained(folder)


def test_a_file_that_is_no_safetensors_is_refused(saved: tuple[Shortcuts, Path]) -> None:
    _, folder = saved
    (folder / "shortcuts.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    index = json.loads((folder / "shortcuts.json").read_text())
    index["sha256"] = sha256(folder / "shortcuts.safetensors")
    del index["checksum"]
    (folder / "shortcuts.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="damaged"):
        Shortcuts.from_pretrained(folder)


def test_places_that_hold_no_shortcuts(tmp_path: Path, states: list[Tensor]) -> None:
    for name in (tmp_path, tmp_path / "none", "nowhere", "a/b/c"):
        with pytest.raises(UserError, match="holds no shortcuts"):
            Shortcuts.from_pretrained(name)
    with pytest.raises(UserError, match="neither a folder here nor shortcuts that the hub gives"):
        Shortcuts.from_pretrained("someone/maps")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        Shortcuts.fit_states(states).save_pretrained(tmp_path / "file")


def test_shortcuts_are_read_from_the_hub(
    tmp_path: Path, states: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    Shortcuts.fit_states(states).save_pretrained(tmp_path)
    asked = []

    def download(
        name: str, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("deepenough.shortcut.modeling.snapshot_download", download)
    found = Shortcuts.from_pretrained("someone/maps", revision="v1")
    assert found.num_layers == len(states) - 1
    assert asked == [("someone/maps", "v1", ["shortcuts.json", "shortcuts.safetensors"])]
