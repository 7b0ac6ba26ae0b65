"""How often decoding waits for a device: each read of a tensor's values by Python is a wait.

On a GPU such a read stops the program until everything before it is computed. There is none here,
so the reads themselves are counted, at every call that needs a value on the host.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import deepenough as de
from deepenough.decoding.eagle3 import Eagle3Drafter
from tests.decoding.test_eagle3 import make_head

READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}
NEW_TOKENS, WIDTH = 24, 32


class HostReads(TorchFunctionMode):
    """Counts reads of values, by the name of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or (name in ("__getitem__", "__setitem__") and is_mask(args[1])):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def is_mask(index: Any) -> bool:
    """Return whether an index is of truth values, whose number must be known on the host."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def reads_in(model: Any, inputs: dict[str, Tensor], new_tokens: int) -> tuple[int, Any]:
    """Return the reads of a call of `generate()`, and what it returned."""
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    with HostReads() as counted:
        output = model.generate(**inputs, max_new_tokens=new_tokens, **options)
    return counted.calls.total(), output


def added_reads(model: Any, inputs: dict[str, Tensor]) -> tuple[int, int, Any]:
    """Return reads and passes that come with more tokens, beyond those of one call."""
    reads_in(model, inputs, NEW_TOKENS)  # what a first call measures of the machine
    first, short = reads_in(model, inputs, 4)
    last, long = reads_in(model, inputs, NEW_TOKENS)
    return last - first, long.passes - short.passes, long


def test_reads_are_noticed():
    values = torch.tensor([1.0, 2.0])
    with HostReads() as counted:
        values.tolist(), values[0].item(), bool(values[0] > 0), values[values > 1]
        values.add(1), values[[0]], values[values.argmax()]
    assert counted.calls == {"tolist": 1, "item": 1, "__bool__": 1, "__getitem__": 1}


# In a padded batch transformers itself looks whether its mask has any padding, once a pass.
@pytest.mark.parametrize("backend, rows", [("torch", 2), ("general", 1)])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_pass_reads_its_tokens_and_nothing_else(small, prompts, backend, rows, drafts):
    drafter = "lookup" if drafts else "none"
    fast = de.speculate(small, drafter, num_draft_tokens=drafts or None, backend=backend)
    reads, passes, output = added_reads(fast, prompts(rows))
    assert output.backend == backend
    assert reads == passes > 0


def test_drafts_of_a_map_are_read_once_a_pass(small, prompts, shortcuts):
    fast = de.speculate(small, "shortcut", shortcuts=shortcuts, draft_layer=1, num_draft_tokens=2)
    reads, passes, output = added_reads(fast, prompts(1))
    assert output.drafted > 0
    assert passes < reads <= 2 * passes


def test_drafts_of_a_head_are_read_once_a_pass(small, prompts):
    fast = de.speculate(small, drafter=[Eagle3Drafter(make_head(small), 3)], backend="torch")
    reads, passes, output = added_reads(fast, prompts(1))
    assert output.drafted > 0
    assert passes < reads <= 2 * passes


def test_an_exit_check_reads_its_decision_once(small, prompts, shortcuts):
    slow = de.early_exit(small, shortcuts, threshold=1.0, exit_layers=[1, 2], kv_propagation="copy")
    reads, passes, _ = added_reads(slow, prompts(1))
    assert reads == 3 * passes > 0, "two checks and the token"


class MapCopies(TorchDispatchMode):
    """Counts copies of matrices as wide as the states: maps that are moved or converted."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to)
        if copies and found.shape == (WIDTH, WIDTH) and found.dtype != args[0].dtype:
            self.number += 1
        return found


@pytest.mark.parametrize("way", ["exit, maps fill the cache", "exit, copied", "drafts of a map"])
def test_a_map_is_moved_once(small, prompts, shortcuts, way):
    # Between formats, since there is one device here: both are the same call.
    small, inputs = small.double(), prompts(1)
    shortcuts._kept.clear()  # other tests share them
    if way == "drafts of a map":
        options = {"draft_layer": 1, "num_draft_tokens": 2}
        fast = de.speculate(small, "shortcut", shortcuts=shortcuts, **options)
    else:
        fill = "copy" if way == "exit, copied" else "shortcut"
        fast = de.early_exit(small, shortcuts, 0.0, exit_layers=[1], kv_propagation=fill)
    with MapCopies() as copies:
        reads_in(fast, inputs, 4)
        first = copies.number
        assert 0 < first <= 3
        reads_in(fast, inputs, NEW_TOKENS)
    assert copies.number == first
