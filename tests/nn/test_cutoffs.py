"""Cutoffs: the solver against the plain loop and every partition; counts; the command."""

import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough.__main__ import main
from deepenough.errors import UserError
from deepenough.nn.cutoffs import (
    cutoffs_by_share,
    optimal_cutoffs,
    optimal_cutoffs_ref,
    partition_cost,
    read_counts,
)

# Few different values make ties, zeros and runs of equal counts the rule.
few_values = st.lists(st.integers(0, 3), min_size=1, max_size=40)
many_values = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)
fractions = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


def exact_cost(masses, bounds):
    pieces = itertools.pairwise((0, *bounds, len(masses)))
    return sum((j - i) * sum(map(Fraction, masses[i:j])) for i, j in pieces)


def brute_force(masses, clusters):
    """All cutoffs of least cost, smallest last cutoff first."""
    cuts = list(itertools.combinations(range(1, len(masses)), clusters - 1))
    costs = [exact_cost(masses, cut) for cut in cuts]
    best = [list(cut) for cut, cost in zip(cuts, costs, strict=True) if cost == min(costs)]
    return min(best, key=lambda cut: cut[::-1]), min(costs)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_partition_of_a_small_vocabulary(data):
    masses = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    clusters = data.draw(st.integers(1, len(masses)))
    cutoffs, cost = brute_force(masses, clusters)
    found = optimal_cutoffs(masses, clusters)
    assert found.cutoffs == cutoffs
    assert found.cost == pytest.approx(float(cost / max(sum(masses), 1)), rel=1e-15)
    assert found == optimal_cutoffs_ref(masses, clusters)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_equals_the_plain_loop_in_any_order(data):
    masses = data.draw(few_values | many_values)
    if data.draw(st.booleans()):
        masses.sort(reverse=True)
    clusters = data.draw(st.integers(1, len(masses)))
    assert optimal_cutoffs(masses, clusters) == optimal_cutoffs_ref(masses, clusters)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_fractions_reach_the_same_cost(data):
    masses = data.draw(fractions)
    clusters = data.draw(st.integers(1, len(masses)))
    fast, plain = optimal_cutoffs(masses, clusters), optimal_cutoffs_ref(masses, clusters)
    assert fast.cost == pytest.approx(plain.cost, rel=1e-12, abs=1e-300)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.integers(2, 3))
def test_sorted_intervals_are_best_of_all_partitions(masses, clusters):
    """Not only of intervals: any assignment of tokens to clusters costs at least as much."""
    clusters = min(clusters, len(masses))
    best = math.inf
    for labels in itertools.product(range(clusters), repeat=len(masses)):
        if len(set(labels)) == clusters:
            groups = [
                [m for m, c in zip(masses, labels, strict=True) if c == k] for k in set(labels)
            ]
            best = min(best, sum(len(group) * sum(group) for group in groups))
    found = optimal_cutoffs(sorted(masses, reverse=True), clusters)
    assert exact_cost(sorted(masses, reverse=True), found.cutoffs) == best


def test_extreme_numbers_of_clusters():
    masses = [9, 5, 5, 2, 0, 0]
    assert optimal_cutoffs(masses, 1).cutoffs == []
    assert optimal_cutoffs(masses, 1).cost == 6
    assert optimal_cutoffs(masses, 6).cutoffs == [1, 2, 3, 4, 5]
    assert optimal_cutoffs(masses, 6).cost == 1
    assert optimal_cutoffs([7], 1).cutoffs == []


def test_equal_and_absent_tokens():
    assert optimal_cutoffs(np.ones(999, dtype=np.int64), 3).cutoffs == [333, 666]
    assert optimal_cutoffs([0, 0, 0, 0], 3) == optimal_cutoffs_ref([0, 0, 0, 0], 3)
    assert optimal_cutoffs([0, 0, 0, 0], 3).cost == 0


def test_whole_numbers_stay_exact_where_floats_do_not():
    """Two cuts that differ by one part in 10^17: float64 cannot tell them apart, int64 does."""
    big = 10**17
    assert float(big + 1) == float(big)
    assert optimal_cutoffs([big, 0, big + 1], 2).cutoffs == [2]  # [1] costs one more
    assert optimal_cutoffs([big + 1, 0, big], 2).cutoffs == [1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.uint64, np.float32, bool])
