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
from deepenough.training import checkpoint as checkpoints

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
        folder = Path(name or "", kwargs.get("subfolder", "")) if name is not None else None
        try:
            if folder is not None and folder.is_dir():
                kwargs |= _checked(cls, folder, kwargs)
                name = None if "state_dict" in kwargs else name
            loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except (RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise UserError(
                f"The weights in {folder or name} are not those of a {cls.__name__}, or are "
                f"damaged: give the folder that one was saved to ({reason})."
            ) from error
        model, info = loaded
        _check_weights(cls, folder or name, model, info)
        if folder is not None and name is None and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return (model, info) if wants_info else model


def _checked(cls: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Check a folder; return options that replace weights which are damaged by a checkpoint's."""
    try:
        if not verify(folder):
            _say_unsealed(folder)
        return {}
    except DamagedError as error:
        verify(folder, without=WEIGHTS)  # all but the weights must be good
        try:
            found, _ = checkpoints.load_last(folder.parent / "checkpoints")
        except UserError:
            found = None
        if found is None:
            raise
        log.warning("%s The weights of its checkpoint at step %d are used.", error, found.step)
        options = {name: value for name, value in options.items() if name != "subfolder"}
        if options.get("config") is None:
            config, _ = cls.config_class.from_pretrained(
                folder, return_unused_kwargs=True, **options
            )
            options["config"] = config
        return options | {"state_dict": found.model}


@functools.cache
def _say_unsealed(folder: Path) -> None:
    log.warning(
        "%s has no checksums, as other software has saved it: whether it is whole is not known.",
        folder,
    )


def _check_weights(cls: Any, place: Any, model: Any, info: dict[str, Any]) -> None:
    """Refuse a model some of whose weights are new, left over or not finite."""
    missing, left_over = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if cls.adds_heads and cls.__name__ not in (model.config.architectures or ()):
        inner = f"{cls.base_model_prefix}."
        missing = [key for key in missing if key.startswith(inner) and ".pooler" not in key]
        left_over = []
    if missing or left_over:
        what = f"there is no {missing[0]}" if missing else f"{left_over[0]} belongs nowhere"
        raise UserError(
            f"The weights in {place} are not those of the {cls.__name__} that its config.json "
            f"describes ({what}): give the folder that one was saved to by this version."
        )
    for key, weight in model.named_parameters():
        if not weight.is_meta and not bool(weight.isfinite().all()):
            raise UserError(
                f"The weights in {place} are damaged: {key} is not finite; restore them from a "
                "copy, or train anew."
            )
