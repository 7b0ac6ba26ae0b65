"""Training of drafts on what the model has written, as a task of the training loop.

At every token `t` that the model wrote, its state is predicted, and from it the word after, twice:
with the state before `t` as it was, and as it was itself predicted (`DraftHead.forward`). With `p`
the model's distribution over the shortlist and `q` the prediction's, minimised is for both

    (1 - hard) KL(p || q) - hard log q(best word) + near * smooth_l1(state, prediction)

The best word is what a greedy draft is judged by; the other two say more about each position, which
matters where text is scarce.

Shapes: B texts, T tokens, N positions, D width, S shortlist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from deepenough.decoding.drafters import head_rows
from deepenough.decoding.head import DraftHead
from deepenough.decoding.own_text import Written
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.runs import RunFolder, read_records
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.task import BatchLoss, Task

HEAD = "head"


@dataclass
class HeadSettings:
    """Draft head"""

    texts: int = 8
    """Texts in a step."""

    epochs: float = 4.0
    """Rounds over the texts; they decide train.steps."""

    shortlist: int = 4096
    """Words that can be drafted, those the model writes most often."""

    hard: float = 0.5
    """Weight of the best word against the whole distribution, from 0 to 1."""

    near: float = 0.1
    """Weight of the distance between states."""

    dropout: float = 0.1
    """Of what attention has mixed and of the feed-forward layer's inner units, while training."""

    start: str | None = None
    """Folder of an earlier head of the same model to go on from, say with more text; by default
    the head starts as the carry map."""

    held_out: int = 64
    """Texts on which progress is measured, and which are not trained on."""

    def check(self) -> None:
        for name in ("texts", "held_out"):
            if getattr(self, name) < 1:
                raise UserError(f"head.{name} must be at least 1: got {getattr(self, name)}.")
        if self.shortlist < 2:
            raise UserError(f"head.shortlist must be at least 2: got {self.shortlist}.")
        if not self.epochs > 0:
            raise UserError(f"head.epochs must be above 0: got {self.epochs}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"head.dropout must be from 0 to below 1: got {self.dropout}.")
        if not (0 <= self.hard <= 1 and self.near >= 0):
            raise UserError("head.hard must be from 0 to 1, and head.near not negative.")


class Batch(NamedTuple):
    """Texts without their last token, and the positions that the model wrote."""

    ids_BT: Tensor
    states_BTD: Tensor
    """In units of the scale."""
    chosen_BT: Tensor
    next_BT: Tensor
    """The word after each token."""


def read_texts(texts: Sequence[Written], scale_D: Tensor, device: torch.device) -> Batch:
    ids_BT = pad_sequence([text.ids_T for text in texts], batch_first=True).to(device)
    states_BTD = pad_sequence([t.states_TD.float() for t in texts], batch_first=True).to(device)
    places = torch.arange(ids_BT.shape[1] - 1)
    first = torch.tensor([text.prompt for text in texts])
    last = torch.tensor([len(text.states_TD) for text in texts])
    chosen_BT = (places >= first[:, None]) & (places < last[:, None])
    states_BTD = states_BTD / scale_D.to(device)
    return Batch(ids_BT[:, :-1], states_BTD, chosen_BT.to(device), ids_BT[:, 1:])


class Guess(NamedTuple):
    """Predicted states `[B, T, D]` in units of the scale, and how much they count."""

    name: str
    weight: float
    states_BTD: Tensor


class DraftTask(Task, ABC):
    """What is common to all that learn to draft from one batch of texts after another."""

    unit = "positions"

    def __init__(
        self,
        scale_D: Tensor,
        adapter: Adapter,
        shortlist: Tensor,
        texts: Sequence[Written],
        held_out: Sequence[Written],
        settings: HeadSettings,
        train: TrainingConfig,
        identity: dict[str, Any],
        save: Callable[[Path], None],
    ) -> None:
        self.adapter, self.texts, self.held_out = adapter, texts, held_out
        self.settings, self.train = settings, train
        self._identity, self._save = identity, save
        self.shortlist = shortlist.to(adapter.model.device)
        weight, self.word_bias = head_rows(adapter, self.shortlist)
        self.scale_D = scale_D.to(weight.device)
        self.words_SD = weight.float() * self.scale_D
        self._latest: dict[str, float] = {}

    @property
    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def guesses(self, model: nn.Module, batch: Batch, index: int) -> list[Guess]:
        """What is predicted in batch number `index`."""

    @abstractmethod
    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """First and second predictions, as they will be in use."""

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        index = step * self.train.accumulate + micro
        batch = self.read(self._chosen(index))
        predictions = self.guesses(model, batch, index)
        targets_ND = batch.states_BTD[batch.chosen_BT]
        with torch.no_grad():
            log_p = self.logits(targets_ND).log_softmax(-1)
            best_N = log_p.argmax(-1)
        total = torch.zeros((), device=targets_ND.device)
        for name, weight, predicted_BTD in predictions:
            predicted_ND = predicted_BTD[batch.chosen_BT]
            log_q = self.logits(predicted_ND).log_softmax(-1)
            kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
            hard = F.nll_loss(log_q, best_N)
            own = self.settings
            near = F.smooth_l1_loss(predicted_ND, targets_ND)
            total = total + weight * ((1 - own.hard) * kl + own.hard * hard + own.near * near)
            right = float((log_q.argmax(-1) == best_N).float().mean())
            self._latest |= {f"kl_{name}": float(kl.detach()), f"right_{name}": right}
        return BatchLoss(total, total.detach(), len(targets_ND))

    def logits(self, states_ND: Tensor) -> Tensor:
        """Of the shortlist, from states in units of the scale."""
        return F.linear(states_ND, self.words_SD, self.word_bias)

    def _chosen(self, index: int) -> list[Written]:
        size = min(self.settings.texts, len(self.texts))
        epoch, turn = divmod(index, len(self.texts) // size)
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "texts", epoch))
        order = torch.randperm(len(self.texts), generator=generator)
        numbers = order[turn * size : (turn + 1) * size].tolist()
        return [self.texts[number] for number in numbers]

    def read(self, texts: Sequence[Written]) -> Batch:
        return read_texts(texts, self.scale_D, self.adapter.model.device)

    def train_values(self) -> dict[str, Any]:
        return dict(self._latest)

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """How often drafts are the model's best word, on texts that are held out.

        `agreement_2` is of the second draft where the first was given; `accepted` is how many of
        two drafts are accepted, on average over all positions.
        """
        if split != "valid":
            return {}
        self.model.eval()
        right = torch.zeros(3, dtype=torch.float64)
        loss = count = pairs = 0.0
        for number in range(0, len(self.held_out), self.settings.texts):
            batch = self.read(self.held_out[number : number + self.settings.texts])
            one, two = self.drafts(batch)
            targets_ND = batch.states_BTD[batch.chosen_BT]
            best_BT = torch.full_like(batch.next_BT, -1)
            best_BT[batch.chosen_BT] = self._best_words(targets_ND)
            drafts = [self.shortlist[self.logits(each).argmax(-1)] for each in (one, two)]
            # At a token whose own draft was right, the second draft is of use.
            right_BT = (drafts[0] == best_BT) & batch.chosen_BT
            second_BT = (drafts[1] == best_BT) & batch.chosen_BT
            before_BT = F.pad(right_BT, (1, 0))[:, :-1]
            right += torch.tensor(
                [float(x.sum()) for x in (right_BT, second_BT, second_BT & before_BT)]
            )
            log_p = self.logits(targets_ND).log_softmax(-1)
            log_q = self.logits(one[batch.chosen_BT]).log_softmax(-1)
            loss += float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
            count += float(batch.chosen_BT.sum())
            pairs += float(before_BT.sum())
        self.model.train()
        first, second, both = right.tolist()
        return {
            "loss": loss / count,
            "agreement_1": first / count,
            "agreement_2": both / max(pairs, 1.0),
            "accepted": (first + both) / count,
            "agreement_2_anywhere": second / count,
        }

    def _best_words(self, states_ND: Tensor) -> Tensor:
        """Of the whole vocabulary."""
        dtype = self.adapter.model.dtype
        parts = (states_ND * self.scale_D).to(dtype).split(512)
        return torch.cat([self.adapter.head(part).argmax(-1) for part in parts])

    def identity(self) -> dict[str, Any]:
        return self._identity

    def save(self, folder: Path) -> None:
        self._save(folder)


