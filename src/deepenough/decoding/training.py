"""`deepenough decode tune`: make a draft model for a model, which itself is not changed.

The model writes, and its states are kept (`self_generated.py`); a linear drafter is fitted to them
in closed form; and a draft head is trained. Each step goes on where an interrupted command stopped
it.

**The linear drafter.** For map `n`, the inputs `z` of all positions of the model's texts and the
states `x` they should give make the normal equations

    (Z^T Z + ridge * diag(Z^T Z)) [B_n, b_n]^T = Z^T X

A part of the texts is left out of the sums: it decides the ridge, by the share of its positions
whose next token the map predicts, and that share is recorded with the maps.

**The draft head** (`eagle3.py`) begins as the linear map `[A, B]` of its inputs that comes nearest
to the next state: `A` from the three layers as its `fc`, `B` from the embedding as what attention
carries from a token to itself, of the rank that values have. Then, at every token that the model
wrote, it is trained in steps, each on the predictions of the one before. With `p` the model's
distribution over the draft vocabulary and `q_k` that of step `k`, minimised is

    sum_k 0.8^k [(1 - hard) KL(p || q_k) - hard log q_k(best token)]

The best token is what a greedy draft is judged by; the other term says more where text is scarce.
Training ends when no more drafts become accepted on held-out texts.

Shapes: B texts, T tokens, N positions, D width, Z inputs of a map or of the head, S draft
vocabulary, V vocabulary.
"""

import logging
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

from deepenough.config import dump, provenance, validate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.config import DraftTrainConfig
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.drafters import LinearDrafter, head_rows
from deepenough.decoding.eagle3 import (
    NUM_STEPS,
    Eagle3Config,
    Eagle3Head,
    count_accepted,
    layers_read,
)
from deepenough.decoding.engine import Engine
from deepenough.decoding.self_generated import (
    SelfGenerated,
    count_new,
    make_prompts,
    read_lines,
    write_texts,
)
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.runs import RunFolder, read_records
from deepenough.shortcut.normal_equations import NormalEquations
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
#: Texts that the start of a head is fitted to, and the ridge.
_START_TEXTS, _START_RIDGE = 400, 1e-2
#: Width from which on it is worth while to multiply in bf16.
_HALF_WIDTH = 256
#: Weight of a step of the head's training against the one before it.
_LATER_STEPS = 0.8


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
        found = sums.solve(ridge=ridge, relative=True).weight.float()
        weight_DZ = found.to(adapter.model.device)
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
        probable = adapter.head(states_ND).float().softmax(-1).sum(0).cpu()
        mass_V[: len(probable)] += probable[:vocab_size]
        positions += len(states_ND)
    # A token that was written comes before all that were not: the shares sum to less than 1.
    order = torch.bincount(written, minlength=vocab_size) + mass_V / (mass_V.sum() + 1)
    return order.topk(min(size, vocab_size)).indices.to(adapter.model.device)


# -- draft head ----------------------------------------------------------------------------------


