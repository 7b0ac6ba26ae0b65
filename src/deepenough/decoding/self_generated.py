"""Text that a model writes itself, with the state behind every token: what drafts are fitted to.

Drafts are fitted to what the model writes, because that is not what it reads. States are kept as
the generation computes them, so that no text is run twice. Tokens are the model's most likely ones,
or sampled; penalties of its generation config are left out.

On disk, one safetensors file holds a batch of texts: tokens, the states behind them in half
precision, and how they were made. An interrupted command loses at most one batch.

Shapes: B texts, T tokens, D width.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepenough.artifacts import DamagedError, load_tensors, save_tensors
from deepenough.data.corpus import open_corpus
from deepenough.decoding.config import MIN_PROMPT_TOKENS, SelfGeneratedConfig
from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.request import SequenceState, plain_request
from deepenough.decoding.verification import ForwardStrategy, decode
from deepenough.errors import UserError
from deepenough.training.config import seed_at

log = logging.getLogger("deepenough")


@dataclass
class SelfGenerated:
    """One text: its tokens, the states behind them, and where the prompt ends."""

    ids_T: Tensor
    states_TD: Tensor
    """The normed last state of every token but the last, which has not been through the model."""
    prompt: int
    """Tokens of the prompt; those after it are the model's own."""
    inputs_TZ: Tensor | None = None
    """Inputs of some layers at the same tokens, side by side, where they were asked for."""
    sampled: bool = False
    """Whether tokens were drawn, not the most likely ones."""


def count_new(texts: Sequence[SelfGenerated]) -> int:
    """Return how many tokens the model itself has written."""
    return sum(len(text.ids_T) - text.prompt for text in texts)


def prompts_from(tokenizer: Any, texts: Iterable[str], length: int) -> Iterator[list[int]]:
    """Yield the first `length` tokens of each text; texts of very few tokens are skipped."""
    for text in texts:
        ids = tokenizer(text)["input_ids"][:length]
        if len(ids) >= MIN_PROMPT_TOKENS:
            yield ids


def decode_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    strategy: ForwardStrategy | Drafter | None = None,
    generator: torch.Generator | None = None,
) -> list[SequenceState]:
    """Continue prompts in one batch, without the penalties of the model's generation config.

    The model is run as `decode` takes the `strategy`. A `generator` samples the tokens; None takes
    the most likely ones.
    """
    model, limit = engine.adapter.model, engine.max_length
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids_BT = pad_sequence(rows, batch_first=True)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    request = plain_request(model, ids_BT, mask_BT, new_tokens, limit, generator=generator)
    try:
        decoded = decode(engine, request, strategy)
    finally:
        engine.release()
    if decoded.interrupted:
        raise KeyboardInterrupt
    return decoded.rows


def continue_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    generator: torch.Generator | None = None,
    layers: tuple[int, ...] = (),
) -> list[SelfGenerated]:
    """Continue prompts as `decode_prompts` does and return the texts with their states.

    `layers` are those whose inputs are kept as well.
    """
    recorder = _StateRecorder(layers)
    rows = decode_prompts(engine, prompts, new_tokens, recorder, generator)
    kept = zip(rows, recorder.states, recorder.inputs, prompts, strict=True)
    return [
        SelfGenerated(
            torch.tensor(row.context),
            torch.cat(states),
            len(prompt),
            torch.cat(inputs) if layers else None,
            generator is not None,
        )
        for row, states, inputs, prompt in kept
    ]


