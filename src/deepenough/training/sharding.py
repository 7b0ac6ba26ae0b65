"""A model divided among processes (FSDP2): each keeps a share of every weight, gradient and moment.

Weights are gathered where they are needed: the layers that a task names one at a time, all others
for the length of a step. What a single weight would make no smaller, and what a task reads between
steps, stays whole in every process. To be measured and saved, the model is gathered into a plain
one, so that neither methods nor files know that it was divided. Checkpoints hold whole tensors:
they are those of one process, and any number of processes takes its shares from them.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

Parameters = Iterable[nn.Parameter]


class Shardable(Protocol):
    """What must be known of a task to divide its model."""

    model: Any

    def gathered_layers(self) -> list[nn.Module]:
        """Return the parts that are gathered one at a time."""

    def undivided(self) -> list[nn.Parameter]:
        """Return the weights that every process keeps whole."""


class ShardedModel:
    """A model in shares, and its plain twin, which has weights only when they are gathered."""

    def __init__(self, task: Shardable, accelerator: Accelerator) -> None:
        """Divide the model of a task, in place, as the first process has it."""
        self.model: nn.Module = task.model
        layers = _once_each(self.model, task.gathered_layers())
        scalars = (p for p in self.model.parameters() if p.dim() == 0)
        self._undivided = {*task.undivided(), *scalars}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.whole = _twin(self.model, self._undivided)
        self._used: set[nn.Parameter] = set()
        self._hooks: dict[nn.Module, Any] = {}
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for part in (*layers, self.model):
            # Before `fully_shard`, so that it runs while the part's weights are gathered.
            self._hooks[part] = part.register_forward_hook(self._watch)
            part.register_forward_hook(_own_memory)
            fully_shard(part, mesh=mesh, ignored_params=self._undivided)
        root: Any = self.model
        # What a batch leaves unused in one process may be used in another.
        root.set_reduce_scatter_unused_params(True)
        self._places = {
            (id(module), name): parameter
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }

    def _watch(self, part: nn.Module, *_: object) -> None:
        """Note from now on which weights of a part, gathered for its first pass, get a gradient."""
        self._hooks.pop(part).remove()
        for module in part.modules():
            for name, gathered in module.named_parameters(recurse=False):
                if not isinstance(gathered, DTensor) and gathered.requires_grad:
                    own = self._places[id(module), name]
                    gathered.register_post_accumulate_grad_hook(partial(self._note, own))

    def _note(self, parameter: nn.Parameter, _: Tensor) -> None:
        self._used.add(parameter)

    def finish_gradients(self) -> None:
        """Make the gradients what one process would have: of all, and none where none was used.

        torch has averaged those of shares by now. A weight that no process has used must not even
        decay, though it has a gradient of zeros.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        device = trained[0].device
        flags = torch.tensor([float(p in self._used) for p in trained], device=device)
        dist.all_reduce(flags)
        for parameter, num_users in zip(trained, flags.tolist(), strict=True):
            if not num_users:
                parameter.grad = None
            elif parameter in self._undivided:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            elif parameter.grad is None:
                raise RuntimeError("torch has not gathered the gradients of a divided model")
        self._used.clear()

    @torch.no_grad()
    def gather(self) -> nn.Module:
        """Return the plain twin with all weights; to be called in all processes."""
        parts, twins = self.model.named_parameters(), self.whole.named_parameters()
        for (name, part), (same_name, twin) in zip(parts, twins, strict=True):
            assert name == same_name
            if isinstance(part, DTensor):
                twin.data = part.full_tensor()
        return self.whole

    def release(self) -> None:
        """Give up the weights that were gathered."""
        for twin in self.whole.parameters():
            if twin not in self._undivided:
                twin.data = twin.data.new_empty(0)


def _own_memory(_: nn.Module, __: object, output: Any) -> Any:
    """Return the output of a part without views: changed in place, these lose torch's hooks."""
    return tree_map_only(Tensor, lambda each: each.clone() if each._is_view() else each, output)


def _once_each(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the layers that are one place of the model, and share no weight with another."""
    times = Counter(map(id, layers))
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return [
        layer
        for layer in layers
        if times[id(layer)] == 1
        and (own := list(layer.parameters()))
        and all(owners[id(parameter)] == 1 for parameter in own)
    ]


def _twin(model: nn.Module, undivided: Parameters) -> nn.Module:
    """Return a model without weights of its own, whose config and buffers are those of the model.

    So what is changed in either is changed in both.
    """
    shared: list[Any] = [*undivided, *model.buffers()]
    if hasattr(model, "config"):
        shared.append(model.config)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo | {id(each): each for each in shared})


def own_share(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this process's share of a whole tensor, if `like` is divided and of its shape."""
    if not isinstance(like, DTensor) or like.shape != tensor.shape:
        return tensor
    # Every process has read all of it: nothing need travel.
    tensor = tensor.to(like.device)
    shares = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return shares.clone()  # not a view of a file


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Return whole tensors, one after the other; those who do not keep them hold one at a time.

    To be called in all processes.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu() if isinstance(tensor, DTensor) else full
    return whole


@torch.no_grad()
def clip_divided(parameters: Parameters, clip: float, clip_value: float) -> float:
    """Cut gradients as `clip_grad_value_` and `clip_grad_norm_` do; return their norm before."""
    shares: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            kind = shares if isinstance(parameter.grad, DTensor) else whole
            kind.append(own_share(parameter.grad))
    if clip_value:
        for gradient in (*shares, *whole):
            gradient.clamp_(-clip_value, clip_value)
    square = nn.utils.get_total_norm(shares).square()
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm(whole).to(square).square()).sqrt()
    factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0
    for gradient in (*shares, *whole):
        gradient *= factor
    return float(norm)


def is_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite; where they are divided, in all processes."""
    finite = all(bool(own_share(p.detach()).isfinite().all()) for p in model.parameters())
    if not isinstance(model, FSDPModule):
        return finite
    device = next(model.parameters()).device
    bad = torch.tensor(0.0 if finite else 1.0, device=device)
    dist.all_reduce(bad)
    return not bad.item()
