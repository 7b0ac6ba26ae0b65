"""Search, derive, train: what each leaves, what each refuses, and what a refusal leaves alone."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepenough.__main__ import main
from deepenough.config import resolve
from deepenough.errors import UserError
from deepenough.par import training
from deepenough.par.config import ParSearchConfig, ParTrainConfig
from deepenough.par.evaluation import load_model
from deepenough.par.search import BlockCosts
from deepenough.par.training import derive_run, search, train
from deepenough.runs import Record, RunFolder, append_record, read_records

Tiny = Callable[..., dict[str, Any]]
FLOPS = {"search.cost": "flops"}


def run_search(settings: dict[str, Any]) -> Any:
    return search(resolve(ParSearchConfig, None, settings))


def run_training(settings: dict[str, Any], start: Path | None = None) -> RunFolder:
    return train(resolve(ParTrainConfig, None, settings | {"start": start and str(start)}))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def values(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [r.values for r in read_records(folder / "metrics.jsonl")[0] if r.kind == kind]


@pytest.fixture
def searched(tmp_path: Path, originals: Path, tiny: Tiny) -> Path:
    """A finished search of two steps, one's own copy."""
    if not (originals / "search").exists():
        run_search(tiny(originals / "search", FLOPS, steps=2))
    return Path(shutil.copytree(originals / "search", tmp_path / "searched"))


# -- search and derive -----------------------------------------------------------------------


