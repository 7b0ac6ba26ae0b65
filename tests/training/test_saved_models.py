"""Our own models are loaded as they were saved, or refused; none gets a random weight unsaid."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertModel, AutoModelForCausalLM

from deepenough import LazyTransformerForConditionalGeneration, ParConfig, ParForCausalLM
from deepenough.errors import UserError
from deepenough.training.checkpoint import Checkpoint, _say_unsealed, save


@pytest.fixture
def model() -> ParForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 32, "mem_len": 4, "length": 4}
    return ParForCausalLM(ParConfig(20, pattern="ada", **sizes)).eval()


@pytest.fixture
def folder(model: ParForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "run" / "model")
    return tmp_path / "run" / "model"


def refusal(folder: Path, kind: Any = ParForCausalLM) -> str:
    with pytest.raises(UserError) as refused:
        kind.from_pretrained(folder)
    return str(refused.value)


def change(folder: Path, changes: dict[str, Any]) -> None:
    """Change tensors of a model that other software has saved, without checksums."""
    (folder / "checksums.json").unlink()
    weights = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_a_flipped_bit_is_refused_by_every_way_to_load(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 64
    (folder / "model.safetensors").write_bytes(content)
    for kind in (ParForCausalLM, AutoModelForCausalLM):
        assert "model.safetensors is not the file that was saved" in refusal(folder, kind)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm.bias": None}, "there is no norm.bias"),
        ({"input_table.weight": torch.ones(3)}, "input_table.weight belongs nowhere"),
        ({"norm.bias": torch.full((16,), torch.nan)}, "norm.bias is not finite"),
        ({"norm.bias": torch.ones(17)}, "are not those of a ParForCausalLM"),
    ],
)
def test_weights_of_another_model_are_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    change(folder, changes)
    assert said in refusal(folder)


def test_an_albert_in_a_par_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    AlbertModel(AlbertConfig(vocab_size=20, embedding_size=8, **sizes)).save_pretrained(tmp_path)
    shutil.copyfile(tmp_path / "model.safetensors", folder / "model.safetensors")
    assert "is not the file that was saved" in refusal(folder)
    (folder / "checksums.json").unlink()
    assert "are not those of a ParForCausalLM" in refusal(folder)


def test_options_that_are_no_more_are_refused(folder: Path) -> None:
    """Such a model has other weights than its config gives today."""
    config = json.loads((folder / "config.json").read_text()) | {"adaptive_input": True}
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, {"embedding.weight": None, "embedding.tables.0.weight": torch.ones(3, 4)})
    assert "there is no embedding.weight" in refusal(folder)


def test_a_folder_without_checksums_is_loaded_and_that_said_once(
    folder: Path, model: ParForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    _say_unsealed.cache_clear()
    (folder / "checksums.json").unlink()
    for _ in range(2):
        loaded = ParForCausalLM.from_pretrained(folder)
    assert caplog.text.count("has no checksums") == 1
    assert torch.equal(loaded.norm.weight, model.norm.weight)


def test_damaged_weights_are_taken_from_the_last_good_checkpoint(
    folder: Path, model: ParForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 8):
        found = Checkpoint(step, dict(model.state_dict()), {}, {}, {})
        last = save(folder.parent / "checkpoints", found, keep=2)
    (folder / "model.safetensors").write_bytes(b"?")
    ids = torch.arange(6)[None]
    for step in (8, 4):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded, info = ParForCausalLM.from_pretrained(
                folder, output_loading_info=True, mem_len=2
            )
        assert f"The weights of its checkpoint at step {step} are used." in caplog.text
        assert loaded.config.mem_len == 2 and not info["missing_keys"]
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        (last / "model.safetensors").unlink(missing_ok=True)
    shutil.rmtree(folder.parent / "checkpoints")
    assert "restore it from a copy, or make it anew" in refusal(folder)


def test_a_language_model_is_no_translator(folder: Path) -> None:
    refused = pytest.raises((UserError, ValueError, AttributeError, TypeError))
    with refused:
        LazyTransformerForConditionalGeneration.from_pretrained(folder)
