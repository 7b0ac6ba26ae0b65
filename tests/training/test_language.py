"""Language modelling as a task: what is trained on what, and the figures worked by hand."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.config import resolve
from deepenough.data.tokens import ContextBatches, Prepared, TokenFile, prepare
from deepenough.errors import UserError
from deepenough.par.config import ParTrainConfig
from deepenough.par.modeling import ParConfig, ParForCausalLM
from deepenough.runs import RunFolder
from deepenough.training.distributed import make_accelerator
from deepenough.training.language import LanguageTask, evaluate_language, language_values
from deepenough.training.task import WEIGHTS
from deepenough.training.trainer import Trainer

Make = Callable[..., tuple[Any, Trainer]]


@pytest.fixture
def make(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Make:
    """A task and its trainer, of a PAR model with fixed blocks."""

    def build(changes: dict[str, Any], **train: Any) -> Any:
        config = resolve(ParTrainConfig, None, tiny(tmp_path / "run", changes, **train))
        prepared = prepare(config.data, config.dataset)
        accelerator = make_accelerator(config.train)
        torch.manual_seed(config.train.seed)
        sizes = asdict(config.model) | {"length": config.dataset.length}
        model = ParForCausalLM(ParConfig(len(prepared.tokenizer), **sizes)).train()
        task = LanguageTask(model, prepared, config.dataset, config.train, accelerator)
        run = RunFolder.create(tmp_path / "run", resume=True)
        return task, Trainer(task, config.train, run, accelerator)

    return build


def test_only_matrices_decay(make: Make) -> None:
    task, trainer = make({"model.pattern": "ad"}, weight_decay=0.5, lr=0.1, warmup=0)
    groups = trainer.optimizers[WEIGHTS].param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    kept = {id(p) for g in groups if not g["weight_decay"] for p in g["params"]}
    matrices = {id(p) for p in task.model.parameters() if p.dim() > 1}
    vectors = {id(p) for p in task.model.parameters() if p.dim() <= 1}
    assert decayed == matrices and kept == vectors and vectors
    # Without a gradient, what is left of a step is the decay: 1 - lr * weight_decay.
    before = {name: value.clone() for name, value in task.model.named_parameters()}
    for parameter in task.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizers[WEIGHTS].step()
    for name, value in task.model.named_parameters():
        share = 0.95 if value.dim() > 1 else 1.0
        assert torch.allclose(value, before[name] * share), name


def test_batches_follow_on_with_their_memory(make: Make) -> None:
    task, trainer = make({"model.pattern": "ada", "model.dropout": 0.0}, accumulate=2)
    reference = ParForCausalLM(task.model.config).train()
    reference.load_state_dict(task.model.state_dict())
    memories, losses = None, []
    for index in range(2):
        batch = task.batches[WEIGHTS][index]
        output = reference(batch["input_ids"], targets=batch["labels"], memories=memories)
        (output.loss / 2).backward()
        memories = output.memories
        losses.append(output.loss.item())
    result = trainer._step(0)
    # With memory two batches in turn are one step's text, not one batch of twice the streams: the
    # second of them remembers the first.
    assert result.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert all(
        torch.allclose(kept, made)
        for kept, made in zip(task.memories[WEIGHTS], memories, strict=True)
        if kept is not None
    )
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_without_memory_accumulation_is_a_larger_batch(make: Make) -> None:
    changes = {"model.pattern": "ada", "model.dropout": 0.0, "model.mem_len": 0}
    task, trainer = make(changes, accumulate=2, clip=0.0, warmup=0)
    reference = ParForCausalLM(task.model.config).train()
    reference.load_state_dict(task.model.state_dict())
    pair = [task.batches[WEIGHTS][index] for index in range(2)]
    joined = {name: torch.cat([batch[name] for batch in pair]) for name in pair[0]}
    loss = reference(joined["input_ids"], targets=joined["labels"]).loss
    loss.backward()
    result = trainer._step(0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_the_text_begins_anew_without_memory(make: Make) -> None:
    task, _ = make({"model.pattern": "ad", "model.dropout": 0.0})
    turns = len(task.batches[WEIGHTS])
    first = task.loss(task.model, WEIGHTS, 0, 0).loss
    second = task.loss(task.model, WEIGHTS, 1, 0).loss
    assert task.loss(task.model, WEIGHTS, turns, 0).loss == first
    assert task.loss(task.model, WEIGHTS, turns + 1, 0).loss == second


def test_evaluation_is_the_mean_over_all_tokens(make: Make) -> None:
    task, _ = make({"model.pattern": "ad"})
    tokens, data = task.prepared.tokens["valid"], task.data
    values = evaluate_language(task.model, tokens, data)
    total, count, memories = 0.0, 0, None
    for batch in ContextBatches(tokens.ids, data.batch_size, data.length):
        with torch.no_grad():
            output = task.model(batch["input_ids"], targets=batch["labels"], memories=memories)
        memories, size = output.memories, batch["labels"].numel()
        total, count = total + output.loss.item() * size, count + size
    assert values["tokens"] == count
    assert values["loss"] == pytest.approx(total / count, rel=1e-6)
    assert len(tokens) - count <= data.batch_size * data.length


def test_a_short_text_is_measured_in_fewer_streams(make: Make) -> None:
    task, _ = make({"model.pattern": "ad", "dataset.batch_size": 4})
    tokens = task.prepared.tokens["valid"]
    wide = replace(task.data, batch_size=100_000)
    values = evaluate_language(task.model, tokens, wide)
    assert len(tokens) - values["tokens"] <= wide.length
    with pytest.raises(UserError, match="too few to be measured"):
        evaluate_language(task.model, tokens, replace(task.data, length=len(tokens)))


def test_a_split_too_short_is_refused_at_once(make: Make) -> None:
    task, _ = make({"model.pattern": "ad"})
    tokens = task.prepared.tokens
    swapped = {"train": tokens["train"], "valid": tokens["train"], "test": tokens["valid"]}
    prepared = Prepared(task.prepared.tokenizer, swapped)
    data = replace(task.data, length=len(tokens["valid"]) + 1, batch_size=1)
    accelerator = make_accelerator(task.train)
    with pytest.raises(UserError, match=r"test text has .* too few"):
        LanguageTask(task.model, prepared, data, task.train, accelerator)


def test_evaluation_leaves_training_on(make: Make) -> None:
    task, trainer = make({"model.pattern": "ad"})
    assert task.evaluate(trainer.accelerator, "valid")["loss"] > 0
    assert task.model.training
    assert task.evaluate(trainer.accelerator, "unknown") == {}


# -- figures


def text_of(tokens: int, words: int, bytes: int) -> TokenFile:
    return TokenFile(Path(), 100, tokens, 1, words, bytes)


def test_figures_by_hand():
    # 8 of 10 tokens were predicted at 2 bits each; the text has 5 words and 40 bytes.
    values = language_values(8 * 2 * math.log(2), 8, text_of(tokens=10, words=5, bytes=40))
    assert values["loss"] == pytest.approx(2 * math.log(2))
    assert values["perplexity"] == pytest.approx(4.0)
    assert values["word_perplexity"] == pytest.approx(4.0 ** (10 / 5))
    assert values["bits_per_byte"] == pytest.approx(2 * 10 / 40)
    assert values["tokens"] == 8


def test_perplexity_is_of_the_total_loss():
    """Batches of losses 0 and 2 give e, not the mean of 1 and e^2."""
    values = language_values(0.0 * 4 + 2.0 * 4, 8, text_of(8, 8, 8))
    assert values["perplexity"] == pytest.approx(math.e)


def test_tokenizers_compare_by_words_and_bytes():
    """The same total loss over twice as many tokens: other perplexity, same text, same figures."""
    coarse = language_values(60.0, 10, text_of(tokens=10, words=6, bytes=50))
    fine = language_values(60.0, 20, text_of(tokens=20, words=6, bytes=50))
    assert coarse["perplexity"] > fine["perplexity"]
    for name in ("word_perplexity", "bits_per_byte"):
        assert coarse[name] == pytest.approx(fine[name])


def test_a_hopeless_model_has_infinite_perplexity_and_no_traceback():
    values = language_values(8000.0, 10, text_of(10, 5, 40))
    assert values["perplexity"] == values["word_perplexity"] == math.inf
    assert values["loss"] == 800.0
