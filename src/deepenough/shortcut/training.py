"""Tune maps to the last layer so that their predictions come out right (tuned lens, 2303.08112).

The closed-form maps of `Shortcuts` make the state right in the mean square; what is wanted is the
prediction. From there, `tune` minimises the KL divergence of what each layer predicts from what
the last one does, with all layers side by side and one final distribution for all of them. What is
minimised, and how maps and vocabulary are parametrised, is in `tuned_maps.py`; measuring, here as
elsewhere, is on the whole vocabulary.

A text's states cost a forward pass, and every step needs some. Kept are the states of the tuned
layers and of the last one, in float32 if that fits the memory limit, else in bfloat16 (whitened,
where all coordinates are of one size, which suits it); beyond that, those of a part of the texts. A
part of the texts is held out, to see how the maps do on text they are not tuned on.
"""

import copy
import hashlib
import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from deepenough.config import validate
from deepenough.devices import to_device
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.config import TuneConfig, TuneTrainingConfig
from deepenough.shortcut.lens import Reference
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import Tally, TokenBatch, batches, make_reading, run_batch
from deepenough.shortcut.tuned_maps import (
    Logits,
    PartialHead,
    TokenSampler,
    TunedMaps,
    Whitening,
    closed_form_error,
    divergences,
    whitening,
)
from deepenough.training.config import seed_at
from deepenough.training.distributed import is_main_process, make_accelerator, place_among
from deepenough.training.logging import reading
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import check_folder, training

log = logging.getLogger("deepenough")

HELD_OUT_EVERY = 16
"""One in so many batches of text is held out: about 6 % of it."""
SAMPLE_PER_WIDTH = 8
"""Positions per unit of width from which covariances are taken: enough for a good step size."""
_ROWS = 128
"""Positions that are projected to the whole vocabulary at once."""


def tune(
    shortcuts: Shortcuts,
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    config: TuneTrainingConfig | None = None,
    **changes: Any,
) -> Shortcuts:
    """Return the same shortcuts with tuned maps to the last layer, `tuned[i] = (A, b)`.

    `config` also names the folder for records, checkpoints and, as `model`, the result; without a
    folder, nothing is left on disk. `changes` are fields of `TuneConfig` (batch, top_tokens, layers
    ...), of `TrainingConfig` (steps, lr, seed ...) and of `RunConfig` (out, resume, overwrite) that
    differ from `config`.
    """
    config = _merge(config or TuneTrainingConfig(), changes)
    if not config.out:
        with tempfile.TemporaryDirectory(prefix="deepenough-tune-") as folder:
            config = replace(config, out=f"{folder}/run")
            return tune(shortcuts, model, tokenizer, texts, config)
    adapter = model if isinstance(model, Adapter) else adapt(model)
    layers = _check(shortcuts, adapter, config)
    accelerator = make_accelerator(config.train, may_skip=False, may_divide=False)
    check_folder(config, accelerator)
    adapter.model.to(accelerator.device)
    task = TuneTask(shortcuts, adapter, tokenizer, texts, layers, config, accelerator)
    with training(config, task, accelerator) as trainer:
        if trainer.first == 0:  # how good the closed form is
            trainer.recorder.record(0, "valid", task.evaluate(accelerator, "valid"))
        trainer.fit()
    return task.shortcuts()


def _merge(config: TuneTrainingConfig, changes: dict[str, Any]) -> TuneTrainingConfig:
    def changed(part: Any) -> Any:
        names = [field.name for field in fields(part) if field.name in changes]
        return replace(part, **{name: changes.pop(name) for name in names})

    tune, train = changed(config.tune), changed(config.train)
    return replace(config, tune=tune, train=train, **changes)