def test_counts_of_any_type(dtype):
    masses = np.array([1, 1, 1, 1, 0, 0, 0, 1]).astype(dtype)
    assert optimal_cutoffs(masses, 3).cutoffs == optimal_cutoffs_ref(masses.astype(int), 3).cutoffs


@pytest.mark.parametrize("total_bits", [60, 62, 63, 70])
def test_counts_near_and_beyond_64_bits(total_bits):
    """No sum wraps around; beyond 63 bits the cost is the optimum to float64 precision."""
    rng = np.random.default_rng(total_bits)
    shares = np.sort(rng.pareto(1.1, 200))[::-1]
    ints = [int(x) for x in shares / shares.sum() * 2.0 ** (total_bits - 8)]
    masses = np.array(ints, dtype=np.uint64)
    found = optimal_cutoffs(masses, 4)
    plain = optimal_cutoffs_ref(masses, 4)  # Python integers have no limit
    assert found.cost == pytest.approx(plain.cost, rel=1e-13)
    if total_bits <= 62:
        assert found == plain


def test_cost_of_given_cutoffs():
    assert partition_cost([6, 2, 1, 1], [1, 2]) == pytest.approx((6 + 2 + 2 * 2) / 10)
    assert partition_cost([0.6, 0.2, 0.1, 0.1], [1, 2]) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("masses", "clusters", "words"),
    [
        ([], 1, "non-empty"),
        ([[1, 2]], 1, "list of numbers"),
        (["a"], 1, "list of numbers"),
        ([1, -1], 1, "negative"),
        ([1.0, math.nan], 1, "finite"),
        ([1.0, math.inf], 1, "finite"),
        ([1, 2], 0, "from 1 to 2"),
        ([1, 2], 3, "from 1 to 2"),
    ],
)
def test_bad_input_is_refused(masses, clusters, words):
    for solve in (optimal_cutoffs, optimal_cutoffs_ref):
        with pytest.raises(UserError, match=words):
            solve(masses, clusters)


def test_torch_accepts_the_cutoffs():
    torch = pytest.importorskip("torch")
    found = optimal_cutoffs([50, 20, 10, 5, 5, 5, 3, 2], 3)
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 8, found.cutoffs, div_value=2.0)
    assert layer.n_clusters == 2


def test_a_large_vocabulary_is_solved_to_a_minimum():
    """In a moment: a quadratic solver would look at 5 * 10^9 pairs for every cluster."""
    counts = (1e9 / np.arange(1, 100_001)).astype(np.int64)
    found = optimal_cutoffs(counts, 4)
    for k, step in itertools.product(range(3), (-1, 1)):
        moved = list(found.cutoffs)
        moved[k] += step
        assert partition_cost(counts, moved) >= found.cost


# -- counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"5 3\n2\t1\n\n", [5, 3, 2, 1]),
        (b"7", [7]),
        (b"0.5 .25 2.5e-1", [0.5, 0.25, 0.25]),
        (b"the\t10\nof\t5\r\n\n", [10, 5]),
        (b"1984\t10\n2001\t5\n", [10, 5]),  # words may be numbers
        ("\n\n\u2581\t10\n\u2028x y\t5".encode(), [10, 5]),
        (b" \t10\n\xff\xfe\t5\n", [10, 5]),  # in any encoding, white space too
        (b"a\tb\t10\n", None),
        (b"\xef\xbb\xbf5 3", [5, 3]),
    ],
)
def test_counts_in_text(tmp_path, text, expected):
    (tmp_path / "counts").write_bytes(text)
    if expected is None:
        with pytest.raises(UserError, match=r"'a' in .* is not a number"):
            read_counts(tmp_path / "counts")
        return
    counts = read_counts(tmp_path / "counts")
    assert counts.tolist() == expected
    whole = all(isinstance(value, int) for value in expected)
    assert counts.dtype == (np.int64 if whole else np.float64)


