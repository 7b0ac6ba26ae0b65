"""From a command line to a settings object: defaults < `--config FILE` < flags.

Beyond what `jsonargparse` does, some conveniences are settled here before it sees the words:

- `--overwrite` alone means `--overwrite true`;
- the last part of a name is enough where it is unique: `--overwrite` for `--run.overwrite`;
- `--mem-len` means `--mem_len`;
- values of the options a command names as `positional` may stand first, without their names;
- a value may begin with a dash, as block patterns (`-aad`) and negative numbers do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar, get_args

from jsonargparse import DefaultHelpFormatter, Namespace

from deepenough.config import Option, build, check, make_parser, options, read_yaml
from deepenough.errors import UserError

S = TypeVar("S")


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and example."""


def parse(
    command: str,
    settings_class: type[S],
    argv: list[str],
    description: str,
    example: str,
    positional: Sequence[str] = (),
) -> S:
    """The settings of `command` from its words; `--help` prints and exits with code 0."""
    places = "".join(f"{name.rpartition('.')[2].upper()} " for name in positional)
    parser = make_parser(
        settings_class,
        prog=f"deepenough {command}",
        usage=f"deepenough {command} {places}[--config FILE] [--NAME VALUE ...]",
        description=description.strip(),
        epilog="The last part of a name is enough where it is unique.\n\n"
        f"example:\n  {example.strip()}",
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; flags win over it."
    )
    words = _normalise(_named(argv, positional), options(settings_class))
    config = _config(words)
    values = read_yaml(settings_class, config) if config is not None else {}
    namespace = check(parser, settings_class, values, words)
    _restore_text(namespace, words, options(settings_class))
    return build(settings_class, namespace)


def _config(words: list[str]) -> str | None:
    """The file given, looked for first because flags must win wherever they stand."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        config: str | None = finder.parse_known_args(words)[0].config
    except argparse.ArgumentError as error:
        raise UserError("Option --config needs a YAML file; write --config FILE.") from error
    return config


def _named(argv: list[str], positional: Sequence[str]) -> list[str]:
    """The words with names before the values that stand first."""
    count = 0
    while count < min(len(argv), len(positional)) and not argv[count].startswith("-"):
        count += 1
    pairs = zip(positional[:count], argv[:count], strict=True)
    return [f"--{name}={value}" for name, value in pairs] + argv[count:]


def _normalise(argv: list[str], known: list[Option]) -> list[str]:
    """The words with full names, and each name joined to its value by `=`."""
    types = {option.name: option.type for option in known} | {"config": str}
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        given, equals, value = word.partition("=")
        if not given.startswith("--") or given in ("--", "--help"):
            words.append(word)
            continue
        name = _full_name(given[2:], list(types))
        if not equals and name in types:
            if rest and not _is_option(rest[0]):
                equals, value = "=", rest.pop(0)
            elif types[name] is bool:
                equals, value = "=", "true"
        words.append(f"--{name}{equals}{value}")
    return words


def _restore_text(namespace: Namespace, words: list[str], known: list[Option]) -> None:
    """Take back that YAML reads some text as nothing: `---`, or what begins with `#` or `&`."""
    optional = {option.name for option in known if str in get_args(option.type)}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name in optional and namespace[name] is None and value not in ("", "null"):
            namespace[name] = value


def _full_name(given: str, names: list[str]) -> str:
    """The dotted name meant by its last part; what is unknown is left for the parser to refuse."""
    given = given if given in names else given.replace("-", "_")
    if given in names:
        return given
    matches = [name for name in names if name.rpartition(".")[2] == given]
    if len(matches) > 1:
        choices = " or ".join(f"--{match}" for match in matches)
        raise UserError(f"Option --{given} could be {choices}; write the full name.")
    return matches[0] if matches else given


def _is_option(word: str) -> bool:
    return word == "-h" or re.match(r"--[A-Za-z]", word) is not None
