"""`deepenough decode generate` and `decode calibrate`, as a user runs them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from deepenough import Shortcuts
from deepenough.__main__ import main
from deepenough.decoding import bench, evaluation
from deepenough.decoding.commands import shade, shaded
from deepenough.decoding.evaluation import GenerationResult
from deepenough.hf.adapter import adapt
from deepenough.measurement import median_interval
from deepenough.trace import DepthTrace


@pytest.fixture
def model(saved_model: Path) -> Path:
    return saved_model


@pytest.fixture(scope="module")
def shortcuts(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shortcuts")
    adapter = adapt(LlamaForCausalLM.from_pretrained(saved_model).eval())
    ids = torch.randint(3, 30, (40, 20), generator=torch.Generator().manual_seed(1))
    fitted = Shortcuts.fit_states([h.flatten(0, 1) for h in adapter.states(ids)], ridge=1e-3)
    fitted.meta["model"] = adapter.identity()
    fitted.save_pretrained(folder)
    return folder


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["decode", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_lossless_modes_say_so(model, capsys, mode) -> None:
    words = ["generate", str(model), "--prompt", "w3 w4 w5", "--mode", mode]
    found = run_json(capsys, *words, "--max-new-tokens", "12", "--against-full", "--rounds", "2")
    assert found["identical"] and found["speedup"] > 0
    assert found["mean_layers"] == found["full"]["mean_layers"] == 3
    assert found["new_tokens"] == len(found["tokens"]) <= 12
    assert found["text"].strip() == found["full"]["text"].strip()
    if mode == "full":
        assert found["flops"] == pytest.approx(found["full"]["flops"])


@pytest.mark.parametrize(("seconds", "pays"), [([1.0, 2.0, 4.0], True), ([4.0, 5.0, 8.0], False)])
def test_what_does_not_pay_is_said_with_the_figures(model, capsys, monkeypatch, seconds, pays):
    trace = DepthTrace(
        torch.full((1, 4), 3), torch.ones(1, 4, 3, dtype=torch.bool), torch.ones(1, 4)
    )
    timed = (GenerationResult([3, 4, 5, 6], trace, turns) for turns in (seconds, [4.0, 4.0, 4.0]))
    monkeypatch.setattr(evaluation, "generate_timed", lambda *_: tuple(timed))
    words = ["generate", str(model), "--prompt", "w3 w4", "--against-full", "--mode", "full"]
    assert main(["decode", *words]) == 0
    output = capsys.readouterr().out
    assert ("full does not pay here" in output) is not pays
    times = "2 (1 to 4)" if pays else "0.8 (0.5 to 1.0)"
    assert f"the same tokens, {times} times as fast in 3 turns" in output
    assert ("2 (1 to 4)" if pays else "0.8 (0.5 to 1.0)") in output  # tokens/s


def test_exits_are_told(model, shortcuts, capsys) -> None:
    words = ["generate", str(model), "--prompt", "w3 w4 w5", "--mode", "early_exit"]
    words += [
        "--shortcuts",
        str(shortcuts),
        "--max-new-tokens",
        "12",
        "--kv_propagation",
        "deferred",
    ]
    found = run_json(
        capsys, *words, "--policy", "layer", "--threshold", "1", "--exit_layers", "[1,2]"
    )
    depths = [token["depth"] for token in found["tokens"]]
    assert depths[0] == 3 and set(depths[1:]) == {1}
    assert (
        main(["decode", *words, "--policy", "top", "--threshold", "0.2", "--exit_vocab", "9"]) == 0
    )
    output = capsys.readouterr().out
    assert output.startswith("w3 w4 w5")
    assert "tokens/s" in output and "of 3" in output
    assert "\x1b[" not in output and "model.generate" not in output


def test_prompts_come_from_standard_input(model, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w3 w4 w5"))
    found = run_json(capsys, "generate", str(model), "--max-new-tokens", "2")
    assert found["new_tokens"] == 2


def test_ctrl_c_leaves_what_there_is(model, capsys, monkeypatch) -> None:
    from deepenough.decoding.request import SequenceState

    append = SequenceState.append

    def interrupted(self: SequenceState, token: int) -> None:
        append(self, token)
        if len(self.tokens) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(SequenceState, "append", interrupted)
    words = ["generate", str(model), "--prompt", "w3 w4 w5", "--mode", "full"]
    assert main(["decode", *words, "--max-new-tokens", "12"]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_calibrate_then_generate(model, shortcuts, words_file, capsys, tmp_path) -> None:
    words = ["calibrate", str(model), "--shortcuts", str(shortcuts), "--data", str(words_file)]
    words += ["--new-tokens", "6", "--max-disagreement", "0.3", "--confidence", "0.8"]
    words += ["--policy", "top", "--exit_layers", "[2]", "--out", str(tmp_path)]
    assert main(["decode", *words, "--min-chars", "8"]) == 0
    output = capsys.readouterr().out
    assert "p-value" in output and "calibration.json" in output
    found = run_json(capsys, *words, "--min-chars", "8")
    assert ("times as fast in 3 turns" in output) == (found["threshold"] is not None)
    assert found["file"] == str(tmp_path / "calibration.json")
    assert (
        json.loads((tmp_path / "calibration.json").read_text())["threshold"] == found["threshold"]
    )
    words = ["generate", str(model), "--prompt", "w3 w4", "--mode", "early_exit"]
    words += ["--shortcuts", str(shortcuts), "--guarantee", str(tmp_path)]
    if found["threshold"] is None:
        assert main(["decode", *words]) == 2
    else:
        assert run_json(capsys, *words, "--max-new-tokens", "8")["new_tokens"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", "  "], "prompt is empty"),
        (["--prompt", "w3 " * 70], "do not fit the model's 64: shorten the prompt"),
        (["--prompt", "w3", "--max-new-tokens", "80"], "at most 63 new tokens"),
        (["--prompt", "w3", "--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--prompt", "w3", "--mode", "early_exit"], "needs shortcuts"),
        (["--prompt", "w3", "--threshold", "0.5"], "an option of --mode early_exit"),
        (["--prompt", "w3", "--mode", "early_exit", "--threshold", "1.5"], "between 0 and 1"),
        (
            ["--prompt", "w3", "--mode", "early_exit", "--policy", "layer"],
            "policy layer needs to know which",
        ),
        (
            ["--prompt", "w3", "--mode", "early_exit", "--policy", "top", "--mean_length", "9"],
            "mean_length is an option of the policy gap",
        ),
        (["--prompt", "w3", "--chat"], "no chat template"),
    ],
)
def test_bad_input_is_a_sentence(model, capsys, words, sentence) -> None:
    assert main(["decode", "generate", str(model), *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_other_peoples_shortcuts_and_few_texts(
    model, shortcuts, words_file, capsys, tmp_path
) -> None:
    other = Shortcuts.from_pretrained(shortcuts)
    other.meta["model"] = {"model": "another", "fingerprint": "0"}
    other.save_pretrained(tmp_path)
    words = ["--mode", "early_exit", "--shortcuts", str(tmp_path)]
    assert main(["decode", "generate", str(model), "--prompt", "w3", *words]) == 2
    assert "made for another" in capsys.readouterr().err
    words = [
        "--shortcuts",
        str(shortcuts),
        "--data",
        str(words_file),
        "--texts",
        "20",
        "--exit_layers",
        "[1]",
    ]
    assert main(["decode", "calibrate", str(model), *words]) == 2
    assert "at least 59 texts" in capsys.readouterr().err


def test_shades() -> None:
    assert shade(1, 30) == "black on rgb(253,231,55)"
    assert shade(30, 30) == "white on rgb(0,34,77)"
    assert shade(0, 30) == ""
    assert shade(1, 1) == "black on rgb(253,231,55)"
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shaded(["a", "b"], [1, 3], 3))
    assert console.file.getvalue().count("\x1b[") >= 4
    plain = Console(file=io.StringIO())
    plain.print(shaded(["a", "b"], [1, 3], 3))
    assert plain.file.getvalue() == "ab\n"


def test_text_streams_and_drafts_are_told(model, capsys) -> None:
    words = ["decode", "generate", str(model), "--prompt", "w3 w4 w5 w3 w4 w5 w3", "--mode"]
    assert main([*words, "speculative", "--max-new-tokens", "40"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("w3 w4 w5 w3 w4 w5 w3") and output.count("w3 w4 w5 w3 w4 w5 w3") == 1
    assert " backend" in output and "tokens/s" in output
    if "draft tokens accepted" in output:
        assert "by place in the draft" in output and "by quarter of the text" in output
    found = run_json(capsys, *words[1:], "full", "--max-new-tokens", "5")
    assert found["backend"] in ("native", "torch") and found["drafted_at"] == []


def test_ways_are_measured_beside_each_other(model, words_file, capsys, tmp_path) -> None:
    out = tmp_path / "bench"
    words = ["bench", str(model), "--data", str(words_file), "--prompts", "2", "--rounds", "2"]
    words += ["--max-new-tokens", "6", "--out", str(out)]
    found = run_json(capsys, *words, "--ours_only")
    assert json.loads((out / "bench.json").read_text())["verdict"] == found["verdict"]
    ways = found["ways"]
    assert set(ways) >= {"transformers generate", "deepenough torch", "deepenough + lookup"}
    for row in ways.values():
        assert row["identical"] == 2 and row["agreement"] == 1
        assert row["tokens_per_second"][0] > 0 and row["load_seconds"] > 0
    assert ways["transformers generate"]["times_generate"] == [1, 1, 1]
    assert main(["decode", *words]) == 2  # the folder is there
    capsys.readouterr()
    assert main(["decode", *words, "--overwrite"]) == 0
    output = capsys.readouterr().out
    assert "tokens/s" in output and "transformers prompt lookup" in output
    assert "not measured: " in output or "llama.cpp" in output


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (([2, 2, 2], [1, 1, 1]), "own is 2 times as fast as transformers generate, tokens"),
        (([1, 1, 1], [2, 2, 2]), "transformers generate is the fastest here; own is not"),
        (([1, 1, 1], [4, 3, 2]), "transformers generate is the fastest here, and 3 (2 to 4) times"),
    ],
)
def test_a_verdict_says_what_the_rounds_bear_out(rates, said) -> None:
    named = dict(zip(("own", bench.BASE), map(list, rates), strict=True))
    if "not" in said:
        named["own"] = [2.1, 1.9, 1.8]
    rows = {
        name: {
            "tokens_per_second": list(median_interval(own)),
            "times_generate": list(
                median_interval([a / b for a, b in zip(own, named[bench.BASE], strict=True)])
            ),
            "identical": 3,
        }
        for name, own in named.items()
    }
    assert bench.verdict(rows, named, 4).startswith(said)
