"""A look inside a lazy model: what is recorded, what is drawn of it, what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from deepenough.cli.lazy import eval as eval_command
from deepenough.cli.lazy import plot as plot_command
from deepenough.cli.lazy import sweep as sweep_command
from deepenough.config import dump
from deepenough.data.tokenizer import save_tokenizer
from deepenough.data.translation import TranslationData, open_parallel
from deepenough.data.translation_pairs import joint_tokenizer
from deepenough.errors import UserError
from deepenough.lazy.programs import ProgramData
from deepenough.lazy.programs_tokens import character_tokenizer
from deepenough.lazy.programs_training import ProgramTraining, held_out_programs
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.training import LazyTraining, make_model
from deepenough.report.lazy import write_lazy_figures
from deepenough.report.lazy_source import epsilon_points, last_look, last_rest, step_grid
from deepenough.report.source import read_run
from deepenough.runs import Record, append_record, read_records

LINES = ["a man rides a red bike", "a woman walks her dog", "two dogs", "a red dog walks"]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, shared_cache):
    """Folders of runs, as training leaves them, with models that have learned nothing."""
    corpus = tmp_path_factory.mktemp("parallel")
    for split in ("train", "val", "test"):
        (corpus / f"{split}.en").write_text("\n".join(LINES * 10))
        (corpus / f"{split}.de").write_text("\n".join(LINES * 10))

    def make(mechanism: str, compare: str = "state") -> Path:
        settings = LazyTraining(
            data=TranslationData(
                corpus=str(corpus), vocab_size=285, max_length=24, cache=str(shared_cache)
            ),
            model=LazySettings(
                mechanism, d_model=16, num_heads=2, d_ff=32, encoder_steps=4, decoder_steps=2
            ),
        )
        settings.model.compare = compare
        tokenizer = joint_tokenizer(open_parallel(settings.data), settings.data)
        torch.manual_seed(0)
        model = make_model(settings.model, tokenizer, settings.data.max_length)
        folder = tmp_path_factory.mktemp(mechanism)
        model.save_pretrained(folder / "model")
        save_tokenizer(tokenizer, folder / "model")
        dump(settings, folder / "config.yaml")
        append_record(folder / "metrics.jsonl", Record(1, "train", {"loss": 1.0}))
        return folder

    return make


@pytest.fixture(scope="module")
def run(make_run) -> Path:
    return make_run("lazy")


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The same for a model that executes programs."""
    settings = ProgramTraining(
        data=ProgramData(length=2, eval_size=12),
        model=LazySettings(d_model=16, num_heads=2, d_ff=32, encoder_steps=3, decoder_steps=2),
    )
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    folder = tmp_path_factory.mktemp("programs")
    model = make_model(settings.model, tokenizer, settings.data.max_length)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    dump(settings, folder / "config.yaml")
    append_record(folder / "metrics.jsonl", Record(1, "train", {"loss": 1.0}))
    return folder


def last(run: Path, kind: str) -> dict:
    return [r.values for r in read_records(run / "metrics.jsonl")[0] if r.kind == kind][-1]