def test_counts_beyond_64_bits_become_floats(tmp_path):
    (tmp_path / "counts").write_text(f"{2**70} {2**63} 1")
    assert read_counts(tmp_path / "counts").tolist() == [2.0**70, 2.0**63, 1.0]
    (tmp_path / "counts").write_text(f"{2**62 + 1} 1")
    assert read_counts(tmp_path / "counts").tolist() == [2**62 + 1, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no counts"),
        (" \n\t\n", "holds no counts"),
        ("1 2 x", "'x' in .* is not a number"),
        ("the\t3\nof\n", "'of' in .* is not a number"),
        ("3 -1", "not negative"),
        ("3 nan", "finite"),
        ("3 inf", "finite"),
        (f"3 1{'0' * 400}", "finite"),
        ("0 0 0", "all zero"),
    ],
)
def test_bad_counts_are_refused(tmp_path, text, sentence):
    (tmp_path / "counts").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_counts(tmp_path / "counts")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"No such file.*give a file of counts"):
        read_counts(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"Is a directory.*give a file of counts"):
        read_counts(tmp_path)


def test_reading_counts_needs_no_model_library(tmp_path):
    """`deepenough cutoffs --counts` must not wait seconds for transformers to load."""
    (tmp_path / "counts").write_text("3 2 1")
    code = (
        "import sys; from deepenough.__main__ import main; "
        f"main(['cutoffs', '--counts', {str(tmp_path / 'counts')!r}, '--clusters', '2']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- the command

COUNTS = [50, 20, 10, 5, 5, 5, 3, 2]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(map(str, COUNTS)))
    return str(path)


