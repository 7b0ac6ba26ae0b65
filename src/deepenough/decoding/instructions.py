"""Instructions such as people give to a chat model: forms times things, in a fixed order.

They are prompts to see how a model writes when it is asked something, where a corpus only shows how
it goes on. Nothing is learned from the words themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

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
THINGS = tuple(
    thing.strip()
    for thing in """
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
#: Instructions about a thing that follow each other.
_FORMS_AT_ONCE = 4


def instructions(seed: int = 0) -> Iterator[str]:
    """Thing after thing, with a few forms each; then all over again with other forms.

    So what comes late is about things that have not come before, as long as there are such things.
    """
    things, forms = list(dict.fromkeys(THINGS)), list(FORMS)
    draw = random.Random(seed)
    draw.shuffle(things)
    draw.shuffle(forms)
    for first in range(0, len(forms), _FORMS_AT_ONCE):
        for number, thing in enumerate(things):
            for ahead in range(first, min(first + _FORMS_AT_ONCE, len(forms))):
                # Another beginning for every thing, or all forms of a round would be the same.
                yield forms[(ahead + 7 * number) % len(forms)].format(thing)
