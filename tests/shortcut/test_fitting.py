"""One fit is one fit: whole, or killed and resumed."""

import copy
import errno
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.shortcut import fitting, normal_equations
from deepenough.shortcut.lens import lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.statistics import LayerStatistics


def assert_same(one: Shortcuts, two: Shortcuts) -> None:
    assert one.pairs == two.pairs and len(one.pairs) > 0
    assert one.biases.keys() == two.biases.keys()
    for name in ("maps", "biases"):
        for pair, tensor in getattr(one, name).items():
            assert torch.equal(tensor, getattr(two, name)[pair]), pair
    assert torch.equal(one.cka(), two.cka())


@pytest.mark.parametrize("positions", ["all", "random"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_fit_is_fit_states_on_what_is_collected(
    name: str, positions: Any, request: pytest.FixtureRequest, texts: list[str], iterate_states: Any
) -> None:
    model = request.getfixturevalue(name).double()
    tokenizer = request.getfixturevalue("plain" if name == "gpt2" else "wrapped")
    shortcuts = Shortcuts.fit(model, tokenizer, texts, positions, affine=True, seed=3)
    found = list(iterate_states(adapt(model), tokenizer, texts, positions=positions, seed=3))
    states = [torch.cat(layer) for layer in zip(*(states for _, states in found), strict=True)]
    expected = Shortcuts.fit_states(states, affine=True)
    for pair in expected.pairs:
        torch.testing.assert_close(shortcuts.matrix(*pair), expected.matrix(*pair))
        torch.testing.assert_close(shortcuts.bias(*pair), expected.bias(*pair))
    assert shortcuts.meta["fit"]["positions"] == len(states[0])
    assert shortcuts.meta["model"]["width"] == 16
    assert shortcuts.meta["data"]["texts"] == 150 and shortcuts.meta["data"]["skipped"] > 0
    record = shortcuts.record()
    assert (record.kind, record.values["positions"]) == ("fit", len(states[0]))
    assert record.values["pairs"] == len(expected.pairs) and record.values["seconds"] > 0


def test_maps_of_a_single_precision_model_are_single(
    gpt2: Any, plain: Any, texts: list[str]
) -> None:
    shortcuts = Shortcuts.fit(gpt2, plain, texts, targets="last")
    assert {matrix.dtype for matrix in shortcuts.maps.values()} == {torch.float32}
    exact = Shortcuts.fit(gpt2.double(), plain, texts, targets="last")
    for pair in exact.pairs:
        torch.testing.assert_close(
            shortcuts.matrix(*pair).double(), exact.matrix(*pair), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("targets", ["all", "last"])
def test_sums_that_memory_has_no_room_for_are_kept_in_files(
    gpt2: Any,
    plain: Any,
    texts: list[str],
    targets: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"targets": targets, "affine": True, "resume": tmp_path / "sums"}
    expected = Shortcuts.fit(gpt2.double(), plain, texts, targets=targets, affine=True)
    assert "kept in files" not in caplog.text
    made: list[Path] = []
    in_file = normal_equations.zeros_in_file

    def noted(folder: Path, *shape: int) -> torch.Tensor:
        made.append(folder)
        return in_file(folder, *shape)

    monkeypatch.setattr(normal_equations, "zeros_in_file", noted)
    found = Shortcuts.fit(gpt2, plain, texts, memory=1e-6, **options)
    assert made == [tmp_path / "sums"] * 4, "one for each layer"
    assert "kept in files" in caplog.text
    assert list((tmp_path / "sums").iterdir()) == [], "they go with the process"
    exact = {"rtol": 1e-12, "atol": 1e-12}
    assert found.pairs == expected.pairs and len(found.biases) == len(found.pairs)
    for pair in expected.pairs:
        torch.testing.assert_close(found.matrix(*pair), expected.matrix(*pair), **exact)
        torch.testing.assert_close(found.bias(*pair), expected.bias(*pair), **exact)
    torch.testing.assert_close(found.cka(), expected.cka(), equal_nan=True, **exact)


def test_where_sums_go(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda": 10e9, "cpu": 100e9}
    monkeypatch.setattr(fitting, "free_memory", lambda device: free[device.type])
    size = 3 * 1000 * 1000 * 8 * 1.3  # one layer: two matrices of its own and one between
    place = functools.partial(fitting.place_sums, 1, 1000)
    assert fitting.statistics_bytes(1, 1000) * 1.3 == size
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert place("all", cuda) == (cuda, False, 10e9)
    free["cuda"] = size - 1
    assert place("all", cuda) == (cpu, False, 100e9)
    assert place("all", torch.device("mps")).device == cpu
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    free["cpu"] = 4 * size
    assert place("all", cuda) == (cpu, False, size)
    free["cpu"] = 4 * size - 4
    assert place("all", cuda) == (cpu, True, size - 1)
    assert place("all", cuda, memory=size).on_disk is False


def test_what_neither_memory_nor_disk_holds_is_refused(
    gpt2: Any, plain: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *shape: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(normal_equations, "zeros_in_file", full)
        with pytest.raises(UserError, match=r"No space left on device.*larger disk, or fit"):
            Shortcuts.fit(gpt2, plain, texts, memory=0, resume=tmp_path)
    monkeypatch.setattr(fitting, "free_memory", lambda device: 1e4)
    with pytest.raises(UserError, match=r"The maps take .* GB of memory"):
        Shortcuts.fit(gpt2, plain, texts)


def test_a_model_on_several_devices_and_disk_is_fitted_as_one(
    plain: Any, texts: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 95, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    plain.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(places))
    whole, _ = load(str(tmp_path / "model"))
    model, tokenizer = load(
        str(tmp_path / "model"),
        device_map=str(tmp_path / "map.json"),
        offload_folder=str(tmp_path / "offloaded"),
    )
    assert model.model.layers[2].mlp.up_proj.weight.is_meta, "its weights wait on disk"
    assert adapt(model).identity()["fingerprint"] == adapt(whole).identity()["fingerprint"]
    expected = Shortcuts.fit(whole, plain, texts, ridge=0.1)
    assert_same(Shortcuts.fit(model, tokenizer, texts, ridge=0.1), expected)
    with pytest.raises(UserError, match=r"device map .* cannot be read"):
        load(str(tmp_path / "model"), device_map=str(tmp_path / "none.json"))


class Killed(Exception):
    """Stands for the end of the process."""


def test_an_interrupted_fit_goes_on_to_the_same_bits(
    gpt2: Any, plain: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_tokens": 200, "save_every": 0.0}
    whole = Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "whole", **options)
    update = LayerStatistics.update
    ran: list[int] = []

    def counted(self: LayerStatistics, states: Any) -> None:
        if len(ran) in stops:
            stops.remove(len(ran))
            raise Killed
        ran.append(1)
        update(self, states)

    stops = {4, 9, 10}
    monkeypatch.setattr(LayerStatistics, "update", counted)
    for _ in range(3):
        with pytest.raises(Killed):
            Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "parts", **options)
    parts = Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "parts", **options)
    assert_same(whole, parts)
    once = len(ran)
    again = Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "parts", **options)
    assert len(ran) == once, "a finished fit runs nothing again"
    assert_same(whole, again)
    ran.clear()
    Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "counted", **options)
    assert len(ran) == once, "nothing was run twice"
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [
        "statistics-00000.safetensors"
    ]


def test_a_real_kill(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_fit.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "killed")], env=environment, stderr=-1
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (tmp_path / "killed" / "statistics-00000.safetensors").is_file()
    fit = runpy.run_path(str(script))["fit"]
    calls: list[int] = []
    resumed = fit(tmp_path / "killed", lambda done, total: calls.append(done))
    assert calls and min(calls) > 30, "what was done is not done again"
    assert_same(resumed, fit(tmp_path / "whole"))


