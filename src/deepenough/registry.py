"""The methods of the house: one line each, and the only file that names all of them.

A method is a package of `deepenough` with the same files in each:

- `commands.py`: `COMMANDS`, its verbs on the command line (must not import torch);
- `evaluation.py`: `open_candidate(run, name, data)`, a finished run as a comparison measures it;
- `figures.py`: `FIGURES` and `section(run)`, its pictures and its part of the report;
- `inspection.py`: `open_inspector(run)`, a finished run to be tried on texts in the explorer;
- `verdicts.py`: `comparison_findings(found)`, what a comparison of its runs shows, in sentences;
- `config.py`: `GRID`, the operating points that `deepenough compare` can be asked for.

A file or name that a method lacks is simply not offered. `docs/add-a-method.md` adds one.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from deepenough.config import Command


@dataclass(frozen=True)
class Method:
    """One method: the word of its commands, its package, and what it is for."""

    name: str
    """First word of its commands, and `method:` in the config.yaml of its runs."""
    package: str
    """Name of its package in `deepenough`."""
    help: str
    also_measures: tuple[str, ...] = ()
    """Methods whose runs it measures in a comparison, beside its own."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the methods whose runs it opens as candidates of a comparison."""
        return (self.name, *self.also_measures)

    def has(self, module: str) -> bool:
        """Return whether the method has a module of this name."""
        return importlib.util.find_spec(f"deepenough.{self.package}.{module}") is not None

    def load(self, module: str, attribute: str, default: Any = None) -> Any:
        """Return `attribute` of one of the method's modules, or `default` where it has none."""
        if not self.has(module):
            return default
        found = importlib.import_module(f"deepenough.{self.package}.{module}")
        return getattr(found, attribute, default)

    @property
    def commands(self) -> tuple[Command, ...]:
        """Return the method's commands."""
        found: tuple[Command, ...] = self.load("commands", "COMMANDS", ())
        return found


def find_method(name: str) -> Method:
    """Return the method whose commands begin with this word."""
    return next(method for method in METHODS if method.name == name)


METHODS: tuple[Method, ...] = (
    Method("par", "par", "search which blocks a language model needs, train and use it"),
    Method("ponder", "ponder", "classifiers that stop computing as soon as they are sure"),
    Method("lazy", "lazy", "transformers that update only the tokens that still change"),
    Method("shortcut", "shortcut", "what every layer of a Hugging Face model already knows"),
    Method(
        "decode",
        "decoding",
        "faster generation: lossless drafts, or early exit with a bound",
        also_measures=("shortcut",),
    ),
)
