"""From a checkpoint and keyword arguments to the config of a pondering model.

Keyword arguments of `from_pretrained` are of three kinds: those of the config, which includes the
options of pondering; those of the hub, which are needed to read the config as well; and those of
loading, which are left for transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from deepenough.ponder.config import OPTIONS

HUB = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    *("token", "trust_remote_code"),
)
LABELS = ("num_labels", "id2label", "label2id", "problem_type")


def read_config(name: Any, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The config of a checkpoint by name or folder; one given as `config` is taken instead."""
    given = kwargs.pop("config", None)
    if isinstance(given, PreTrainedConfig):
        return given
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    config: PreTrainedConfig = AutoConfig.from_pretrained(given or name, **hub)
    return config


def take_changes(config: PreTrainedConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `kwargs` what is to be changed in a config, options of pondering included."""
    of_loading = {*HUB, "dtype", "attn_implementation"}
    changes = {
        key: kwargs.pop(key)
        for key in list(kwargs)
        if key in OPTIONS or key in LABELS or (hasattr(config, key) and key not in of_loading)
    }
    if "num_labels" in changes and len(changes.get("id2label") or ()) != changes["num_labels"]:
        # Names of other labels than these: those of the checkpoint are not kept either.
        changes["id2label"] = changes["label2id"] = None
    return changes


def changed(config: PreTrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The values of a config with changes, to make another from."""
    values = config.to_dict()
    values.pop("model_type", None)
    # Neither is saved with a config, and both must outlive its change.
    values["name_or_path"] = config._name_or_path
    values["attn_implementation"] = config._attn_implementation
    return {**values, **changes}