def _check(shortcuts: Shortcuts, adapter: Adapter, config: TuneTrainingConfig) -> list[int]:
    """Refuse what cannot be tuned, and return the layers that are."""
    validate(config)
    adapter.check_made_for(shortcuts.made_for, "These shortcuts")
    if adapter.kind == "encoder":
        raise UserError(
            f"{type(adapter.model).__name__} predicts no tokens, so its maps cannot be tuned: load "
            "it with a language-model head."
        )
    if adapter.model.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    return tuned_layers(adapter, config.tune.layers)


def tuned_layers(adapter: Adapter, chosen: list[int] | None) -> list[int]:
    """Return the layers whose maps are tuned, all below the last if none is chosen."""
    last = adapter.num_layers
    layers = sorted(set(range(last) if chosen is None else chosen))
    if not layers or layers[0] < 0 or layers[-1] >= last:
        raise UserError(
            f"tune.layers must be some of 0 to {last - 1}, the layers below the last: got {chosen}."
        )
    return layers


class TuneTask(Task):
    """Tuning of maps by KL, as a task of the training loop."""

    phase = "maps"
    unit = "positions"

    def __init__(
        self,
        shortcuts: Shortcuts,
        adapter: Adapter,
        tokenizer: Any,
        texts: Iterable[str],
        layers: Sequence[int],
        config: TuneTrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        """Start from the closed-form maps of `layers`, and read the texts they are tuned on."""
        self.adapter, self.layers, self.config = adapter, list(layers), config
        self.train = config.train
        self._start = shortcuts
        own, seed, last = config.tune, config.train.seed, adapter.num_layers
        share = place_among(accelerator)
        window = shortcuts.meta.get("fit", {}).get("window")  # text is read as it was for the fit
        self.states = TuningStates(
            adapter, tokenizer, texts, layers, own.batch, seed, share, window
        )
        sample = self.states.sample(self.states.tuned_on, SAMPLE_PER_WIDTH * adapter.width)
        matrices = torch.stack([shortcuts.matrix(i, last).float().cpu() for i in layers])
        biases = torch.zeros(len(layers), adapter.width)
        for place, layer in enumerate(layers):
            if (bias := shortcuts.bias(layer, last)) is not None:
                biases[place] = bias
        white = whitening(sample.states)
        error = closed_form_error(matrices, biases, *sample)
        self.model = self.maps = TunedMaps(matrices, biases, white, error)
        held_out = self.states.sample(self.states.held_out, own.held_out)
        self.held_out = LayerStates(white(held_out.states), held_out.last)
        self.sampler = _make_sampler(adapter, sample.last, own)
        self.states.keep(white, own.memory * 2**30)
        self._head = PartialHead(adapter)

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameters of the one phase; weight decay pulls towards the closed form."""
        return {self.phase: [{"params": [self.maps.change, self.maps.shift]}]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the KL of a batch: the sum over layers to minimise, their mean to record."""
        index = step * self.train.accumulate + micro
        device = self.maps.change.device
        (states, last), share = self.states.batch(index)
        states, last = to_device(states, device), to_device(last, device)
        logits, log_weight = self._tokens(index)
        with torch.no_grad():
            log_p = (logits(last).float() + log_weight).log_softmax(-1)
        values = divergences(model(states), logits, log_p, log_weight)
        # The mean over processes must be that over positions, of which they have more or fewer.
        values = values * share
        # The sum, so that a layer's gradient does not depend on how many others there are.
        return BatchLoss(values.sum(), values.detach().mean(), len(last))

    def _tokens(self, index: int) -> tuple[Logits, Tensor]:
        """Return what makes the logits of a batch's tokens, and the weights of those tokens."""
        device = self.maps.change.device
        if self.sampler is None:
            return self.adapter.logits, torch.zeros((), device=device)
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "words", index))
        ids, log_weight = self.sampler.draw(generator)
        head = self._head(ids.to(device))
        return lambda state: head(self.adapter.final_norm(state)), log_weight.to(device)

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return KL and agreement of the top token on held-out text, over all the vocabulary."""
        if split != "valid":
            return {}
        device = self.maps.change.device
        kl, agreed = torch.zeros(2, len(self.layers), dtype=torch.float64)
        num = len(self.held_out.last)
        for first in range(0, num, _ROWS):
            rows = slice(first, first + _ROWS)
            reference = Reference(self.adapter.logits(self.held_out.last[rows].to(device)))
            mapped = self.maps(self.held_out.states[:, rows].to(device))
            for place, state in enumerate(mapped):
                scores = reference.score(self.adapter.logits(state))
                kl[place] += float(scores.kl.sum()) / num
                agreed[place] += float((scores.rank == 0).sum()) / num
        values = {"loss": float(kl.mean()), "agreement": float(agreed.mean())}
        for place, layer in enumerate(self.layers):
            values[f"kl_{layer}"] = float(kl[place])
            values[f"agreement_{layer}"] = float(agreed[place])
        return values

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must share with the run that goes on from it."""
        names = ("batch", "top_tokens", "sampled_tokens")
        own = {name: getattr(self.config.tune, name) for name in names}
        start = hashlib.blake2b(self.maps.matrices.numpy().tobytes(), digest_size=8).hexdigest()
        return {
            "model": self.adapter.identity()["fingerprint"],
            "texts": self.states.tally.fingerprint,
            "tune": own | {"layers": self.layers, "start": start},
            "train": self.train.identity(),
        }

    def shortcuts(self) -> Shortcuts:
        """Return the shortcuts that tuning began with, and the tuned maps."""
        result = copy.copy(self._start)
        tuned = zip(*self.maps.matrices_and_biases(), strict=True)
        result.tuned = self._start.tuned | dict(zip(self.layers, tuned, strict=True))
        settings = asdict(self.config.tune) | asdict(self.train)
        settings["texts"] = self.states.tally.fingerprint
        result.meta = self._start.meta | {"tune": settings}
        return result

    def save(self, folder: Path) -> None:
        """Write the shortcuts with their tuned maps."""
        self.shortcuts().save_pretrained(folder)