class _StateRecorder(Drafter):
    """Drafts nothing, and keeps the normed states of every sequence, and inputs of layers."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__(num_draft_tokens=1)
        self.layers_read = layers
        self.states: list[list[Tensor]] = []
        """Of each sequence, states `[T, D]` of its prompt and then of each new token."""
        self.inputs: list[list[Tensor]] = []

    def begin(self, engine: Engine) -> None:
        self.engine = engine
        self.states = [[engine.norm(hidden_TD)] for hidden_TD in engine.prompt]
        self.inputs = [[inputs_TZ] for inputs_TZ in engine.prompt_inputs]

    def observe(self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self.states[row.index].append(normed_BTD[place, :count])
            self.inputs[row.index].append(self.engine.layer_inputs[place, :count])

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        return Proposal([[] for _ in rows])


# -- on disk -------------------------------------------------------------------------------------


def write_texts(
    folder: Path,
    engine: Engine,
    tokenizer: Any,
    data: str,
    config: SelfGeneratedConfig,
    seed: int,
    layers: tuple[int, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[SelfGenerated]:
    """Let the model write until the folder holds `config.tokens` new tokens, and return all texts.

    Lines of the corpus `data` begin them; inputs of `layers` are kept with them. `progress` is
    called with the new tokens so far and those wanted.
    """
    about = {"model": engine.adapter.identity()["fingerprint"], "seed": seed, "data": data}
    about |= {"layers": layers}
    about |= {name: value for name, value in asdict(config).items() if name != "tokens"}
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[SelfGenerated] = []
    number = 0
    try:
        while (path := folder / f"part-{number:05d}.safetensors").is_file():
            texts += load_texts(path, about)
            number += 1
    except DamagedError as error:
        log.warning("%s It is written again, and what came after it.", error)
    done = count_new(texts)
    prompts = islice(make_prompts(tokenizer, data, config), len(texts), None)
    while done < config.tokens and (batch := list(islice(prompts, config.batch))):
        generator = None
        if config.sample_every and number % config.sample_every == 1:
            generator = torch.Generator().manual_seed(seed_at(seed, "text", number))
        path = folder / f"part-{number:05d}.safetensors"
        made = continue_prompts(engine, batch, config.new_tokens, generator, layers)
        save_texts(path, made, about)
        # From disk, where their states are mapped: all of them may be more than the memory.
        texts += load_texts(path, about)
        done, number = count_new(texts), number + 1
        if progress is not None:
            progress(min(done, config.tokens), config.tokens)
    if not texts:
        raise UserError(f"All lines of {data} are too short to begin a text: give longer ones.")
    return texts


def save_texts(path: Path, texts: Sequence[SelfGenerated], about: Mapping[str, Any]) -> None:
    """Write a batch of texts to one safetensors file; `about` says how they were made."""
    tensors = {
        "ids": torch.cat([text.ids_T for text in texts]).int(),
        "lengths": torch.tensor([len(text.ids_T) for text in texts]),
        "prompts": torch.tensor([text.prompt for text in texts]),
        "sampled": torch.tensor([text.sampled for text in texts]),
        "states": torch.cat([text.states_TD for text in texts]).cpu().half(),
    }
    inputs = [text.inputs_TZ for text in texts if text.inputs_TZ is not None]
    if inputs:  # single channels may be too large for half precision
        tensors["inputs"] = torch.cat(inputs).cpu().bfloat16()
    try:
        known = {name: str(value) for name, value in about.items()}
        save_tensors(path, tensors, known | {"part": path.stem})
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error}): make room and go on with --resume."
        ) from error


def load_texts(path: Path, about: Mapping[str, Any]) -> list[SelfGenerated]:
    """Return the texts that `save_texts` wrote; refuse those that were made in another way."""
    tensors, known = load_tensors(path)
    if known.get("part", path.stem) != path.stem:
        raise DamagedError(f"{path} is another part of the texts: delete it and make it anew.")
    for name, value in about.items():
        if known.get(name) != str(value):
            raise UserError(
                f"The texts in {path.parent} were written with another {name}: it was "
                f"{known.get(name)} and is now {value}; give the same or another folder."
            )
    lengths = tensors["lengths"].tolist()
    ids = tensors["ids"].long().split(lengths)
    states = tensors["states"].split([length - 1 for length in lengths])
    inputs: Any = [None] * len(lengths)
    if "inputs" in tensors:
        inputs = tensors["inputs"].split([length - 1 for length in lengths])
    prompts, sampled = (tensors[name].tolist() for name in ("prompts", "sampled"))
    return list(map(SelfGenerated, ids, states, prompts, inputs, sampled))


# -- prompts -------------------------------------------------------------------------------------


def read_lines(data: str, min_chars: int) -> Iterator[str]:
    """Return the training lines of a corpus that are long enough; refuse a missing one at once."""
    corpus = open_corpus(data)
    if "train" not in corpus.splits:
        raise UserError(f"The corpus {data} has no split train: it has {', '.join(corpus.splits)}.")
    stripped = (line.strip() for line in corpus.lines("train"))
    lines = (line for line in stripped if len(line) >= min_chars)
    first = next(lines, None)
    if first is None:
        raise UserError(
            f"No line of {data} has {min_chars} characters: give another text or a lower "
            "text.min_chars."
        )
    return chain([first], lines)


def make_prompts(tokenizer: Any, data: str, config: SelfGeneratedConfig) -> Iterator[list[int]]:
    """Yield beginnings of a corpus's lines.

    Every second one is put into the model's chat format, if it has one, as what a user says.
    """
    lines = read_lines(data, config.min_chars)
    for number, ids in enumerate(prompts_from(tokenizer, lines, config.prompt_tokens)):
        if number % 2 and getattr(tokenizer, "chat_template", None):
            said = tokenizer.decode(ids, skip_special_tokens=True)
            message = [{"role": "user", "content": said}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield ids
