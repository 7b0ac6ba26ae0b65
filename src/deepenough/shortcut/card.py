"""The card that goes to the hub with shortcuts: what they are, and how to load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepenough.shortcut.shortcuts import Shortcuts

_TEXT = """---
library_name: deepenough
tags: [deepenough, shortcuts, early-exit, interpretability]
{base}---

# Shortcuts{of}

{kind} maps between the layers of a model ("Jump to Conclusions", arXiv 2303.09435): {pairs} pairs
of {num_states} states of width {width}{positions}.

```python
from deepenough import Shortcuts

shortcuts = Shortcuts.from_pretrained("{name}")
hidden = shortcuts.apply(hidden, 0, {num_layers})  # from the input of the first layer to the last
```
"""


def text(name: str, shortcuts: Shortcuts) -> str:
    """The README of a repository that holds `shortcuts`."""
    model = (shortcuts.meta.get("model") or {}).get("model")
    positions = shortcuts.meta.get("fit", {}).get("positions")
    is_hub_name = (
        bool(model) and str(model).count("/") == 1 and not str(model).startswith((".", "/"))
    )
    return _TEXT.format(
        base=f"base_model: {model}\n" if is_hub_name else "",
        of=f" for {model}" if is_hub_name else "",
        kind="Affine" if shortcuts.affine else "Linear",
        pairs=len(shortcuts.maps),
        num_states=shortcuts.num_layers + 1,
        num_layers=shortcuts.num_layers,
        width=shortcuts.width,
        positions=f", fitted on {positions:,} positions" if positions else "",
        name=name,
    )
