"""Text that a model writes itself, with the state behind every token: what drafts are fitted to.

Drafts are fitted to what the model writes, because that is not what it reads. Prompts are the
beginnings of a corpus's lines and, in turn with them, instructions in the model's chat format.
States are kept as the generation computes them, so that no text is run twice. Tokens are the
model's most likely ones, or sampled; penalties of its generation config are left out.

On disk, one safetensors file holds a batch of texts: tokens, and the states behind them in half
precision. It is written when its batch is done, so that an interrupted command loses at most one
batch and goes on with the next. States that are read back are mapped from disk.

Shapes: B texts, T tokens, D width.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from deepenough.artifacts import load_tensors, save_tensors, write_json
from deepenough.data.corpus import open_corpus
from deepenough.decoding.config import MIN_PROMPT_TOKENS, SelfGeneratedConfig
from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.decoding.engine import Engine, make_engine
from deepenough.decoding.request import SequenceState, plain_request
from deepenough.decoding.verification import ForwardStrategy, decode
from deepenough.errors import UserError
from deepenough.training.config import seed_at

INDEX = "text.json"


@dataclass
class SelfGenerated:
    """One text: its tokens, the states behind them, and where the prompt ends."""

    ids_T: Tensor
    states_TD: Tensor
    """The normed last state of every token but the last, which has not been through the model."""
    prompt: int
    """Tokens of the prompt; those after it are the model's own."""