def head_inputs(adapter: Adapter, text: SelfGenerated) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings `[T, D]` and layer inputs `[T, Z]` that a head reads, and what follows.

    A position belongs to a token: the embedding is that of the token after it, and what follows is
    the token after that, which the head predicts.
    """
    assert text.inputs_TZ is not None
    ids_T = text.ids_T.to(adapter.model.device)
    embeddings_TD = adapter.model.get_input_embeddings()(ids_T[1:-1]).float()
    return embeddings_TD, text.inputs_TZ[:-1].to(ids_T.device).float(), ids_T[2:]


@torch.no_grad()
def start_head(head: Eagle3Head, adapter: Adapter, texts: Sequence[SelfGenerated]) -> None:
    """Begin with the best linear map from the inputs to the next state, and the model's own head.

    States are predicted in units of their standard deviations, so that norms see all channels.
    """
    chosen = texts[:_START_TEXTS]
    # Of the positions that have a state after them: the first new token's is that of the prompt.
    inputs = [text.inputs_TZ[text.prompt - 1 : -1].float() for text in chosen]  # type: ignore[index]
    states = [text.states_TD[text.prompt :].float() for text in chosen]
    width, config = adapter.width, head.config
    head.input_scale.copy_(_scale(inputs))
    scale_D = _scale(states)
    sums = NormalEquations(4 * width, width)
    embeddings = (head_inputs(adapter, text)[0][text.prompt - 1 :] for text in chosen)
    for inputs_NZ, embeddings_ND, states_ND in zip(inputs, embeddings, states, strict=True):
        read = inputs_NZ / head.input_scale, F.rms_norm(embeddings_ND.cpu(), (width,))
        sums.update(torch.cat(read, dim=1), states_ND / scale_D)
    sums.flush()
    fitted_DZ = sums.solve(ridge=_START_RIDGE, relative=True).weight.float()
    head.fc.weight.copy_(fitted_DZ[:, : 3 * width])
    rank = min(config.num_key_value_heads * config.head_dim, width)
    left, sizes, right = torch.linalg.svd(fitted_DZ[:, 3 * width :], full_matrices=False)
    root_R = sizes[:rank].sqrt()
    own, mlp = head.midlayer.self_attn, head.midlayer.mlp
    groups = config.num_attention_heads // config.num_key_value_heads
    # The first query of each group equals its key, so that a token finds itself.
    shape = (config.num_key_value_heads, groups, config.head_dim)
    queries = torch.randn(*shape, 2 * width) / width**0.5
    queries[:, 1:] *= 0.1
    own.q_proj.weight.copy_(queries.flatten(0, 2))
    own.k_proj.weight.copy_(queries[:, 0].flatten(0, 1))
    own.v_proj.weight.zero_()
    own.v_proj.weight[:rank, :width] = root_R[:, None] * right[:rank]
    carried = torch.zeros_like(own.v_proj.weight[:, :width]).T
    carried[:, :rank] = left[:, :rank] * root_R
    own.o_proj.weight.zero_()
    own.o_proj.weight.view(width, *shape)[:, :, 0] = carried.reshape(width, shape[0], shape[2])
    for name in ("gate_proj", "up_proj"):
        mlp[name].weight.normal_(std=width**-0.5)
    mlp.down_proj.weight.zero_()
    # Norms bring the prediction to the length 1, and states have another.
    length = torch.cat(states).div(scale_D).square().mean(-1).sqrt().mean()
    head.norm.weight.copy_(scale_D * length)
    head.lm_head.weight.copy_(head_rows(adapter, head.tokens_S.to(adapter.model.device))[0].float())


def _scale(parts: Sequence[Tensor]) -> Tensor:
    """Return the standard deviation of each channel, none so small that noise is blown up."""
    deviation = torch.cat(list(parts)).std(dim=0)
    return deviation.clamp_min(1e-3 * float(deviation.mean()))


@torch.no_grad()
def predict_acceptance(
    head: Eagle3Head, adapter: Adapter, texts: Sequence[SelfGenerated], batch: int = 8
) -> list[int]:
    """Return rounds of drafting over texts, and how many accepted the first draft, the second ...

    That is what an engine would count that writes these texts with this head. They hold
    `NUM_STEPS` tokens more than it writes, with the inputs of the head's layers.
    """
    totals = [0] * (NUM_STEPS + 1)
    for number in range(0, len(texts), batch):
        part = texts[number : number + batch]
        embeddings, inputs, after = zip(*(head_inputs(adapter, t) for t in part), strict=True)
        found = head(*(pad_sequence(list(each), batch_first=True) for each in (embeddings, inputs)))
        drafts_KBT = torch.stack([head.tokens_S[head.logits(each).argmax(-1)] for each in found])
        for place, (text, after_T) in enumerate(zip(part, after, strict=True)):
            right_KT = drafts_KBT[:, place, : len(after_T)] == after_T
            counts = count_accepted(right_KT, text.prompt - 1, len(after_T) - NUM_STEPS)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
    return totals


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
        vocab_S = self.head.tokens_S.to(adapter.model.device)
        weight, self.vocab_bias = head_rows(adapter, vocab_S)
        self.vocab_SD = weight.float()
        vocab_size = len(adapter.model.get_input_embeddings().weight)  # type: ignore[arg-type]
        self.can_draft_V = torch.zeros(vocab_size, dtype=torch.bool, device=vocab_S.device)
        self.can_draft_V[vocab_S] = True
        # Products in bf16 take a fifth of the time on CPUs that have them; a GPU's follow `train`.
        self.is_half = (
            vocab_S.device.type == "cpu"
            and adapter.width >= _HALF_WIDTH
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups: what was solved for already only has to follow."""
        head, layer = self.head, [p for p in self.head.midlayer.parameters() if p.ndim > 1]
        solved: dict[str, Any] = {"params": [head.fc.weight, head.lm_head.weight], "lr_scale": 0.2}
        norms = {"params": [p for p in head.parameters() if p.ndim == 1], "weight_decay": 0.0}
        return {self.phase: [{"params": layer}, solved | {"weight_decay": 0.0}, norms]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of one batch of texts."""
        return self._loss(model, self._chosen(step * self.train.accumulate + micro))

    def _loss(self, model: nn.Module, texts: Sequence[SelfGenerated]) -> BatchLoss:
        read = [head_inputs(self.adapter, text) for text in texts]
        embeddings_BTD, inputs_BTZ, after_BT = (
            pad_sequence(list(each), batch_first=True) for each in zip(*read, strict=True)
        )
        # States after the tokens that embeddings are of: what the head is to predict.
        states = [text.states_TD[1:].to(after_BT.device).float() for text in texts]
        own = [torch.arange(len(text.ids_T) - 2) >= text.prompt - 1 for text in texts]
        chosen_BT = pad_sequence(own, batch_first=True).to(after_BT.device)
        chosen_BT &= self.can_draft_V[after_BT]
        with torch.no_grad():
            targets_ND = pad_sequence(states, batch_first=True)[chosen_BT]
            log_p = F.linear(targets_ND, self.vocab_SD, self.vocab_bias).log_softmax(-1)
            best_N = log_p.argmax(-1)
        total, weight = torch.zeros((), device=targets_ND.device), self.config.hard
        with torch.autocast(after_BT.device.type, torch.bfloat16, enabled=self.is_half):
            found = [
                self.head.logits(each[chosen_BT]) for each in model(embeddings_BTD, inputs_BTZ)
            ]
        for number, logits_NS in enumerate(found):
            log_q = logits_NS.float().log_softmax(-1)
            kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
            each = (1 - weight) * kl + weight * F.nll_loss(log_q, best_N)
            total = total + _LATER_STEPS**number * each
        return BatchLoss(total, total.detach(), len(targets_ND))

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the drafts of a pass that are accepted on held-out texts, and those by position.

        `accepted_k` is the share of passes that accept the `k`-th draft.
        """
        if split != "valid":
            return {}
        size, texts = self.config.texts, self.held_out
        parts = [self._loss(self.head, texts[n : n + size]) for n in range(0, len(texts), size)]
        rounds, *accepted = predict_acceptance(self.head, self.adapter, texts, size)
        loss = sum(float(part.loss) * part.units for part in parts) / sum(p.units for p in parts)
        by_place = enumerate(accepted, start=1)
        found = {"loss": loss, "accepted": sum(accepted) / rounds}
        return found | {f"accepted_{place}": count / rounds for place, count in by_place}

    def is_converged(self) -> bool:
        """Return whether no more drafts have been accepted for `patience` validations."""
        found = [values["accepted"] for values in self._validations()]
        patience = self.config.patience
        return 0 < patience < len(found) and max(found[-patience:]) <= max(found[:-patience])

    def _validations(self) -> list[dict[str, Any]]:
        return [r.values for r in read_records(self.run.metrics)[0] if r.kind == "valid"]

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must share with the run that goes on from it."""
        measured = ("held_out", "patience", "epochs")  # epochs only say how many steps there are
        head = {name: value for name, value in asdict(self.config).items() if name not in measured}
        return {
            "model": self.adapter.identity()["fingerprint"],
            "texts": {"number": len(self.texts), "tokens": count_new(self.texts)},
            "head": head,
            "train": self.train.identity(),
        }

    def save(self, folder: Path) -> None:
        """Write the draft model, with how many drafts were accepted before training and after."""
        valid = self._validations()
        for when, values in (("before", valid[0]), ("after", valid[-1])):
            own = {name: value for name, value in values.items() if name.startswith("accepted")}
            self.draft_model.meta[when] = own
        self.draft_model.meta["held_out_tokens"] = count_new(self.held_out)
        self.draft_model.save_pretrained(folder)

    def _chosen(self, index: int) -> list[SelfGenerated]:
        """Return the texts of batch number `index`, in a new order every epoch."""
        size = min(self.config.texts, len(self.texts))
        epoch, turn = divmod(index, len(self.texts) // size)
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "texts", epoch))
        order = torch.randperm(len(self.texts), generator=generator)
        return [self.texts[number] for number in order[turn * size : (turn + 1) * size].tolist()]


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
    accelerator = make_accelerator(
        config.train, may_skip=False, may_divide=False, device=config.device
    )
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
    own, adapter = config.head, engine.adapter
    layers = layers_read(adapter.num_layers)
    texts = write_texts(folder, engine, tokenizer, config.data, config.text, seed, layers, progress)
    _check_number(len(texts), config)
    # The latest texts, so that going on with more of them would hold out others only, and greedy
    # ones, whose tokens are what drafts are judged by.
    chosen = {id(text) for text in [t for t in texts if not t.sampled][-own.held_out :]}
    held_out = [text for text in texts if id(text) in chosen]
    used = [text for text in texts if id(text) not in chosen]
    log.info("fitting a linear drafter to %d texts", len(used))
    linear = fit_linear_drafter(adapter, used, own.draft_vocab, asdict(config.text))
    torch.manual_seed(seed_at(seed, "head"))
    if earlier is None:
        tokens_S = linear.draft_vocab.sort().values
        head = Eagle3Head(Eagle3Config.of(adapter, len(tokens_S)))
        head.d2t.copy_(tokens_S - torch.arange(len(tokens_S)))
        log.info("fitting the start of the draft head")
        start_head(head, adapter, used)
    else:
        head = earlier.head.requires_grad_(True)
    steps = config.train.steps_of(own.epochs, len(used) // min(own.texts, len(used)))
    config = replace(config, train=replace(config.train, steps=steps), resume=True)
    draft_model = DraftModel(linear, head.to(accelerator.device), {"settings": asdict(config)})
    task = DraftHeadTask(draft_model, adapter, used, held_out, config, run)
    with training(config, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "valid", task.evaluate(accelerator, "valid"))
        trainer.fit()
    return DraftModel.from_pretrained(run.path)
