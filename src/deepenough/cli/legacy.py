"""Provisional: commands that still stand in this folder, until their method has them."""

import importlib

COMMANDS: dict[str, str] = {
    "shortcut fit": "fit linear maps between the layers of a Hugging Face model",
    "shortcut eval": "measure what each layer already knows",
    "shortcut lens": "show what every layer would say after every token of a prompt",
    "shortcut plot": "draw the pictures of a shortcut run",
    "ponder train": "fine-tune a classifier that stops as soon as it is sure",
    "ponder eval": "measure its accuracy, passes and seconds",
    "ponder predict": "label lines of text as they come",
    "ponder parity": "PonderNet's experiment: learn parity, extrapolate to harder vectors",
    "lazy train": "train a translator, executor or language model that updates only what changes",
    "lazy translate": "translate lines of text as they come",
    "lazy eval": "measure its quality, how deep its tokens go and what that costs",
    "lazy sweep": "BLEU for other steps, and for tokens that stop sooner or later",
    "lazy plot": "draw how far each token still moves at each step, and when it rests",
    "report": "put all that runs have to show into one page",
    "exit generate": "write text with a model that spends less, tokens shaded by depth",
    "exit calibrate": "find the fastest exit threshold whose disagreement is bounded",
    "exit tune": "make a model ready for drafts, trained on what it writes itself",
    "plot": "draw the pictures of a run",
}


def find_command(words: list[str]) -> tuple[str, list[str]]:
    """The command, of one word or two, and what was written behind it."""
    pair = " ".join(words[:2])
    return (pair, words[2:]) if pair in COMMANDS else (words[0], words[1:])


def run_command(command: str, rest: list[str]) -> int:
    """Its exit code."""
    module = importlib.import_module("deepenough.cli." + command.replace(" ", "."))
    return int(module.main(rest))