def read_lines(data: str, min_chars: int) -> Iterator[str]:
    """Return the training lines of a corpus that are long enough; refuse a missing one at once."""
    corpus = open_corpus(data)
    if "train" not in corpus.splits:
        raise UserError(f"The corpus {data} has no split train: it has {', '.join(corpus.splits)}.")
    stripped = (line.strip() for line in corpus.lines("train"))
    return (line for line in stripped if len(line) >= min_chars)


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

    Args:
        engine: The model.
        prompts: Token ids of each prompt.
        new_tokens: Most new tokens of a text.
        strategy: How the model is run, as `decode` takes it.
        generator: Samples the tokens; None takes the most likely ones.
    """
    limit, longest = engine.adapter.max_length, max(map(len, prompts))
    if limit is not None and longest + new_tokens > limit:
        raise UserError(
            f"Prompts of {longest} tokens and {new_tokens} new ones do not fit the model's "
            f"{limit}: ask for at most {max(limit - longest, 0)} new tokens."
        )
    model = engine.adapter.model
    ids_BT = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask_BT = (torch.arange(longest) < lengths[:, None]).long()
    given = ids_BT.to(model.device), mask_BT.to(model.device)
    request = plain_request(model, *given, new_tokens, limit, generator=generator)
    engine.refresh()
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
) -> list[SelfGenerated]:
    """Continue prompts as `decode_prompts` does and return the texts with their states."""
    recorder = _StateRecorder()
    rows = decode_prompts(engine, prompts, new_tokens, recorder, generator)
    return [
        SelfGenerated(torch.tensor(row.context), torch.cat(parts), len(prompt))
        for row, parts, prompt in zip(rows, recorder.states, prompts, strict=True)
    ]


class _StateRecorder(Drafter):
    """Drafts nothing, and keeps the normed states of every sequence."""

    def __init__(self) -> None:
        super().__init__(num_draft_tokens=1)
        self.states: list[list[Tensor]] = []
        """Of each sequence, states `[T, D]` of its prompt and then of each new token."""

    def begin(self, engine: Engine) -> None:
        self.states = [[engine.norm(hidden_TD)] for hidden_TD in engine.prompt]

    def observe(self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        for row, states_TD, count in zip(rows, normed_BTD, counts, strict=True):
            self.states[row.index].append(states_TD[:count])

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        return Proposal([[] for _ in rows])


def generate_texts(
    engine: Engine,
    prompts: Iterator[list[int]],
    config: SelfGeneratedConfig,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[SelfGenerated]:
    """Yield continuations of prompts until there are `config.tokens` new tokens.

    `progress` is called with the new tokens so far and those wanted.
    """
    done = 0
    while done < config.tokens and (batch := list(islice(prompts, config.batch))):
        for text in continue_prompts(engine, batch, config.new_tokens):
            done += len(text.ids_T) - text.prompt
            yield text
        if progress is not None:
            progress(min(done, config.tokens), config.tokens)


# -- on disk -------------------------------------------------------------------------------------


class SavedTexts(Sequence[SelfGenerated]):
    """All texts of a folder, by number, their states mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._texts: list[SelfGenerated] = []
        self.num_new = 0
        """Tokens that the model itself has written."""
        self.num_parts = 0
        while self._part().is_file():
            self._read_part()

    def _part(self) -> Path:
        return self.folder / f"part-{self.num_parts:05d}.safetensors"

    def _read_part(self) -> None:
        tensors, _ = load_tensors(self._part())
        lengths = tensors["lengths"].tolist()
        ids = tensors["ids"].long().split(lengths)
        states = tensors["states"].split([length - 1 for length in lengths])
        for each in zip(ids, states, tensors["prompts"].tolist(), strict=True):
            self._texts.append(SelfGenerated(*each))
            self.num_new += len(each[0]) - each[2]
        self.num_parts += 1

    def append(self, texts: Sequence[SelfGenerated]) -> None:
        """Write a batch of texts as one more part."""
        tensors = {
            "ids": torch.cat([text.ids_T for text in texts]).int(),
            "lengths": torch.tensor([len(text.ids_T) for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
            "states": torch.cat([text.states_TD for text in texts]).cpu().half(),
        }
        try:
            save_tensors(self._part(), tensors)
        except OSError as error:
            raise UserError(
                f"{self._part()} cannot be written ({error}): make room and go on with --resume."
            ) from error
        self._read_part()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return self._texts[index]


def write_texts(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    data: str,
    config: SelfGeneratedConfig,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> SavedTexts:
    """Let the model write until the folder holds `config.tokens` new tokens, and return all texts.

    Args:
        folder: Where the texts are kept; those that are there already stay.
        model: The model that writes.
        tokenizer: Its tokenizer.
        data: Corpus whose lines begin the texts.
        config: How much is written, and from what.
        seed: Seed of the batches that are sampled.
        progress: Called with the new tokens so far and those wanted.
    """
    engine = make_engine(model)
    about = {"model": engine.adapter.identity()["fingerprint"], "seed": seed, "data": data}
    _check_index(folder, about | asdict(config))
    texts = SavedTexts(folder)
    prompts = islice(make_prompts(tokenizer, data, config), len(texts), None)
    while texts.num_new < config.tokens and (batch := list(islice(prompts, config.batch))):
        generator = None
        if config.sample_every and texts.num_parts % config.sample_every == 1:
            generator = torch.Generator().manual_seed(seed_at(seed, "text", texts.num_parts))
        texts.append(continue_prompts(engine, batch, config.new_tokens, generator))
        if progress is not None:
            progress(min(texts.num_new, config.tokens), config.tokens)
    if not len(texts):
        raise UserError(
            f"No line of {data} has {config.min_chars} characters: give another text or a lower "
            "text.min_chars."
        )
    return texts


def _check_index(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to go on with texts that were written in another way; more of the same are fine."""
    path = folder / INDEX
    try:
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            for name, value in about.items():
                if name != "tokens" and known.get(name) != value:
                    raise UserError(
                        f"The texts in {folder} were written with another {name}: it was "
                        f"{known.get(name)} and is now {value}; give the same or another folder."
                    )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, about)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}): choose another folder.") from error


# -- prompts -------------------------------------------------------------------------------------


def make_prompts(tokenizer: Any, data: str, config: SelfGeneratedConfig) -> Iterator[list[int]]:
    """Yield beginnings of a corpus's lines, each followed by an instruction while there are any."""
    orders = _instruction_prompts(tokenizer) if config.instructions else iter(())
    lines = read_lines(data, config.min_chars)
    for prompt in prompts_from(tokenizer, lines, config.prompt_tokens):
        yield prompt
        yield from islice(orders, 1)


def _instruction_prompts(tokenizer: Any) -> Iterator[list[int]]:
    for text in instructions():
        if not getattr(tokenizer, "chat_template", None):
            yield tokenizer(text)["input_ids"]
            continue
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        yield tokenizer(text, add_special_tokens=False)["input_ids"]


FORMS = (
    "Can you tell me about {}?",
    "What is the best way to learn about {}?",
    "Write a paragraph about {}.",
    "Describe {} in simple words.",
    "What are the advantages and disadvantages of {}?",
    "Why are people interested in {}?",
    "Write a dialogue between two friends who talk about {}.",
    "Give a short introduction to {}.",
    "How has {} changed over the last hundred years?",
    "Write a blog post about {}.",
    "What are common mistakes when it comes to {}?",
    "Make a list of questions about {} for a quiz, with answers.",
    "I have to give a talk on {}. Please write an outline.",
    "Write a fairy tale in which {} plays a part.",
    "What would a world without {} look like?",
    "Explain step by step how to get started with {}.",
    "Write an e-mail to my teacher in which I ask about {}.",
    "Which books or ideas should I know if I care about {}?",
    "Tell me something surprising about {}.",
    "How would you teach {} to somebody who knows nothing of it?",
    "Write a product description that has to do with {}.",
    "What is the relation between {} and everyday life?",
    "Write a newspaper article about {}.",
    "Give three reasons for and three against {}.",
    "What do scientists say about {}?",
    "Write a short essay on the importance of {}.",
    "How much does {} cost, and what does it depend on?",
    "Write a Python program that has something to do with {}.",
    "Imagine that you are an expert on {}. What do you do all day?",
    "Answer in two sentences: what is {}?",
)
TOPICS = tuple(
    topic.strip()
    for topic in """
photosynthesis, the French Revolution, electric cars, home cooking, jazz, machine learning, yoga,
the Great Wall of China, black holes, vaccines, small business, public libraries, the water cycle,
football, solar energy, the stock market, dinosaurs, meditation, recycling, ancient Egypt, cheese,
the Internet, remote work, climate change, fractions, online shopping, the immune system, wolves,
video games, cloud computing, coral reefs, time management, the violin, earthquakes, space travel,
healthy food, the Renaissance, bicycles, data privacy, polar bears, museums, tea, gravity, camping,
learning a language, the water supply, robots, elections, the Silk Road, knitting, fashion, debt,
trade between cultures, penguins, photography, the Olympic Games, algebra, dogs, job interviews,
weather, the Amazon rainforest, running, databases, friendship, whales, glass, medicine, dreams,
the theory of evolution, public transport, breakfast, origami, honesty, hiking, cats, marketing,
the Industrial Revolution, the nervous system, quantum physics, film making, apples, village life,
the law of supply and demand, sailing, ants, teamwork, deserts, the piano, castles, chocolate,
pirates, airports, pottery, tides, dragons, tax, tennis, olive oil, comets, bakeries, sharks,
the human eye, farming, opera, hospitals, shipwrecks, geometry, pandas, insurance, lightning,
the Vikings, painting a room, mushrooms, statistics, horses, glaciers, diaries, ballet, rockets,
the digestive system, wine, thunderstorms, fireworks, the Cold War, kites, algorithms, owls, salt,
parenting, trade unions, comic books, snow, the lungs, rugby, sculpture, tigers, toys, magnets,
moving to another country, fossils, tomatoes, satellites, democracy, juggling, frogs, steel, honey,
the Black Death, a budget for students, skiing, dolphins, carpets, calculus, monkeys, perfume,
the periodic table, kindness, cinemas, hurricanes, wheat, submarines, the guitar, bats, cotton,
writing a resume, ethics, skateboards, elephants, islands, fractals, eagles, silk, soup, tunnels,
the Aztecs, passwords, gymnastics, crabs, waterfalls, prime numbers, parrots, bricks, rice,
the solar system, shyness, theatre, floods, sugar, helicopters, the drums, hedgehogs, leather,
planning a wedding, philosophy, surfing, kangaroos, caves, probability, swans, concrete, pizza,
the Ottoman Empire, antibiotics, boxing, octopuses, canals, logarithms, crows, rubber, noodles,
the skeleton, patience, circuses, droughts, potatoes, hot-air balloons, the flute, foxes, wool,
buying a house, logic, golf, lions, forests, vectors, ducks, plastic, curry, elevators, clocks,
the Enlightenment, genetics, archery, jellyfish, harbours, matrices, peacocks, aluminium, salad,
muscles, courage, radio, wildfires, maize, tanks, the trumpet, squirrels, linen, mirrors, candles,
starting a company, psychology, cricket, giraffes, swamps, topology, hummingbirds, copper,
the Inca, nutrition, fencing, turtles, dams, graphs, flamingos, gold, sandwiches, ice cream, keys,
the brain, humour, television, avalanches, soybeans, drones, the harp, beavers, denim, zoos, wheels,
negotiation, economics, volleyball, zebras, beaches, sets, pigeons, silver, sushi, batteries, soap,
the Bronze Age, allergies, climbing, seahorses, windmills, computer graphics, storks, diamonds,
teeth, loneliness, podcasts, fog, bananas, scooters, the organ, deer, velvet, stairs, pencils,
public speaking, sociology, basketball, camels, lakes, encryption, ravens, oil, pancakes, doors,
the Middle Ages, vitamins, wrestling, lobsters, sewers, operating systems, geese, coal, spices,
skin, curiosity, newspapers, rainbows, grapes, ferries, the saxophone, rabbits, ceramics, fences,
making new friends, astronomy, hockey, rhinos, valleys, compilers, hawks, uranium, pasta, roofs,
the Ming dynasty, hygiene, judo, starfish, power plants, spreadsheets, cranes, marble, eggs, shoes,
blood, jealousy, the telephone, sunsets, oranges, motorcycles, the choir, badgers, hats, windows
""".replace("\n", " ").split(",")
)
#: Instructions about one topic that follow each other.
_FORMS_AT_ONCE = 4


def instructions(seed: int = 0) -> Iterator[str]:
    """Yield instructions such as people give to a chat model: topics times forms, in a fixed order.

    Each round goes through all topics with a few forms each, so that late instructions are about
    topics that have not come before, as long as there are such topics.
    """
    topics, forms = list(dict.fromkeys(TOPICS)), list(FORMS)
    draw = random.Random(seed)
    draw.shuffle(topics)
    draw.shuffle(forms)
    for first in range(0, len(forms), _FORMS_AT_ONCE):
        for number, topic in enumerate(topics):
            for ahead in range(first, min(first + _FORMS_AT_ONCE, len(forms))):
                # Another beginning for every topic, or all forms of a round would be the same.
                yield forms[(ahead + 7 * number) % len(forms)].format(topic)