def before_and_after(run: RunFolder) -> dict[str, dict[str, float]]:
    """How often drafts were right on held-out texts, before training and after."""
    valid = [r.values for r in read_records(run.metrics)[0] if r.kind == "valid"]
    names = ("agreement_1", "agreement_2", "accepted")
    found = {"before": valid[0], "after": valid[-1]}
    return {when: {name: values[name] for name in names} for when, values in found.items()}


class HeadTask(DraftTask):
    phase = HEAD

    def __init__(self, head: DraftHead, *given: Any, **more: Any) -> None:
        super().__init__(head.scale, *given, **more)
        self.head = head

    @property
    def model(self) -> nn.Module:
        return self.head

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        head = self.head
        matrices = [head.into_heads, head.out_of_heads, head.gate_up, head.down]
        return {
            HEAD: [
                {"params": matrices},
                # What was solved for already only has to follow.
                {"params": [head.carry], "lr_scale": 0.1, "weight_decay": 0.0},
                {"params": [head.bias, head.norm], "weight_decay": 0.0},
            ]
        }

    def guesses(self, model: nn.Module, batch: Batch, index: int) -> list[Guess]:
        one, two = model(self._embed(batch.ids_BT), batch.states_BTD)
        return [Guess("first", 1.0, one), Guess("second", 1.0, two)]

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.head(self._embed(batch.ids_BT), batch.states_BTD)

    @torch.no_grad()
    def _embed(self, ids_BT: Tensor) -> Tensor:
        return self.adapter.model.get_input_embeddings()(ids_BT).float()
