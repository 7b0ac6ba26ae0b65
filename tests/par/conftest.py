"""Tiny models of every form, and a run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough import ParConfig, ParForCausalLM
from deepenough.config import resolve
from deepenough.par.config import ParTrainConfig
from deepenough.par.modeling import new_model
from deepenough.par.training import train

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 24,
    "mem_len": 4,
    "length": 5,
    "div_value": 2.0,
    "dropout": 0.0,
}


@pytest.fixture
def make_config() -> Callable[..., ParConfig]:
    return lambda **changes: ParConfig(**(SIZES | changes))


@pytest.fixture
def make_model(make_config: Callable[..., ParConfig]) -> Callable[..., ParForCausalLM]:
    """In evaluation mode, with every parameter away from zero and a search that leans somewhere."""

    def make(seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        model = new_model(make_config(**changes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() <= 1 or name == "choice.alpha":
                    parameter.add_(0.5 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that tests take copies of."""
    return tmp_path_factory.mktemp("originals")


@pytest.fixture
def trained(tmp_path: Path, originals: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    """A finished training of the pattern `da` for one step, one's own copy."""
    if not (originals / "train").exists():
        settings = tiny(originals / "train", {"model.pattern": "da"}, steps=1)
        train(resolve(ParTrainConfig, None, settings))
    return Path(shutil.copytree(originals / "train", tmp_path / "trained"))