def test_what_cannot_be_resumed_is_said(
    gpt2: Any,
    plain: Any,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "fit"
    options = {"resume": folder, "save_every": 0.0, "batch_tokens": 200}
    with monkeypatch.context() as patch:
        patch.setattr(LayerStatistics, "solve", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            Shortcuts.fit(gpt2, plain, texts, **options)
    for changed, said in (
        ({"seed": 1}, "seed = 0 where this has 1"),
        ({"affine": True}, "affine = False"),
        ({"texts": ["w5 w5", *texts]}, "not those that the fit in the folder began with"),
        ({"texts": texts[:9]}, "not those that the fit"),
    ):
        with pytest.raises(UserError, match=said):
            Shortcuts.fit(gpt2, plain, changed.pop("texts", texts), **(options | changed))
    other = copy.deepcopy(gpt2)
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight += 1
    with pytest.raises(UserError, match="holds another fit, with model"):
        Shortcuts.fit(other, plain, texts, **options)
    statistics = folder / "statistics-00000.safetensors"
    statistics.write_bytes(statistics.read_bytes()[:500])
    caplog.clear()
    Shortcuts.fit(gpt2, plain, texts, **options)
    assert "statistics-00000.safetensors is damaged" in caplog.text
    assert "The fit begins again." in caplog.text
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        Shortcuts.fit(gpt2, plain, texts, resume=tmp_path / "file")


def test_texts_that_give_no_positions(gpt2: Any, plain: Any) -> None:
    for texts, said in (
        ([], "no position"),
        (["", "w1"], "no position"),
        (["w1 w2 w3"], "3 positions do not determine maps of width 16: give at least 16"),
    ):
        with pytest.raises(UserError, match=said):
            Shortcuts.fit(gpt2, plain, texts)
    assert Shortcuts.fit(gpt2, plain, ["w1 w2 w3"], ridge=0.1).num_layers == 3


def test_shortcuts_of_another_model_are_refused(
    gpt2: Any, bert: Any, plain: Any, texts: list[str]
) -> None:
    shortcuts = Shortcuts.fit(gpt2, plain, texts, targets="last")
    adapt(gpt2).check_made_for(shortcuts.made_for, "These shortcuts")
    with pytest.raises(UserError, match=r"^These shortcuts were made for .*3 layers.*2 layers"):
        lens(bert, plain, shortcuts, "w1 w2")
    with torch.no_grad():
        gpt2.transformer.h[1].attn.c_attn.weight += 1
    with pytest.raises(UserError, match="with other weights"):
        lens(gpt2, plain, shortcuts, "w1 w2")
    shortcuts.meta.clear()  # imported maps know the shape of their model alone
    adapt(gpt2).check_made_for(shortcuts.made_for, "These shortcuts")
