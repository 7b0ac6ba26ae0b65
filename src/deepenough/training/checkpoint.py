"""What a training leaves on disk: checkpoints, and models that are loaded as they were saved.

A checkpoint is written under a temporary name and renamed when everything is on disk, so that a
kill or a full disk at any moment leaves the previous one as it was. It has checksums: one that was
damaged, or into which a file of another was put, is passed over. Nothing is pickled. Randomness
needs no place in it: the loop derives every seed from the run's seed and the step.

transformers fills what a file of weights lacks with new ones and warns. For models of our own that
is refused, and so is a file that is not the one which was saved.
"""

import functools
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from deepenough.artifacts import ASIDE, DamagedError, atomic_path, restore, seal, verify
from deepenough.devices import move_to_device
from deepenough.errors import UserError
from deepenough.runs import RunFolder, model_folder
from deepenough.training.logging import without_bars, writing
from deepenough.training.sharding import share_like

log = logging.getLogger("deepenough")

_PREFIX = "step-"
_STATE = "state.json"
_PARTS = ("model", "optimizers", "task")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after a step, as it stands on disk."""

    step: int
    model: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    task: dict[str, Tensor]
    """State that follows the data, all streams of it."""
    values: dict[str, Any]
    """Small things: what the run is about, and what it has counted."""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write one checkpoint, then delete all but the last `keep`.

    Later ones go too: they are of a past from which the run did not go on.
    """
    final = folder / f"{_PREFIX}{checkpoint.step:09d}"
    with writing(final), atomic_path(final) as partial:
        partial.mkdir(parents=True)
        for part in _PARTS:
            # Tied weights share memory, which safetensors refuses; they are written twice.
            tensors = getattr(checkpoint, part).items()
            copies = {name: value.detach().cpu().clone() for name, value in tensors}
            save_file(copies, partial / f"{part}.safetensors")
        content = {"step": checkpoint.step} | checkpoint.values
        (partial / _STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        seal(partial)
    names = list_names(folder)
    kept = names[: names.index(final.name) + 1][-keep:]
    for name in names:
        if name not in kept:
            shutil.rmtree(folder / name, ignore_errors=True)
    return final


def load_last(folder: Path, mapped: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that can be read, and the names of newer ones that cannot.

    Tensors that are `mapped` are read from the files when something asks for them, and processes of
    one machine share them. A UserError if there are checkpoints but none is readable.
    """
    damaged: list[str] = []
    for name in reversed(list_names(folder)):
        try:
            return _load(folder / name, mapped), damaged
        except (OSError, ValueError, TypeError, KeyError, SafetensorError, DamagedError):
            damaged.append(name)
    if damaged:
        raise UserError(
            f"No checkpoint in {folder} can be read ({', '.join(damaged)} damaged or truncated); "
            "start anew with --overwrite."
        )
    return None, []


def list_names(folder: Path) -> list[str]:
    """Return the checkpoints that are there, oldest first."""
    if not folder.is_dir():
        return []
    for aside in folder.glob(f"{_PREFIX}*{ASIDE}"):
        restore(aside.with_name(aside.name.removesuffix(ASIDE)))
    names = (entry.name for entry in folder.iterdir())
    return sorted(n for n in names if n.startswith(_PREFIX) and not n.endswith(".tmp"))


def _load(path: Path, mapped: bool) -> Checkpoint:
    verify(path)
    values = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if f"{_PREFIX}{values['step']:09d}" != path.name:
        raise ValueError("it is of another step")
    # Copies, because what is loaded is mapped from the file at any alignment, on which the last bit
    # of a matrix product may depend.
    tensors = {
        part: {
            name: value if mapped and value.dim() and part != "task" else value.clone()
            for name, value in load_file(path / f"{part}.safetensors").items()
        }
        for part in _PARTS
    }
    return Checkpoint(step=values.pop("step"), **tensors, values=values)


def optimizer_tensors(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's state as named tensors: `name.parameter.key`."""
    state = flatten(optimizer.state_dict()["state"], f"{name}.")
    return {key: torch.as_tensor(value) for key, value in state.items()}


def restore_optimizer(
    name: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Load an optimiser's state from the tensors that `optimizer_tensors` named.

    Where the weights are divided among processes, each takes its share.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        owner, index, key = full_name.split(".", 2)
        if owner == name:
            state.setdefault(int(index), {})[key] = share_like(value, weights[int(index)])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], run: RunFolder) -> None:
    """Refuse a checkpoint of other settings, naming the first in which it and the run differ."""
    before, now = flatten(saved), flatten(current)
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            raise UserError(
                f"The checkpoint in {run.path} is of another configuration: {key} was "
                f"{before[key]} and is now {now[key]}; give the same settings or another folder."
            )


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# -- models of our own -----------------------------------------------------------------------------

WEIGHTS = ".safetensors"
_WRITTEN = ("config.json", "generation_config.json", f"*{WEIGHTS}", f"*{WEIGHTS}.index.json")


class SealedPreTrainedModel(PreTrainedModel):
    """A model that is saved with checksums, and loaded as it was saved or not at all."""

    adds_heads: ClassVar[bool] = False
    """Whether weights of another class may be loaded, to which this one adds new heads."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Save as transformers does, then write the checksums of what was saved."""
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            folder = Path(save_directory)
            seal(folder, {path.name for pattern in _WRITTEN for path in folder.glob(pattern)})

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load as transformers does.

        Files that are not those that were saved are refused, unless a checkpoint of the run has the
        weights, and so are weights that are not finite or not those of such a model.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        folder = Path(str(name), kwargs.get("subfolder", ""))
        saved = _saved_weights(folder)
        if saved is not None:
            if kwargs.get("config") is None:
                kind: Any = cls.config_class
                config, kwargs = kind.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
                kwargs["config"] = config
            kwargs["state_dict"] = saved
        try:
            loaded: Any = super().from_pretrained(
                name if saved is None else None, *args, output_loading_info=True, **kwargs
            )
        except (RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise UserError(
                f"The weights in {folder} are not those of a {cls.__name__}, or are damaged: give "
                f"the folder that one was saved to ({reason})."
            ) from error
        model, info = loaded
        _check_weights(cls, folder, model, info)
        if saved is not None and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return loaded if wants_info else model


def load_finished(run: str, kind: Any, instead: str) -> tuple[Any, Any]:
    """Return the model and tokenizer of a finished run, or of a folder in Hugging Face form.

    A model that is not of this `kind` is refused, saying what to do `instead`.
    """
    from deepenough.data.tokenizer import load_tokenizer
    from deepenough.hf.loading import from_pretrained, saved_class

    folder = str(model_folder(run))
    own = saved_class(run, folder)
    if own is None or not issubclass(own, kind):
        name = "model of another kind" if own is None else own.__name__
        raise UserError(f"The model in {run} is a {name}, {instead}.")
    with without_bars():
        model = from_pretrained(own, folder, "model", name=run, trust_remote_code=None)
    return move_to_device(model.eval()), load_tokenizer(folder)


def _saved_weights(folder: Path) -> dict[str, Any] | None:
    """Check a folder; where only its weights are damaged, return those of the run's checkpoint."""
    try:
        if not verify(folder) and folder.is_dir():
            _say_unsealed(folder)
        return None
    except DamagedError as error:
        verify(folder, without=WEIGHTS)
        try:
            found, _ = load_last(folder.parent / "checkpoints")
        except UserError:  # all of them are damaged, too
            found = None
        if found is None:
            raise
        log.warning("%s The weights of its checkpoint at step %d are used.", error, found.step)
        return found.model


@functools.cache
def _say_unsealed(folder: Path) -> None:
    log.warning("%s has no checksums, so nothing tells whether it is as it was saved.", folder)


def _check_weights(cls: Any, folder: Path, model: Any, info: dict[str, Any]) -> None:
    """Refuse a model some of whose weights are new, left over or not finite."""
    missing, left_over = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if cls.adds_heads and cls.__name__ not in (model.config.architectures or ()):
        inner = f"{cls.base_model_prefix}."
        missing = [key for key in missing if key.startswith(inner) and ".pooler" not in key]
        left_over = []
    weights = model.named_parameters()
    infinite = (key for key, w in weights if not (w.is_meta or w.isfinite().all()))
    if missing or left_over:
        what = f"there is no {missing[0]}" if missing else f"{left_over[0]} belongs nowhere"
    elif (key := next(infinite, None)) is not None:
        what = f"{key} is not finite"
    else:
        return
    raise UserError(
        f"The weights in {folder} are not those of a {cls.__name__} as its config.json describes "
        f"it ({what}): give the folder that one was saved to by this version."
    )