@torch.no_grad()
def _make_sampler(adapter: Adapter, last_ND: Tensor, config: TuneConfig) -> TokenSampler | None:
    """Return a sampler of tokens by their total probability, or None if all tokens are wanted."""
    if config.top_tokens is None:
        return None
    parts = last_ND.to(adapter.model.device).split(256)
    mass_V = torch.stack([adapter.logits(part).float().softmax(-1).sum(0) for part in parts]).sum(0)
    if config.top_tokens >= len(mass_V):
        return None
    return TokenSampler(mass_V.cpu(), config.top_tokens, config.sampled_tokens)


class LayerStates(NamedTuple):
    """`N` positions: states of the tuned layers, `[L, N, D]`, and of the last, `[N, D]`."""

    states: Tensor
    last: Tensor


class TuningStates:
    """The states of texts at all positions: held out, or kept in memory to be tuned on."""

    def __init__(
        self,
        adapter: Adapter,
        tokenizer: Any,
        texts: Iterable[str],
        layers: Sequence[int],
        batch: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
        window: int | None = None,
    ) -> None:
        """Read texts and hold a part of them out.

        `batch` is the number of positions in a step, and of most tokens in a batch of text. With a
        share `(k, n)`, process `k` of `n` keeps every `n`-th batch of the text: all of them make
        the batches of one process, from which each takes what it keeps.
        """
        self.adapter, self.layers, self.tally = adapter, list(layers), Tally()
        how = make_reading(adapter, "all", seed, batch_tokens=batch, window=window)
        found = list(batches(tokenizer, texts, how, self.tally))
        self.rank, self.world_size = share
        if len(found) < 1 + self.world_size:
            raise UserError(
                f"The texts make {len(found)} batches, but {1 + self.world_size} are needed, one "
                "of them to hold out: give more text or a smaller batch."
            )
        # Neighbouring batches are of similar length, so every so-many-th is a fair sample.
        every = min(HELD_OUT_EVERY, len(found))
        self.held_out = found[every - 1 :: every]
        del found[every - 1 :: every]
        self.tuned_on, self._batch, self._seed = found, batch, seed

    def keep(self, white: Whitening, limit: float) -> None:
        """Run this process's texts, and keep their states, whitened, in `limit` bytes of all."""
        num = _num_positions(self.tuned_on)
        fits = num * self._position_bytes(torch.float32) <= limit
        dtype = torch.float32 if fits else torch.bfloat16
        share = limit / (num * self._position_bytes(dtype))
        if share < 1:
            of = len(self.tuned_on)
            fewer = max(self.world_size, int(share * of))
            self.tuned_on = [self.tuned_on[place * of // fewer] for place in range(fewer)]
            log.warning(
                "The states of %d %% of the text fill tune.memory, and maps are tuned on no more.",
                100 * share,
            )
        lengths = torch.tensor([_num_positions([batch]) for batch in self.tuned_on])
        owner = torch.arange(len(lengths)) % self.world_size
        is_own = (owner == self.rank).repeat_interleave(lengths)
        # Where a position's states are kept; -1 where another process keeps them.
        self._place = (is_own.cumsum(0) - 1).masked_fill(~is_own, -1)
        num = int(is_own.sum())
        self.states = torch.empty(len(self.layers), num, self.adapter.width, dtype=dtype)
        self.last = torch.empty(num, self.adapter.width)
        done = 0
        with reading("positions") as show:
            for tokens in self.tuned_on[self.rank :: self.world_size]:
                states, last = self._run(tokens)
                rows = slice(done, done := done + len(last))
                self.states[:, rows], self.last[rows] = white(states), last
                if is_main_process():
                    show(done, num)

    def batch(self, index: int) -> tuple[LayerStates, float]:
        """Return what this process keeps of one step's states, whitened, and its share in them.

        An epoch is a random order of all positions. A share of 1 is that of equal parts; a process
        that keeps none of them returns one of its own, with a share of 0.
        """
        num = len(self._place)
        size = min(self._batch, num)
        epoch, turn = divmod(index, num // size)
        generator = torch.Generator().manual_seed(seed_at(self._seed, "positions", epoch))
        chosen = torch.randperm(num, generator=generator)[turn * size : (turn + 1) * size]
        own = self._place[chosen]
        own = own[own >= 0]
        share = len(own) * self.world_size / size
        own = own if len(own) else torch.zeros(1, dtype=torch.long)
        return LayerStates(self.states[:, own].float(), self.last[own]), share

    def _position_bytes(self, dtype: torch.dtype) -> int:
        """Return the memory that one position takes; the last state is always kept exactly."""
        return self.adapter.width * (len(self.layers) * dtype.itemsize + torch.float32.itemsize)

    def _run(self, batch: TokenBatch) -> LayerStates:
        states = run_batch(self.adapter, batch)
        return LayerStates(
            torch.stack([states[layer].float() for layer in self.layers]), states[-1].float()
        )

    def sample(self, among: Sequence[TokenBatch], num: int) -> LayerStates:
        """Return about `num` positions of `tuned_on` or `held_out`, the same for each process."""
        generator = torch.Generator().manual_seed(seed_at(self._seed, "sample"))
        found: list[LayerStates] = []
        missing = num
        for index in torch.randperm(len(among), generator=generator).tolist():
            states, last = self._run(among[index])
            found.append(LayerStates(states[:, :missing].cpu(), last[:missing].cpu()))
            missing -= len(found[-1].last)
            if not missing:
                break
        return LayerStates(
            torch.cat([part.states for part in found], 1), torch.cat([part.last for part in found])
        )


def _num_positions(found: Sequence[TokenBatch]) -> int:
    return sum(len(window.ids) for batch in found for window in batch.windows)
