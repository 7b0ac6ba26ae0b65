"""Instructions such as people give to a chat model: forms times things, in a fixed mixed order.

They are prompts to see how a model writes when it is asked something, where a corpus only shows how
it goes on. Nothing is learned from the words themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

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
THINGS = (
    *("photosynthesis", "the French Revolution", "electric cars", "home cooking", "jazz"),
    *("machine learning", "the Great Wall of China", "yoga", "black holes", "vaccines"),
    *("small business", "public libraries", "the water cycle", "football", "solar energy"),
    *("the stock market", "dinosaurs", "meditation", "recycling", "ancient Egypt", "cheese"),
    *("the Internet", "remote work", "climate change", "fractions", "online shopping"),
    *("the immune system", "wolves", "video games", "cloud computing", "coral reefs"),
    *("time management", "the violin", "earthquakes", "space travel", "healthy food"),
    *("the Renaissance", "bicycles", "data privacy", "polar bears", "museums", "tea"),
    *("learning a language", "gravity", "camping", "the water supply", "robots", "elections"),
    *("the Silk Road", "knitting", "fashion", "bridges between cultures", "penguins", "debt"),
    *("photography", "the Olympic Games", "algebra", "dogs", "job interviews", "weather"),
    *("the Amazon rainforest", "running", "databases", "friendship", "whales", "glass"),
    *("the theory of evolution", "public transport", "breakfast", "origami", "honesty"),
    *("the Industrial Revolution", "hiking", "cats", "marketing", "the nervous system"),
    *("quantum physics", "film making", "apples", "village life", "medicine", "dreams"),
    *("the law of supply and demand", "sailing", "ants", "teamwork", "deserts", "the piano"),
)


def instructions(seed: int = 0) -> Iterator[str]:
    """All of them, each once."""
    pairs = list(product(FORMS, THINGS))
    random.Random(seed).shuffle(pairs)
    for form, thing in pairs:
        yield form.format(thing)