def test_json_is_one_object(counts, capsys):
    assert main(["cutoffs", "--counts", counts, "--clusters", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    expected = optimal_cutoffs(COUNTS, 3)
    assert out.count("\n") == 1
    assert result["cutoffs"] == expected.cutoffs
    assert result["cost"] == expected.cost
    assert result["seconds"] >= 0
    assert (result["clusters"], result["vocab_size"]) == (3, 8)
    assert err == ""


@pytest.mark.parametrize("flags", [["--json"], ["--json", "true"], ["--json=true"]])
def test_json_flag_with_and_without_value(counts, capsys, flags):
    assert main(["cutoffs", *flags, "--counts", counts, "--clusters=1"]) == 0
    assert json.loads(capsys.readouterr().out)["cutoffs"] == []


def test_table(counts, capsys):
    assert main(["cutoffs", "--counts", counts, "--clusters", "2"]) == 0
    out = capsys.readouterr().out
    assert str(optimal_cutoffs(COUNTS, 2).cutoffs) in out
    assert "tail 1" in out


def test_counts_out_of_order_are_sorted_and_a_note_says_so(tmp_path, capsys):
    (tmp_path / "counts.txt").write_text("3 20 0 50 0 0 0 1")
    words = ["--counts", str(tmp_path / "counts.txt"), "--clusters", "3", "--json"]
    assert main(["cutoffs", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cutoffs"] == optimal_cutoffs([50, 20, 3, 1, 0, 0, 0, 0], 3).cutoffs
    assert "were not in descending order" in err
    assert err.count("\n") == 1


def test_the_tokens_of_a_run_are_counted(tmp_path, tiny, capsys):
    """A run's config.yaml tells its text; the ids are those of its tokenizer."""
    settings = tiny(tmp_path / "run", {"model.pattern": "d"}, steps=1)
    flags = [f"--{name}={value}" for name, value in settings.items() if name != "model.num_blocks"]
    assert main(["par", "train", *flags]) == 0
    capsys.readouterr()
    assert main(["cutoffs", settings["out"], "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["vocab_size"] == 400 and found["clusters"] == 3
    assert "have been sorted" not in err  # the ids of a run are what they are
    # The same that training finds by itself, says, and saves.
    auto = settings | {"out": tmp_path / "auto", "model.cutoffs": "auto", "model.div_value": 2}
    flags = [f"--{name}={value}" for name, value in auto.items() if name != "model.num_blocks"]
    assert main(["par", "train", *flags]) == 0
    assert f"suit the training text are {found['cutoffs']}" in capsys.readouterr().err
    for file in ("config.yaml", "model/config.json"):
        saved = yaml.safe_load((tmp_path / "auto" / file).read_text())
        assert saved.get("model", saved)["cutoffs"] == found["cutoffs"]
    assert main(["par", "train", *flags, "--resume"]) == 0


@given(masses=st.lists(st.integers(1, 30), min_size=3, max_size=30), clusters=st.integers(1, 3))
def test_ids_in_the_order_of_frequency_have_the_optimum_by_share_too(masses, clusters):
    ranked = sorted(masses, reverse=True)
    assert cutoffs_by_share(ranked, clusters) == optimal_cutoffs(ranked, clusters)
    shuffled = cutoffs_by_share(masses, clusters)
    assert shuffled.cutoffs == sorted(set(shuffled.cutoffs))
    assert all(0 < cutoff < len(masses) for cutoff in shuffled.cutoffs)


def test_frequent_tokens_behind_rare_ones_are_in_the_head():
    """Ids of our tokenizers begin with bytes; frequent tokens need the wide states of the head."""
    ranked = [1000 // (rank + 1) for rank in range(500)]
    best = optimal_cutoffs([*ranked, *[0] * 256], 3).cutoffs
    found = cutoffs_by_share([0] * 256 + ranked, 3).cutoffs
    assert found == [cutoff + 256 for cutoff in best]
    assert optimal_cutoffs([0] * 256 + ranked, 3).cutoffs[0] <= 256  # whose head has no token


def test_keep_order_cuts_the_ids_as_they_are(tmp_path, capsys):
    path = tmp_path / "counts.txt"
    path.write_text("0 0 0 50 20 1 0")
    for flag in ("--keep_order", "--keep-order"):
        assert main(["cutoffs", "--counts", str(path), "--clusters", "3", "--json", flag]) == 0
        out, err = capsys.readouterr()
        expected = optimal_cutoffs([0, 0, 0, 50, 20, 1, 0], 3)
        assert json.loads(out)["cutoffs"] == expected.cutoffs
        assert json.loads(out)["cost"] == expected.cost
        assert err == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--clusters", "2"], "either the folder of a run or --counts FILE"),
        (["--counts", "{counts}", "--run", "x", "--clusters", "2"], "either the folder of a run"),
        (["--run", "missing", "--clusters", "2"], "missing"),
        (["--counts", "{counts}", "--clusters", "0"], "at least 1"),
        (["--counts", "{counts}", "--clusters", "-2"], "at least 1"),
        (["--counts", "{counts}", "--clusters", "9"], "from 1 to 8"),
        (["--counts", "{counts}", "--clusters", "two"], "whole number"),
        (["--counts", "missing.txt", "--clusters", "2"], "No such file"),
        (["--counts", "{counts}", "--cluster", "2"], "clusters"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(counts, capsys, words, sentence):
    assert main(["cutoffs", *(word.format(counts=counts) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("deepenough: error: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_help_has_an_example(capsys):
    assert main(["cutoffs", "--help"]) == 0
    out = capsys.readouterr().out
    assert "example:" in out
    for flag in ("--counts", "--run", "--clusters", "--json", "--keep_order"):
        assert flag in out


def test_wikitext_agrees_with_the_published_cuts(data_dir, tmp_path, capsys):
    """The system this method comes from reports [455, 3507]: the last tokens inside each part."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = data_dir / "par" / "wiki2_12k.model"
    text = data_dir / "wikitext-2" / "train.txt"
    if not (model.is_file() and text.is_file()):
        pytest.skip("WikiText-2 or its tokenizer is not in DEEPENOUGH_DATA")
    encoder = sentencepiece.SentencePieceProcessor(model_file=str(model))
    lines = [line.strip().lower() for line in text.read_text("utf-8").splitlines() if line.strip()]
    counts = np.bincount(np.concatenate(encoder.encode(lines)), minlength=12_000)
    np.savetxt(tmp_path / "counts.txt", counts, "%d")
    words = ["--counts", str(tmp_path / "counts.txt"), "--clusters", "3", "--json"]
    assert main(["cutoffs", *words]) == 0
    assert json.loads(capsys.readouterr().out)["cutoffs"] == pytest.approx([456, 3508], abs=2)
