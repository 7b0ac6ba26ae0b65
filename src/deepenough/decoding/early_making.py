"""The way to leave early, from what a user gives: a guarantee, or a policy and its surroundings."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from deepenough.decoding.calibrated import Calibrated
from deepenough.decoding.engine import Engine
from deepenough.decoding.filling import Fill
from deepenough.decoding.leaving import EarlyExit
from deepenough.decoding.planning import choose_exits
from deepenough.decoding.policies import ConfidenceGap, ExitPolicy
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts

Guarantee = Calibrated | str | os.PathLike[str]


def make_early(
    engine: Engine,
    shortcuts: Shortcuts | None,
    guarantee: Guarantee | None = None,
    policy: ExitPolicy | None = None,
    exits: Sequence[int] | None = None,
    fill: Fill | None = None,
    shortlist: Tensor | None = None,
) -> EarlyExit:
    """What is not given is as was guaranteed; without a guarantee, exits are chosen here."""
    if shortcuts is None:
        raise UserError("An exiting model needs shortcuts: give those fitted for it.")
    if guarantee is not None:
        given = {"policy": policy, "exits": exits, "fill": fill, "shortlist": shortlist}
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"A guarantee holds for the {name} it was made with: leave out {name}, or the "
                    "guarantee."
                )
        found = guarantee if isinstance(guarantee, Calibrated) else Calibrated.load(guarantee)
        early = found.early(shortcuts, engine.adapter)
    else:
        any_exit = [1] if exits is None else list(exits)
        policy = policy or ConfidenceGap(0.9)
        early = EarlyExit(shortcuts, policy, any_exit, fill or "shortcut", shortlist)
    early.check(engine)
    if guarantee is None and exits is None:
        early.layers = choose_exits(engine, early)
    return early
