"""`deepenough decode tune`: make a draft model for a model, which itself is not changed.

The model writes, and its states are kept (`self_generated.py`); a linear drafter is fitted to them
in closed form; a draft head that starts from it is trained; and the sensible ways to draft are
timed on this machine. Each step goes on where an interrupted command stopped it.

**The linear drafter.** For map `n`, the inputs `z` of all positions of the model's texts and the
states `x` they should give make the normal equations

    (Z^T Z + ridge * diag(Z^T Z)) [B_n, b_n]^T = Z^T X

A part of the texts is left out of the sums: it decides the ridge, by the share of its positions
whose next token the map predicts, and that share is recorded with the maps.

**The draft head.** At every token `t` that the model wrote, its state is predicted, and from it the
token after, twice: with the state before `t` as it was, and as it was itself predicted
(`DraftHead.forward`). With `p` the model's distribution over the draft vocabulary and `q` the
prediction's, minimised is for both

    (1 - hard) KL(p || q) - hard log q(best token) + near * smooth_l1(state, prediction)

The best token is what a greedy draft is judged by; the other two terms say more about each
position, which matters where text is scarce.

Shapes: B texts, T tokens, N positions, D width, Z = (n + 1) D + 1 inputs, S draft vocabulary, V
vocabulary.
"""

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from deepenough.artifacts import atomic_path, seal
from deepenough.config import dump, provenance, validate
from deepenough.decoding.config import DraftTrainConfig
from deepenough.decoding.draft_model import DraftHead, DraftModel, HeadShape
from deepenough.decoding.drafters import LinearDrafter, head_rows, make_drafter
from deepenough.decoding.engine import Engine, make_engine
from deepenough.decoding.self_generated import (
    SelfGenerated,
    count_new,
    decode_prompts,
    make_prompts,
    read_lines,
    write_texts,
)
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.runs import RunFolder, read_records
from deepenough.shortcut.statistics import NormalEquations
from deepenough.training.config import seed_at
from deepenough.training.distributed import make_accelerator
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import keep_freed_memory, training

log = logging.getLogger("deepenough")

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
_NUM_MAPS = 2
#: One text of so many is left out of the linear fit.
_HELD_OUT_EVERY = 10
#: Positions whose whole distribution is looked at for the draft vocabulary.
_SAMPLED = 1024
#: Texts from which the standard deviations of states are taken.
_SCALE_TEXTS = 64
_NEAR = 0.1
_DROPOUT = 0.1
#: Prompts on which ways to draft are timed, and the most tokens that follow each.
_TIMED_PROMPTS, _TIMED_TOKENS = 8, 48


# -- linear drafter ------------------------------------------------------------------------------


def fit_linear_drafter(
    adapter: Adapter,
    texts: Sequence[SelfGenerated],
    draft_vocab: int = 4096,
    about: Mapping[str, Any] | None = None,
) -> LinearDrafter:
    """Return a linear drafter fitted to texts that the model wrote (`continue_prompts`).

    The `draft_vocab` tokens that it writes most often can be drafted; `about` is kept with them.
    """
    if draft_vocab < 2:
        raise UserError("A linear drafter has at least 2 tokens in its vocabulary.")
    used = [text for number, text in enumerate(texts) if number % _HELD_OUT_EVERY]
    vocab_S = choose_draft_vocab(adapter, texts, used, draft_vocab)
    maps, found = [], []
    for number in range(1, _NUM_MAPS + 1):
        fitted, facts = _fit_map(adapter, number, used, texts[::_HELD_OUT_EVERY], vocab_S)
        maps.append(fitted)
        found.append(facts)
    fit: dict[str, Any] = {name: [facts[name] for facts in found] for name in found[0]}
    fit |= {**(about or {}), "texts": len(texts)}
    meta = {"model": adapter.identity(), "fit": fit, "made_with": provenance()}
    return LinearDrafter(maps, vocab_S.cpu(), meta)