def test_a_search_leaves_a_pattern_and_trains_it(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "run"
    changes = FLOPS | {"search.retrain": "supernet", "search.budget": 0.65}
    found = run_search(tiny(folder, changes))
    (derived,) = values(folder, "derive")
    assert derived["pattern"] == found.pattern and len(found.pattern) == 3
    assert derived["relative_cost"] == found.relative_cost <= 0.65
    assert derived["pi"] == values(folder, "train")[-1]["pi"]
    assert derived["budget"] == 0.65
    model = AutoModelForCausalLM.from_pretrained(folder / "derived" / "model")
    assert model.config.pattern == found.pattern
    assert len(AutoTokenizer.from_pretrained(folder / "derived" / "model")) == 400
    config = yaml.safe_load((folder / "derived" / "config.yaml").read_text())
    assert config["model"]["pattern"] == found.pattern
    assert config["start"] == str(folder)


def test_costs_hold_where_the_model_will_be_used(
    tmp_path: Path, tiny: Tiny, searched: Path
) -> None:
    """Twice the length makes attention costlier beside dense blocks, whose share stays."""
    longer = FLOPS | {"search.cost_length": 64}
    run_search(tiny(tmp_path / "longer", longer, steps=1))
    (short,), (long,) = values(searched, "cost"), values(tmp_path / "longer", "cost")
    assert long["attention"] / long["dense"] > short["attention"] / short["dense"]
    model = load_model(str(tmp_path / "longer"))
    assert model.config.length == load_model(str(searched)).config.length < 64
    with pytest.raises(UserError, match="cost_length must be at least 1"):
        run_search(tiny(tmp_path / "none", {"search.cost_length": 0}))


def test_a_supernet_is_a_better_start_than_none(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "search"
    run_search(tiny(folder, FLOPS, steps=30, save_every=30))
    fixed = {"model.pattern": "dad"}
    warm = run_training(tiny(tmp_path / "warm", fixed, steps=1), folder)
    cold = run_training(tiny(tmp_path / "cold", fixed, steps=1))
    assert values(warm.path, "train")[0]["loss"] < values(cold.path, "train")[0]["loss"] - 0.3


def test_deriving_again_says_nothing_twice(searched: Path) -> None:
    run = RunFolder.open(searched)
    derive_run(run)
    assert len(values(searched, "derive")) == 1
    cheap = derive_run(run, budget=0.65)
    assert cheap.relative_cost is not None and cheap.relative_cost <= 0.65
    derive_run(run, budget=0.65)
    assert len(values(searched, "derive")) == 2


@pytest.mark.parametrize("budget", [0.25, 0.4, 0.65, 0.9, 1.0])
def test_a_derived_pattern_keeps_its_budget(tmp_path: Path, budget: float) -> None:
    """Whatever it costs, attention is what this search wants everywhere."""
    run = RunFolder.create(tmp_path / "run")
    costs = {"attention": 4.0, "dense": 2.0, "identity": 0.0, "rest": 1.0, "unit": "flops"}
    append_record(run.metrics, Record(0, "cost", costs))
    rows = [[0.9, 0.06, 0.04], [0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]
    append_record(run.metrics, Record(9, "train", {"pi": rows}))
    derive_run(run, budget)
    (derived,) = values(run.path, "derive")
    assert derived["relative_cost"] <= budget
    table = BlockCosts(4.0, 2.0, 0.0, 1.0)
    assert derived["relative_cost"] == table.relative(derived["pattern"])


def test_a_run_without_a_search_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    append_record(run.metrics, Record(1, "train", {"loss": 1.0}))
    with pytest.raises(UserError, match="holds no search"):
        derive_run(run)
    append_record(run.metrics, Record(1, "train", {"pi": [[1.0, 0.0, 0.0]]}))
    with pytest.raises(UserError, match="no record of block costs"):
        derive_run(run, budget=0.5)
    assert derive_run(run).relative_cost is None


def test_costs_are_measured_at_the_real_shape_and_kept(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed search goes on with the table it began with."""
    asked: list[tuple[int, int]] = []

    def measure(config: Any, streams: int) -> BlockCosts:
        asked.append((config.d_model, streams))
        return BlockCosts(3.0 + len(asked), 2.0, 0.0, 1.0)

    monkeypatch.setattr(training, "measure_block_costs", measure)
    folder = tmp_path / "run"
    settings = tiny(folder, {"search.cost": "latency", "search.cost_weight": 0.1}, steps=2)
    run_search(settings)
    run_search(settings | {"resume": True})
    assert asked == [(16, 4)]
    (cost,) = values(folder, "cost")
    assert cost == {"attention": 4.0, "dense": 2.0, "identity": 0.0, "rest": 1.0, "unit": "latency"}


def test_a_pattern_may_ask_for_another_branch_than_was_given(
    tmp_path: Path, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """Given blocks have weights of one kind only; another pattern starts such a block anew."""
    folder = tmp_path / "run"
    run_search(tiny(folder, FLOPS | {"model.pattern": "aa*"}, steps=2))
    assert load_model(str(folder)).config.pattern == "aa*"
    run = run_training(tiny(tmp_path / "next", {"model.pattern": "ad-"}, steps=1), folder)
    assert "Block 2 starts from new weights" in caplog.text
    assert load_model(str(run.path)).config.pattern == "ad-"


def test_fixed_blocks_of_a_search_are_derived_as_given(tmp_path: Path, tiny: Tiny) -> None:
    found = run_search(tiny(tmp_path / "run", FLOPS | {"model.pattern": "d*a"}, steps=3))
    assert found.pattern[0] == "d" and found.pattern[2] == "a"


def test_a_search_that_has_not_decided_says_so(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its record, to Python, on the terminal and as JSON."""
    found = derive_run(RunFolder.open(searched))
    assert found.undecided_blocks == [1, 2, 3] and found.choice_steps == 2
    assert found.entropy == pytest.approx(values(searched, "train")[-1]["entropy"])
    (derived,) = values(searched, "derive")
    assert derived["undecided_blocks"] == [1, 2, 3] and derived["entropy"] == found.entropy
    capsys.readouterr()
    assert main(["par", "derive", str(searched)]) == 0
    sentence = "not decided: 3 of 3 blocks, after 2 steps that trained choices"
    assert capsys.readouterr().out.splitlines()[1].startswith(sentence)
    assert main(["par", "derive", str(searched), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["undecided_blocks"] == [1, 2, 3] and told["choice_steps"] == 2
    assert told["pi"] == found.probabilities and told["entropy"] == found.entropy


def test_a_search_that_has_decided_says_nothing_of_it(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    rows = [[0.98, 0.01, 0.01], [0.05, 0.9, 0.05]]
    append_record(run.metrics, Record(9, "train", {"pi": rows}))
    found = derive_run(run)
    assert found.undecided_blocks == [] and found.doubt() == "" and found.choice_steps is None
    append_record(run.metrics, Record(10, "train", {"pi": [rows[0], [0.5, 0.5, 0.0]]}))
    assert derive_run(run).undecided_blocks == [2]


def test_choices_that_wait_are_not_counted(tmp_path: Path, tiny: Tiny) -> None:
    """With half of the search for weights alone, choices had the other half, or none so far."""
    run_search(tiny(tmp_path / "run", FLOPS | {"search.choose_after": 0.5}, steps=6))
    assert [v["choice_steps"] for v in values(tmp_path / "run", "train")] == [0, 0, 0, 1, 2, 3]
    rows = [v["pi"] for v in values(tmp_path / "run", "train")]
    assert rows[2] == [[pytest.approx(1 / 3, abs=1e-5)] * 3] * 3 and rows[3] != rows[2]


def test_a_percentage_is_a_share(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for budget in ("0.65", "65%"):
        assert main(["par", "derive", str(searched), "--budget", budget, "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert [v["budget"] for v in values(searched, "derive")[1:]] == [0.65]
    assert main(["par", "derive", str(searched), "--budget", "65"]) == 2
    assert "budget must be above 0 and at most 1: got 65" in capsys.readouterr().err
    assert main(["par", "derive", str(searched), "--budget", "some%"]) == 2


# -- starting from other weights -------------------------------------------------------------


def test_weights_are_taken_over(tmp_path: Path, tiny: Tiny, trained: Path) -> None:
    still = {"model.pattern": "da", "train.lr": 1e-30, "train.weight_decay": 0.0}
    second = run_training(tiny(tmp_path / "second", still, steps=1), trained)
    before, after = (load_model(str(place)).state_dict() for place in (trained, second.path))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_search_starts_from_weights_and_choices_of_another(
    tmp_path: Path, tiny: Tiny, searched: Path
) -> None:
    words = tiny(tmp_path / "next", FLOPS | {"train.lr": 1e-30, "train.weight_decay": 0.0}, steps=1)
    flags = [f"--{name}={value}" for name, value in words.items()]
    assert main(["par", "search", *flags, "--from", str(searched)]) == 0
    before, after = (load_model(str(f)).state_dict() for f in (searched, tmp_path / "next"))
    names = [name for name in before if name != "choice.tau"]
    assert "choice.alpha" in names and before["choice.alpha"].abs().max() > 0
    assert all(torch.equal(before[name], after[name]) for name in names)
    with pytest.raises(UserError, match="has 3 blocks, not 4"):
        run_search(words | {"out": "other", "start": str(searched), "model.num_blocks": 4})


def test_a_search_may_start_from_a_fixed_pattern(
    tmp_path: Path, tiny: Tiny, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks take the branch that is there; the other one and the choices are new."""
    changes = FLOPS | {"model.num_blocks": 2, "start": str(trained)}
    run_search(tiny(tmp_path / "run", changes, steps=1))
    assert "Block 1 starts from new weights" in caplog.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.d_model": 32}, "has model.d_model 16, not 32"),
        ({"model.cutoffs": [50]}, r"has model.cutoffs \[\], not \[50\]"),
        ({"dataset.vocab_size": 380}, "another tokenizer"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, tiny: Tiny, trained: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        run_training(tiny(tmp_path / "second", {"model.pattern": "da"} | changes), trained)
    assert not (tmp_path / "second").exists()


def test_a_start_that_is_none_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(UserError, match="There is no model in"):
        run_training(tiny(tmp_path / "run"), tmp_path / "nowhere")


# -- what a run folder keeps -----------------------------------------------------------------


def test_settings_saved_neither_resume_nor_delete(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "run"
    settings = tiny(folder, {"model.pattern": "d"}, steps=1)
    run_training(settings)
    for how in ("overwrite", "resume"):
        run_training(settings | {how: True})
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert saved["method"] == "par"
        assert (saved["out"], saved["resume"], saved["overwrite"]) == (str(folder), False, False)
    again = resolve(ParTrainConfig, folder / "config.yaml")
    assert again.model.pattern == "d" and again.train.steps == 1


WRONG = [
    ({"data": "nowhere.txt"}, "nowhere"),
    ({"dataset.batch_size": 100_000}, "one batch of 100000 x 8 needs"),
    ({"dataset.vocab_size": 10}, "cannot hold the characters"),
    ({"model.num_heads": 3}, "3 heads do not divide"),
    ({"model.cutoffs": [90, 50]}, "not sorted"),
    ({"train.lr": -1.0}, "train.lr"),
    ({"search.budget": 0.001}, "needs a budget of"),
    ({"search.tau_end": 0.0}, "search.tau_end"),
    ({"search.tau_end": 2.0}, r"search\.tau_end is 2 and search\.tau_start 1"),
    ({"search.tau": "linear", "search.tau_start": 0.05}, "falls, but search.tau_end is 0.1"),
    ({"search.budget": 65}, "search.budget must be above 0 and at most 1: got 65"),
    ({"search.optimise": "alternating", "search.held_out": 0.0001}, "one batch of 4 x 8 needs 33"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_bad_settings_do_not_cost_the_old_run(
    tmp_path: Path, tiny: Tiny, searched: Path, wrong: dict[str, Any], sentence: str
) -> None:
    before = content(searched)
    with pytest.raises(UserError, match=sentence):
        run_search(tiny(searched, FLOPS | {"overwrite": True} | wrong))
    with pytest.raises(UserError, match=sentence):
        run_search(tiny(tmp_path / "new", FLOPS | wrong))
    assert content(searched) == before
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_refused_before_the_work_begins(
    tiny: Tiny, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(trained)

    def prepare(*_: Any) -> None:
        raise AssertionError("the corpus was opened first")

    monkeypatch.setattr(training, "prepare", prepare)
    with pytest.raises(UserError, match="exists already"):
        run_training(tiny(trained))
    assert content(trained) == before


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model.d_ff": 64}, "model.d_ff"),
        ({"model.pattern": "ad"}, "model.pattern"),
        ({"dataset.length": 4}, "dataset.length"),
        ({"dataset.vocab_size": 380}, "dataset.test"),
        ({"train.seed": 5}, "train.seed"),
        ({"train.optimizer": "adagrad"}, "train.optimizer"),
        ({"train.weight_decay": 0.5}, "train.weight_decay"),
        ({"train.warmup": 1}, "train.warmup"),
        ({"train.accumulate": 2}, "train.accumulate"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    tiny: Tiny, trained: Path, changes: dict[str, Any], key: str
) -> None:
    before = content(trained)
    with pytest.raises(UserError, match=f"another configuration: {key} was"):
        run_training(tiny(trained, {"model.pattern": "da", "resume": True} | changes, steps=1))
    assert content(trained) == before


def test_a_search_is_not_resumed_with_other_search_settings(tiny: Tiny, searched: Path) -> None:
    wrong = FLOPS | {"resume": True, "search.optimise": "alternating"}
    with pytest.raises(UserError, match=r"search\.optimise was simultaneous and is now altern"):
        run_search(tiny(searched, wrong, steps=2))


def test_what_comes_after_the_search_may_change(tiny: Tiny, searched: Path) -> None:
    later = {"resume": True, "search.budget": 0.65, "search.retrain": "scratch"}
    found = run_search(tiny(searched, FLOPS | later, steps=2))
    assert found.relative_cost <= 0.65
    assert load_model(str(searched / "derived")).config.pattern == found.pattern


def test_a_finished_search_resumed_is_left_as_it_is(tiny: Tiny, searched: Path) -> None:
    before = content(searched)
    run_search(tiny(searched, FLOPS | {"resume": True}, steps=2))
    changed = {name for name, data in content(searched).items() if before.get(name) != data}
    assert changed == {"training.log"}


def test_fixed_blocks_are_kept_within_a_budget(tmp_path: Path, tiny: Tiny) -> None:
    changes = FLOPS | {"model.pattern": "a**", "search.budget": 0.99}
    found = run_search(tiny(tmp_path / "run", changes, steps=2))
    assert found.pattern[0] == "a"
    assert derive_run(RunFolder.open(tmp_path / "run"), 0.9).pattern[0] == "a"
    with pytest.raises(UserError, match="needs a budget of"):
        run_search(tiny(tmp_path / "no", changes | {"search.budget": 0.2}, steps=2))
    assert not (tmp_path / "no").exists()


def test_a_finished_training_stays_described_as_it_was(
    trained: Path, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    before = (trained / "config.yaml").read_bytes()
    changes = {"model.pattern": "da", "train.lr": 0.5, "resume": True}
    run_training(tiny(trained, changes, steps=1))
    assert (trained / "config.yaml").read_bytes() == before
    assert "nothing is trained" in caplog.text
    with pytest.raises(UserError, match="is of another configuration"):
        run_training(tiny(trained, changes, steps=1), start=trained)


# -- longer runs, and settings that change ---------------------------------------------------


def test_a_finished_training_is_lengthened(
    trained: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(trained / "model")
    run = run_training(tiny(trained, {"model.pattern": "da", "resume": True}, steps=5))
    assert "training of 1 steps" in (said := capsys.readouterr().err) and "stretched" in said
    assert [v.step for v in read_records(run.metrics)[0] if v.kind == "train"] == [1, 2, 3, 4, 5]
    assert content(run.model)["model.safetensors"] != before["model.safetensors"]
    assert yaml.safe_load(run.config.read_text())["train"]["steps"] == 5


def test_a_lengthened_search_is_derived_anew(tiny: Tiny, searched: Path) -> None:
    """Its temperature, too, is that of the new length."""
    run_search(tiny(searched, FLOPS | {"resume": True}, steps=5))
    taus = [v["tau"] for v in values(searched, "train")]
    assert taus == pytest.approx([1.0, 0.1, 0.1**0.5, 0.1**0.75, 0.1])
    assert [r.step for r in read_records(searched / "metrics.jsonl")[0] if r.kind == "derive"] == [
        2,
        5,
    ]


def test_epochs_are_rounds_over_the_text(tmp_path: Path, tiny: Tiny) -> None:
    settings = tiny(tmp_path / "run", {"model.pattern": "d", "epochs": 0.25}, valid_every=1000)
    del settings["train.steps"]
    run = run_training(settings)
    dataset = resolve(ParTrainConfig, run.config).dataset
    tokens = training.prepare(settings["data"], dataset).tokens["train"]
    batches = (len(tokens) - 1) // (4 * 8)
    last = max(record.step for record in read_records(run.metrics)[0])
    assert last == math.ceil(batches / 4) > 2
    # The same run, counted in steps of which there are more.
    longer = settings | {"resume": True, "epochs": None, "train.steps": last + 1}
    assert max(r.step for r in read_records(run_training(longer).metrics)[0]) == last + 1


def test_another_start_is_not_ignored(tmp_path: Path, tiny: Tiny, trained: Path) -> None:
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    settings = tiny(tmp_path / "run", {"model.pattern": "da"}, steps=1)
    run_training(settings, trained)
    run_training(settings | {"resume": True}, tmp_path / "other" / ".." / trained.name)
    with pytest.raises(UserError, match="cannot be resumed with another start, because the weigh"):
        run_training(settings | {"resume": True, "train.steps": 2}, other)