def test_a_sentence_of_the_split_is_drawn_with_all_its_numbers(run, capsys):
    words = ["--beams", "1", "--sentences", "4", "--encoder_steps", "[2,4]", "--epsilons"]
    sweep_command.main([str(run), *words, "[0.0,0.5,1.0]", "--decoder_steps", "[2,3]"])
    capsys.readouterr()
    assert plot_command.main([str(run), "--sentence", "1", "--epsilon", "0.5"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {path.stem for path in written}
    assert names == {"lazy_tokens", "lazy_sentence", "lazy_rest", "lazy_steps", "lazy_epsilon"}
    assert {path.suffix for path in written} == {".png", ".pdf", ".svg", ".json"}
    assert all(path.parent == run / "plots" and path.stat().st_size > 100 for path in written)
    tokens = last(run, "lazy_tokens")
    assert tokens["source"] == tokens["target"] == LINES[1]
    for side, num_steps in (("encoder", 4), ("decoder", 2)):
        part = tokens[side]
        assert len(part["gates"]) == len(part["similarity"]) == len(part["tokens"])
        assert all(len(row) == num_steps for row in part["gates"])
        assert len(part["sentence"]) == num_steps
    assert len(tokens["encoder"]["depth"]) == len(tokens["encoder"]["tokens"])
    data = json.loads((run / "plots" / "lazy_tokens.json").read_text())
    assert data[-1]["encoder"]["gates"] == tokens["encoder"]["gates"]


def test_the_distribution_counts_every_token_once(run, capsys):
    assert plot_command.main([str(run), "--epsilon", "1.0", "--patience", "2"]) == 0
    rest = last(run, "lazy_rest")
    assert rest["tokens_by_steps"][1] == sum(rest["tokens_by_steps"]) > 0
    assert rest["sentences"] == 40 and len(rest["similarity"]) == 4


@pytest.mark.parametrize(("compare", "epsilon"), [("state", 0.1), ("update", 0.25)])
def test_without_an_epsilon_it_is_one_that_fits_the_gates(make_run, capsys, compare, epsilon):
    run = make_run("lazy", compare)
    assert plot_command.main([str(run), "--sentences", "4"]) == 0
    assert last(run, "lazy_rest")["epsilon"] == last(run, "lazy_tokens")["epsilon"] == epsilon


def test_a_sentence_that_is_given_is_translated(run, tmp_path, capsys):
    words = ["--source", "two red dogs", "--encoder_steps", "6", "--sentences", "4"]
    assert plot_command.main([str(run), *words, "--out", str(tmp_path / "pictures")]) == 0
    tokens = last(run, "lazy_tokens")
    assert tokens["source"] == "two red dogs" and isinstance(tokens["target"], str)
    assert len(tokens["encoder"]["sentence"]) == 6
    assert (tmp_path / "pictures" / "lazy_tokens.svg").is_file()


def test_a_model_without_gates_has_similarities(make_run, capsys):
    run = make_run("universal")
    assert plot_command.main([str(run), "--sentences", "4"]) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert names == {"lazy_tokens", "lazy_sentence"}
    assert "gates" not in last(run, "lazy_tokens")["encoder"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epsilon", "0"], "epsilon must be above 0"),
        (["--patience", "0"], "patience must be at least 1"),
        (["--sentence", "40"], "has 40 pairs, counted from 0: got 40"),
        (["--sentence=-1"], "counted from 0: got -1"),
        (["--sentences", "0"], "sentences must be at least 1"),
        (["--source", " "], "The source is empty"),
        (["--target", "zwei"], "A target needs its source"),
        (["--encoder_steps", "0"], "encoder_steps must be at least 1"),
        (["--split", "dev"], "has no split 'dev'"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        plot_command.main([str(run), *words])


def test_programs_are_looked_at_as_sentences_are(programs, capsys):
    assert plot_command.main([str(programs), "--sentence", "2"]) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert names == {"lazy_tokens", "lazy_sentence", "lazy_rest"}
    expected = held_out_programs(ProgramData(length=2, eval_size=12), "test", 0)
    tokens, many = last(programs, "lazy_tokens"), last(programs, "lazy_rest")
    assert (tokens["source"], tokens["target"]) == expected[2].pair
    assert "".join(tokens["encoder"]["tokens"][:-1]) == tokens["source"]
    assert tokens["task"] == many["task"] == "programs"
    assert many["sentences"] == 12
    assert sum(many["tokens_by_steps"]) == sum(len(each.source) + 1 for each in expected)
    # What the pictures call the two sides.
    look = last_look(read_run(programs))
    assert look is not None and look.names == ("program", "output")


def test_another_program_is_executed_by_the_model_itself(programs, capsys):
    assert plot_command.main([str(programs), "--source", "print(1+2)."]) == 0
    tokens = last(programs, "lazy_tokens")
    assert tokens["source"] == "print(1+2)."
    assert len(tokens["decoder"]["tokens"]) >= 1


def test_a_damaged_look_is_left_out_of_the_pictures(programs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(programs, broken)
    values = {"source": "a", "target": "b", "encoder": {"tokens": ["a"], "similarity": [[1], [2]]}}
    append_record(broken / "metrics.jsonl", Record(2, "lazy_tokens", values))
    append_record(broken / "metrics.jsonl", Record(2, "lazy_rest", {"sentences": 3}))
    append_record(broken / "metrics.jsonl", Record(2, "epsilon", {"epsilon": "all"}))
    run = read_run(broken)
    assert last_look(run) is None and last_rest(run) is None and epsilon_points(run) == []
    with pytest.raises(UserError, match="nothing of a Lazy Transformer"):
        write_lazy_figures(run, tmp_path)


def test_sweeps_that_do_not_compare_are_not_drawn_together(make_run):
    run = make_run("lazy")
    words = ["--beams", "1", "--decoder_steps", "[2]"]
    few, more = ["--sentences", "2"], ["--sentences", "4"]
    sweep_command.main([str(run), *words, *more, "--encoder_steps", "[2,4]", "--epsilons", "[0,1]"])
    sweep_command.main([str(run), *words, *few, "--encoder_steps", "[3]", "--epsilons", "[0.5]"])
    assert set(step_grid(read_run(run))) == {(3, 2)}
    assert [point["epsilon"] for point in epsilon_points(read_run(run))] == [0.5]
    sweep_command.main([str(run), *words, *more, "--encoder_steps", "[3]", "--epsilons", "[0.5]"])
    assert set(step_grid(read_run(run))) == {(2, 2), (3, 2), (4, 2)}
    points = epsilon_points(read_run(run))
    assert [point["epsilon"] for point in points] == [0.0, 0.5, 1.0]
    flops = [point["encoder_flops"] for point in points]
    assert flops == sorted(flops, reverse=True)


def test_a_baseline_is_swept_without_epsilons(make_run, capsys):
    words = ["--beams", "1", "--sentences", "2", "--decoder_steps", "[1]"]
    assert sweep_command.main([str(make_run("universal")), *words, "--encoder_steps", "[2]"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    unshared = make_run("transformer")
    with pytest.raises(UserError, match="shares no block and has 4"):
        sweep_command.main([str(unshared), *words, "--encoder_steps", "[2,5]"])
    assert {record.kind for record in read_records(unshared / "metrics.jsonl")[0]} == {"train"}


def test_a_sweep_is_for_translators(programs):
    with pytest.raises(UserError, match="was trained on programs, but a sweep measures BLEU"):
        sweep_command.main([str(programs)])


def test_the_model_of_a_run_is_drawn_into_the_run(run, tmp_path, capsys):
    assert plot_command.main([str(run / "model")]) == 0
    assert str(run / "plots" / "lazy_tokens.png") in capsys.readouterr().out
    shutil.copytree(run / "model", tmp_path / "alone" / "model")
    with pytest.raises(UserError, match="is not a run folder"):
        plot_command.main([str(tmp_path / "alone" / "model")])


def test_a_settings_file_may_name_the_run(programs, tmp_path, capsys):
    config = tmp_path / "eval.yaml"
    config.write_text(f"run: {programs}\nlength: 1\n")
    assert eval_command.main(["--config", str(config)]) == 0
    assert "exact" in capsys.readouterr().out