def _fit_map(
    adapter: Adapter,
    number: int,
    texts: Sequence[SelfGenerated],
    held_out: Sequence[SelfGenerated],
    vocab_S: Tensor,
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Return map `number` with the ridge that is right most often on held-out texts, and facts."""
    width = adapter.width
    sums = NormalEquations((number + 1) * width + 1, width, adapter.model.device)
    for text in texts:
        inputs_NZ, _ = linear_inputs(adapter, text, number)
        sums.update(inputs_NZ, text.states_TD[text.prompt + number - 1 :].float())
    sums.flush()
    if sums.count < sums.num_inputs:
        raise UserError(
            f"The model wrote {sums.count} usable tokens, and a map of width {width} needs "
            f"{sums.num_inputs}: give more texts, or more tokens for each."
        )
    head = head_rows(adapter, vocab_S)
    best: dict[str, Any] = {"agreements": -1.0}
    for ridge in RIDGES:
        weight_DZ = sums.solve(ridge=ridge, relative=True).weight.float()
        matrix, bias = weight_DZ[:, :-1].contiguous(), weight_DZ[:, -1].clone()
        right = total = 0
        for text in held_out:
            inputs_NZ, next_N = linear_inputs(adapter, text, number)
            states_ND = F.linear(inputs_NZ[:, :-1], matrix, bias).to(head[0].dtype)
            drafts_N = vocab_S[F.linear(states_ND, *head).argmax(-1)]
            right += int((drafts_N == next_N).sum())
            total += len(next_N)
        share = right / max(total, 1)
        if share > best["agreements"]:
            best = {"agreements": share, "ridges": ridge, "positions": sums.count}
            fitted = matrix.cpu(), bias.cpu()
    return fitted, best


@torch.no_grad()
def linear_inputs(adapter: Adapter, text: SelfGenerated, number: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of map `number` at the new tokens of a text, and the tokens that follow.

    At position `t` the map predicts the state of position `t + number - 1`, from which the token
    after it follows: so positions end where that state, or token, is not known any more. The last
    of the inputs `[N, Z]` is 1.
    """
    ids_T = text.ids_T.to(adapter.model.device)
    embeddings = adapter.model.get_input_embeddings()(ids_T).float()
    embeddings = F.rms_norm(embeddings, embeddings.shape[-1:])
    first, last = text.prompt, len(ids_T) - number
    parts = [embeddings[first + ahead : last + ahead] for ahead in reversed(range(number))]
    parts.append(text.states_TD[first - 1 : last - 1].float())
    parts.append(parts[0].new_ones(max(last - first, 0), 1))
    return torch.cat(parts, dim=1), ids_T[first + number :]


@torch.no_grad()
def choose_draft_vocab(
    adapter: Adapter, texts: Sequence[SelfGenerated], sampled: Sequence[SelfGenerated], size: int
) -> Tensor:
    """Return the tokens that texts hold most often, then those most probable in sampled texts."""
    vocab_size = len(adapter.model.get_input_embeddings().weight)  # type: ignore[arg-type]
    written = torch.cat([text.ids_T[text.prompt :] for text in texts])
    mass_V = torch.zeros(vocab_size, dtype=torch.float64)
    positions = 0
    for text in sampled:
        if positions >= _SAMPLED:
            break
        states_ND = text.states_TD[text.prompt - 1 :]
        probable = adapter.head(states_ND).float().softmax(-1).sum(0).double().cpu()
        mass_V[: len(probable)] += probable[:vocab_size]
        positions += len(states_ND)
    # A token that was written comes before all that were not: the shares sum to less than 1.
    order = torch.bincount(written, minlength=vocab_size) + mass_V / (mass_V.sum() + 1)
    return order.topk(min(size, vocab_size)).indices.to(adapter.model.device)


# -- draft head ----------------------------------------------------------------------------------


class DraftHeadTask(Task):
    """Training of a draft model's head on texts that the model has written.

    Progress is measured on those that are held out.
    """

    unit = "positions"
    phase = "head"

    def __init__(
        self,
        draft_model: DraftModel,
        adapter: Adapter,
        texts: Sequence[SelfGenerated],
        held_out: Sequence[SelfGenerated],
        config: DraftTrainConfig,
        run: RunFolder,
    ) -> None:
        self.draft_model = draft_model
        self.model = self.head = draft_model.head
        self.adapter, self.texts, self.held_out = adapter, texts, held_out
        self.config, self.train, self.run = config.head, config.train, run
        self.vocab_S = draft_model.linear_drafter.draft_vocab.to(adapter.model.device)
        weight, self.vocab_bias = head_rows(adapter, self.vocab_S)
        self.scale_D = self.head.scale.to(weight.device)
        self.vocab_SD = weight.float() * self.scale_D

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups: what was solved for already only has to follow."""
        head = self.head
        matrices = [head.qkv_proj, head.o_proj, head.gate_up_proj, head.down_proj]
        return {
            self.phase: [
                {"params": matrices},
                {"params": [head.linear], "lr_scale": 0.1, "weight_decay": 0.0},
                {"params": [head.linear_bias, head.norm], "weight_decay": 0.0},
            ]
        }

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of one batch of texts."""
        texts = self._chosen(step * self.train.accumulate + micro)
        embeddings_BTD, states_BTD, chosen_BT = self._read(texts)
        predictions = model(embeddings_BTD, states_BTD)
        targets_ND = states_BTD[chosen_BT]
        with torch.no_grad():
            log_p = self._logits(targets_ND).log_softmax(-1)
            best_N = log_p.argmax(-1)
        total, weight = torch.zeros((), device=targets_ND.device), self.config.hard
        for predicted_BTD in predictions:
            predicted_ND = predicted_BTD[chosen_BT]
            log_q = self._logits(predicted_ND).log_softmax(-1)
            kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
            hard = F.nll_loss(log_q, best_N)
            near = F.smooth_l1_loss(predicted_ND, targets_ND)
            total = total + (1 - weight) * kl + weight * hard + _NEAR * near
        return BatchLoss(total, total.detach(), len(targets_ND))

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return how often drafts are the model's best token, on texts that are held out.

        `agreement_2` is of the second draft where the first was right; `accepted` is how many of
        two drafts are accepted, on average over all positions.
        """
        if split != "valid":
            return {}
        self.head.eval()
        totals = torch.zeros(6, dtype=torch.float64)
        for number in range(0, len(self.held_out), self.config.texts):
            texts = self.held_out[number : number + self.config.texts]
            embeddings_BTD, states_BTD, chosen_BT = self._read(texts)
            predictions = self.head(embeddings_BTD, states_BTD)
            targets_ND = states_BTD[chosen_BT]
            log_p = self._logits(targets_ND).log_softmax(-1)
            log_q = self._logits(predictions[0][chosen_BT]).log_softmax(-1)
            kl = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
            best_BT = torch.full_like(chosen_BT, -1, dtype=torch.long)  # equal to no draft
            parts = (targets_ND * self.scale_D).split(512)
            best_BT[chosen_BT] = torch.cat([self.adapter.head(x).argmax(-1) for x in parts])
            first_BT, second_BT = (
                self.vocab_S[self._logits(each).argmax(-1)] == best_BT for each in predictions
            )
            # The second draft of a token is of use only where the first was right.
            before_BT = F.pad(first_BT, (1, 0))[:, :-1]
            sums = (chosen_BT, first_BT, before_BT, second_BT, second_BT & before_BT)
            totals += torch.tensor([float(kl), *[float(each.sum()) for each in sums]])
        self.head.train()
        loss, count, first, pairs, second, both = totals.tolist()
        return {
            "loss": loss / count,
            "agreement_1": first / count,
            "agreement_2": both / max(pairs, 1.0),
            "accepted": (first + both) / count,
            "agreement_2_anywhere": second / count,
        }

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must share with the run that goes on from it."""
        head = {name: value for name, value in asdict(self.config).items() if name != "held_out"}
        return {
            "model": self.adapter.identity()["fingerprint"],
            "texts": {"number": len(self.texts), "tokens": count_new(self.texts)},
            "head": head,
            "train": self.train.identity(),
        }

    def save(self, folder: Path) -> None:
        """Write the draft model, with how often drafts were right before training and after."""
        valid = [r.values for r in read_records(self.run.metrics)[0] if r.kind == "valid"]
        for when, values in (("before", valid[0]), ("after", valid[-1])):
            names = ("agreement_1", "agreement_2", "accepted")
            self.draft_model.meta[when] = {name: values[name] for name in names}
        self.draft_model.meta["held_out_tokens"] = count_new(self.held_out)
        self.draft_model.save_pretrained(folder)

    def _chosen(self, index: int) -> list[SelfGenerated]:
        """Return the texts of batch number `index`, in a new order every epoch."""
        size = min(self.config.texts, len(self.texts))
        epoch, turn = divmod(index, len(self.texts) // size)
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "texts", epoch))
        order = torch.randperm(len(self.texts), generator=generator)
        return [self.texts[number] for number in order[turn * size : (turn + 1) * size].tolist()]

    @torch.no_grad()
    def _read(self, texts: Sequence[SelfGenerated]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings and states, in units of the scale, and which tokens the model wrote."""
        device = self.adapter.model.device
        ids_BT = pad_sequence([text.ids_T[:-1] for text in texts], batch_first=True).to(device)
        embeddings_BTD = self.adapter.model.get_input_embeddings()(ids_BT).float()
        states_BTD = pad_sequence([t.states_TD.float() for t in texts], batch_first=True).to(device)
        places = torch.arange(ids_BT.shape[1])
        first = torch.tensor([text.prompt for text in texts])
        last = torch.tensor([len(text.states_TD) for text in texts])
        chosen_BT = (places >= first[:, None]) & (places < last[:, None])
        return embeddings_BTD, states_BTD / self.scale_D, chosen_BT.to(device)

    def _logits(self, states_ND: Tensor) -> Tensor:
        """Return logits of the draft vocabulary, of states in units of the scale."""
        return F.linear(states_ND, self.vocab_SD, self.vocab_bias)


# -- a run ---------------------------------------------------------------------------------------


def tune_run(
    config: DraftTrainConfig, progress: Callable[[int, int | None], None] | None = None
) -> DraftModel:
    """Make a draft model in a run folder and return it.

    `progress` is called with the new tokens that the model has written and those wanted.
    """
    keep_freed_memory()
    validate(config)
    read_lines(config.data, config.text.min_chars)  # refuses a corpus that is not there
    RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)
    accelerator = make_accelerator(config.train, may_skip=False)
    if accelerator.num_processes > 1:
        raise UserError("A draft head is small and trained by one process: start one.")
    model, tokenizer = config.model.load()
    model.to(accelerator.device)  # type: ignore[arg-type]
    engine = make_engine(model)
    earlier = None
    if config.head.start is not None:
        earlier = DraftModel.from_pretrained(config.head.start)
        engine.adapter.check_made_for(earlier.linear_drafter.made_for, "The drafts of head.start")
    # What full texts take; if the model ends them early, there are more.
    batches = -(-config.text.tokens // (config.text.new_tokens * config.text.batch))
    prompts = make_prompts(tokenizer, config.data, config.text)
    _check_number(len(list(islice(prompts, batches * config.text.batch))), config)
    run = RunFolder.create(config.out, resume=config.resume, overwrite=config.overwrite)
    config = replace(config, resume=False, overwrite=False)
    with run.lock():
        return _tune(config, run, engine, tokenizer, accelerator, earlier, progress)


def _check_number(num_texts: int, config: DraftTrainConfig) -> None:
    """Refuse to hold out all texts that the model writes."""
    if num_texts <= config.head.held_out:
        raise UserError(
            f"The model writes {num_texts} texts, and {config.head.held_out} of them are held out: "
            "raise text.tokens, lower head.held_out or text.min_chars, or give more text."
        )


def _tune(
    config: DraftTrainConfig,
    run: RunFolder,
    engine: Engine,
    tokenizer: Any,
    accelerator: Accelerator,
    earlier: DraftModel | None,
    progress: Callable[[int, int | None], None] | None,
) -> DraftModel:
    """Let the model write and fit drafts to it, which start as `earlier`; return them."""
    if not run.config.is_file():  # else what was trained stays described as it was
        dump(config, run.config)
    folder, seed = run.checkpoints / "text", config.train.seed
    texts = write_texts(folder, engine, tokenizer, config.data, config.text, seed, progress)
    own, adapter = config.head, engine.adapter
    _check_number(len(texts), config)
    # The latest texts, so that going on with more of them would hold out others only.
    used, held_out = texts[: -own.held_out], texts[-own.held_out :]
    log.info("fitting a linear drafter to %d texts", len(used))
    linear = fit_linear_drafter(adapter, used, own.draft_vocab, asdict(config.text))
    head = DraftHead(HeadShape.of(adapter), seed, _DROPOUT)
    if earlier is None:
        head.start_from(*linear.maps[0], scale_D=_scale(used))
    else:
        head.load_state_dict(earlier.head.state_dict())
    steps = config.train.steps_of(own.epochs, len(used) // min(own.texts, len(used)))
    config = replace(config, train=replace(config.train, steps=steps), resume=True)
    draft_model = DraftModel(linear, head.to(accelerator.device), {"settings": asdict(config)})
    task = DraftHeadTask(draft_model, adapter, used, held_out, config, run)
    with training(config, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "valid", task.evaluate(accelerator, "valid"))
        trainer.fit()
    draft_model = DraftModel.from_pretrained(run.path)
    if config.until == "choice":
        log.info("looking for the fastest drafts on this machine")
        draft_model.choice = fastest_drafts(engine, draft_model, held_out[:_TIMED_PROMPTS])
        with atomic_path(run.model) as partial:
            draft_model.save_pretrained(partial)
            seal(partial)
    return draft_model


def _scale(texts: Sequence[SelfGenerated]) -> Tensor:
    """Return the standard deviation of each coordinate, none so small that noise is blown up."""
    every = max(1, len(texts) // _SCALE_TEXTS)
    states_ND = torch.cat([text.states_TD[text.prompt - 1 :].float() for text in texts[::every]])
    deviation = states_ND.std(dim=0)
    return deviation.clamp_min(1e-3 * float(deviation.mean()))


def fastest_drafts(
    engine: Engine, draft_model: DraftModel, texts: Sequence[SelfGenerated]
) -> dict[str, Any]:
    """Return how to draft fastest on this machine, as `DraftModel.choice` keeps it.

    No drafts, lookup alone, and lookup before linear maps or the draft head are tried, with one to
    three draft tokens and with the whole draft vocabulary or a quarter. All of them continue a
    prompt in turn before the next prompt, so that whatever else the machine does hits all of them.
    """
    size = len(draft_model.linear_drafter.draft_vocab)
    ways: list[tuple[list[str], int, int]] = [([], 1, size)]
    for number in (1, 2, 3):
        ways.append((["lookup"], number, size))
        for name in ("linear", "draft_model"):
            ways += [(["lookup", name], number, part) for part in (-(-size // 4), size)]
    drafters = [make_drafter(engine, *way, draft_model=draft_model) for way in ways]
    seconds = [0.0] * len(ways)
    tokens = 0
    for turn, text in enumerate([texts[0], *texts]):  # the first turn is slow, and not counted
        prompt = text.ids_T[: text.prompt].tolist()
        room = (engine.max_length or len(prompt) + _TIMED_TOKENS) - len(prompt)
        for place, drafter in enumerate(drafters):
            began = time.perf_counter()
            rows = decode_prompts(engine, [prompt], min(_TIMED_TOKENS, room), drafter)
            seconds[place] += time.perf_counter() - began if turn else 0.0
        tokens += len(rows[0].tokens) if turn else 0  # the same in all ways
    measured: list[dict[str, Any]] = [
        {"names": names, "num_draft_tokens": number, "vocab_size": part}
        | {"tokens_per_second": tokens / spent}
        for (names, number, part), spent in zip(ways, seconds, strict=True)
    ]
    measured.sort(key=lambda row: row["tokens_per_second"], reverse=True)
    machine = {"threads": torch.get_num_threads(), "processor": platform.processor()}
    return measured[0] | {"machine": machine, "measured": measured}
