"""How deepenough's own models are saved and loaded: with checksums, and never with random weights.

transformers fills what a file of weights lacks with new ones and warns. Here that is refused, and
so is a file that is not the one which was saved. A model that other software has saved has no
checksums: that is said once, and the model is loaded.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel

from deepenough.artifacts import DamagedError, seal, verify
from deepenough.errors import UserError
from deepenough.training.checkpoint import load_last

log = logging.getLogger("deepenough")

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

        Raises:
            UserError: The files are not those that were saved, and no checkpoint of the run has
                the weights, or the weights are not finite or not those of such a model.
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
    infinite = (key for key, w in model.named_parameters() if not w.is_meta and not _is_finite(w))
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


def _is_finite(weight: Any) -> bool:
    return bool(weight.isfinite().all())
