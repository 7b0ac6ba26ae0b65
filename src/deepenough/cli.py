"""The command line: one tree of commands, built from the registry.

`deepenough METHOD VERB TARGET --data TEXT --out FOLDER`, with `profile`, `compare`, `report`,
`demo` and `cutoffs` beside the methods. Settings come from defaults, then `--config FILE`, then
flags. Beyond what `jsonargparse` does, a few conveniences are settled here:

- `--overwrite` alone means `--overwrite true`;
- the last part of a name is enough where it is unique: `--vocab_size` for `--dataset.vocab_size`;
- `--mem-len` means `--mem_len`, and 65% means 0.65;
- values of the options that a command calls `positional` may stand first, without their names;
- a value may begin with a dash, as block patterns (`-aad`) and negative numbers do.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import json
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from deepenough import __version__
from deepenough.config import (
    Command,
    Option,
    build,
    convert,
    left_null,
    load_place,
    make_parser,
    options,
    read_yaml,
)
from deepenough.errors import LostProcessError, UserError
from deepenough.figure import shortened
from deepenough.registry import METHODS
from deepenough.report.commands import PlotConfig, plot, plot_command
from deepenough.runs import RunFolder

if TYPE_CHECKING:
    from jsonargparse import Namespace

EXAMPLE = "deepenough demo --out runs/demo"

#: Where the recipes are that ship: in the installed package, or beside src/ in the repository.
RECIPES = [Path(__file__).parent / "configs", Path(__file__).parents[2] / "configs"]

#: What a full disk or a missing permission gives; any other error of the system is a bug.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}

SECONDS_OF_SILENCE = 4.0

#: Commands that belong to no method, by the module that declares them.
OTHERS = {
    "profile": "deepenough.profiling:PROFILE",
    "compare": "deepenough.compare.commands:COMPARE",
    "report": "deepenough.report.commands:REPORT",
    "explore": "deepenough.explorer.commands:EXPLORE",
    "demo": "deepenough.demo:DEMO",
    "cutoffs": "deepenough.nn.commands:CUTOFFS",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    That is 2 for a user's mistake, 130 for Ctrl-C and 143 for SIGTERM.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _termination_is_an_exit(), _signs_of_life(words, enabled=argv is None):
            code = run(words)
        sys.stdout.flush()
    except LostProcessError as error:
        _say(str(error).removesuffix(".") + _how_to_go_on(words))
        return 1
    except UserError as error:
        return _say(str(error))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        if not _reader_gone():
            raise
        return 141  # as a shell reports a program whose reader has left
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        advice = "name another file or folder"
        if error.errno in DISK_ERRORS:
            advice = "make room, or give the permission"
        return _say(f"{error.filename!s:.200} {error.strerror}: {advice}.")
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) and os.environ.get("RANK", "0") == "0":
        print(f"deepenough: interrupted{_how_to_go_on(words)}", file=sys.stderr)
    return code


def _say(error: str) -> int:
    """Print a user's mistake, without what a terminal would take for a command; return its code."""
    said = shortened(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", error), 1000)
    print(f"deepenough: error: {said}", file=sys.stderr)
    return 2


class _Watched:
    """A stream that remembers when something was last written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.last = stream, time.monotonic()

    def write(self, text: str) -> int:
        self.last = time.monotonic()
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _signs_of_life(words: list[str], enabled: bool) -> Iterator[None]:
    """Say every few seconds that a command is at work, as long as it says nothing itself."""
    waits = sys.stdin.isatty() and words[1:2] in (["predict"], ["translate"])
    waits |= words[:1] == ["explore"]  # for lines to be typed, or for people to come
    if not enabled or waits or os.environ.get("RANK", "0") != "0":
        yield
        return
    out, errors, ended = _Watched(sys.stdout), _Watched(sys.stderr), threading.Event()

    def watch(began: float) -> None:
        while not ended.wait(1.0):
            now = time.monotonic()
            pause = min(30.0, max(SECONDS_OF_SILENCE, (now - began) / 10))
            if now - max(out.last, errors.last) >= pause:
                errors.write(f"{' '.join(words[:2])}: at work for {now - began:.0f} s\n")

    threading.Thread(target=watch, args=(time.monotonic(),), daemon=True).start()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):  # type: ignore[type-var]
        try:
            yield
        finally:
            ended.set()


@contextlib.contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    """Let SIGTERM end a command as an exit does, so that what is half done is cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # as a lost process has set
            signal.signal(signal.SIGTERM, before)


def _how_to_go_on(words: list[str]) -> str:
    """Return what to add to the news that a command was interrupted: the command that goes on."""
    name, rest = _split(words, commands())
    command = commands()[name]
    config = parse_command(command, name, rest)
    if not (command.goes_on or hasattr(config, "resume")):
        return ""
    line = shlex.join([*_launcher(), "deepenough", *words])
    if hasattr(config, "resume") and Path(config.out).resolve() in RunFolder.begun:
        line = re.sub(r" --(overwrite|resume)([= ](true|false))?(?= |$)", "", line) + " --resume"
    return f"; go on with: {line}"


def _launcher() -> list[str]:
    """Return the words that started several processes; nothing where there is one."""
    world, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world == 1:
        return []
    nodes = ["--nnodes", str(world // here)] if world > here else []
    return ["torchrun", *nodes, "--nproc-per-node", str(here), "-m"]


def run(words: list[str]) -> int:
    """Run the command that `words` name and return its exit code; a user's mistake is raised."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"deepenough {__version__}")
        return 0
    table = commands()
    name, rest = _split(words, table)
    if name not in table:
        return _refuse(name, rest, table)
    try:
        return execute(table[name], parse_command(table[name], name, rest))
    except SystemExit as end:  # how a parser leaves after printing its help
        return end.code if isinstance(end.code, int) else 0


def commands() -> dict[str, Command]:
    """Return every command by its words, such as "par train" or "report", in order of the help.

    Every method that has figures has `plot`; one that must compute something for it has its own.
    """
    found: dict[str, Command] = {}
    for method in METHODS:
        own = {f"{method.name} {command.name}": command for command in method.commands}
        plot = f"{method.name} plot"
        if plot not in own and method.has("figures"):
            own[plot] = plot_command(method.name)
        found |= own
    return found | {name: load_place(place) for name, place in OTHERS.items()}


def execute(command: Command, config: Any) -> int:
    """Check the settings of a command, run it and return its exit code."""
    code = _show(command.start(config), getattr(config, "json", False))
    if command.draws and code == 0:
        folder = None if command.draws == "out" else config.out  # else plots in the run itself
        plot(PlotConfig([getattr(config, command.draws)], folder))
    return code


def _show(found: Any, as_json: bool) -> int:
    """Print what a command returns, from the first process alone; return its exit code."""
    if isinstance(found, int):
        return found
    if isinstance(found, Mapping):
        from deepenough.measurement import figure_lines  # which loads numpy

        found = json.dumps(found) if as_json else figure_lines(found)
    for line in [found] if isinstance(found, str) else found or ():
        if os.environ.get("RANK", "0") == "0":
            print(line, flush=True)
    return 0


def overview(table: Mapping[str, Command] | None = None, example: str = EXAMPLE) -> str:
    """Return what `deepenough --help` prints, or `deepenough METHOD --help` for its commands."""
    shown = commands() if table is None else table
    first = next(iter(shown))
    width = max(map(len, shown))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in shown.items())
    return (
        "usage: deepenough METHOD VERB [TARGET] [--config FILE] [--NAME VALUE ...]\n\n"
        "Transformers that go only as deep as they need.\n\n"
        f"commands:\n{lines}\n\n"
        "options:\n"
        f"  -h, --help     show this, or the options of a command: deepenough {first} --help\n"
        "  -V, --version  show the version\n\n"
        f"example:\n  {example}"
    )


def parse_command(command: Command, name: str, argv: list[str]) -> Any:
    """Return the settings object of a command from its words; `--help` prints and exits."""
    settings_class = _settings_class(command, argv)
    places = "".join(_place(position) for position in command.positional)
    parser = make_parser(
        settings_class,
        prog=f"deepenough {name}",
        usage=f"deepenough {name} {places}[--config FILE] [--NAME VALUE ...]",
        description=command.description or f"{command.help[:1].upper()}{command.help[1:]}.",
        epilog="The last part of a name is enough where it is unique.\n\n"
        f"example:\n  {command.example.strip()}",
        formatter_class=_formatter(),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or the name of one that ships; flags win over it.",
    )
    known = options(settings_class)
    words = _normalise(_named(argv, command.positional), known)
    given = {word.partition("=")[0].removeprefix("--") for word in words}
    words += [f"--{name}=null" for name in left_null(settings_class, given)]
    for option in known:
        if option.unless in given and f"--{option.name}=null" not in words and option.name in given:
            raise UserError(f"Give either --{option.name} or --{option.unless}, not both.")
    config = _config_file(words)
    values = read_yaml(settings_class, config) if config is not None else {}
    namespace = convert(parser, settings_class, values, words)
    _restore_text(namespace, words, known)
    return build(settings_class, namespace)


def train(method: str, verb: str = "train", **options: Any) -> RunFolder:
    """Train from Python as `deepenough METHOD train` does, and return the run.

    The first words of the command are `method` and `verb`, such as `search`, `fit` or `tune`. Its
    options are named as on the command line; `__` stands for a dot, as in `train__seed=1`, and the
    last part of a name is enough where it is unique. For example
    `de.train("par", data="mytext.txt", pattern="adad", steps=2000, out="runs/adad")`.
    """
    name = f"{method} {verb}"
    table = commands()
    if name not in table:
        raise UserError(f"There is no command {name}; there are {', '.join(table)}.")
    words = []
    for option, value in options.items():
        spelt = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{option.replace('__', '.')}={spelt}")
    config = parse_command(table[name], name, words)
    with contextlib.redirect_stdout(io.StringIO()):  # what to type next is for the command line
        table[name].start(config)
    return RunFolder.open(config.out)


def _settings_class(command: Command, argv: list[str]) -> type:
    if isinstance(command.config, str):
        return load_place(command.config)  # type: ignore[no-any-return]
    return command.config if isinstance(command.config, type) else command.config(argv)


def _place(position: str) -> str:
    """Return how the usage line shows a positional option."""
    name = position.removesuffix("*").removesuffix(".name").rpartition(".")[2].upper()
    return f"{name.removesuffix('S')} ... " if position.endswith("*") else f"{name} "


def _formatter() -> type[argparse.HelpFormatter]:
    from jsonargparse import DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Keeps the line breaks of description and example."""

    return Formatter


def _split(words: list[str], table: Mapping[str, Command]) -> tuple[str, list[str]]:
    """Return the command, of one word or two, and what was written behind it."""
    pair = " ".join(words[:2])
    return (pair, words[2:]) if pair in table else (words[0], words[1:])


def _refuse(first: str, rest: list[str], table: Mapping[str, Command]) -> int:
    """Print a method's commands if only the method was named, else say what was meant."""
    members = {name: command for name, command in table.items() if name.startswith(f"{first} ")}
    if members and (not rest or rest[0] in ("-h", "--help", "help")):
        print(overview(members, f"{next(iter(members.values())).example}"))
        return 0
    command = f"{first} {rest[0]}" if members else first
    verbs = [name for name in table if name.split()[-1] == first]
    close = difflib.get_close_matches(command, members or table, n=1) or verbs[:1]
    names = list(members) or list(dict.fromkeys(name.split()[0] for name in table))
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}."
    raise UserError(f"There is no command {command}; {advice}")


def _config_file(words: list[str]) -> str | None:
    """Return the file given, looked for first because flags must win wherever they stand."""
    if "--config" in words:
        raise UserError("Option --config needs a YAML file; write --config FILE.")
    given = [word for word in words if word.startswith("--config=")]
    if not given:
        return None
    name = given[-1].removeprefix("--config=")
    recipes = {path.stem: str(path) for folder in RECIPES for path in folder.glob("*.yaml")}
    if name not in recipes and not os.path.exists(name):
        known = ", ".join(sorted(recipes))
        raise UserError(f"There is no settings file {name}: give a YAML file, or one of {known}.")
    return name if os.path.isfile(name) else recipes.get(name, name)


def _named(argv: list[str], positional: tuple[str, ...]) -> list[str]:
    """Return the words with names before the values that stand first."""
    rest = list(argv)
    named = []
    for position in positional:
        first = rest if position.endswith("*") else rest[:1]
        taken = list(takewhile(lambda word: not word.startswith("-"), first))
        if not taken:
            break
        rest = rest[len(taken) :]
        value = json.dumps(taken) if position.endswith("*") else taken[0]
        named.append(f"--{position.removesuffix('*')}={value}")
    return named + rest


def _normalise(argv: list[str], known: list[Option]) -> list[str]:
    """Return the words with full names, and each name joined to its value by `=`."""
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
            if rest and not re.match(r"-h\Z|--[A-Za-z]", rest[0]):
                equals, value = "=", rest.pop(0)
            elif types[name] is bool:
                equals, value = "=", "true"
        if float in (types.get(name), *get_args(types.get(name))) and value[-1:] == "%":
            with contextlib.suppress(ValueError):  # which the parser explains
                value = f"{float(value[:-1]) / 100:.12g}"
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
    """Return the dotted name meant by its last part; an unknown one is left to the parser."""
    given = given if given in names else given.replace("-", "_")
    if given in names:
        return given
    if given == "from" and any(name.rpartition(".")[2] == "start" for name in names):
        given = "start"  # which no field can be called, since Python has the word
    matches = [name for name in names if name.rpartition(".")[2] == given]
    if len(matches) > 1:
        choices = " or ".join(f"--{match}" for match in matches)
        raise UserError(f"Option --{given} could be {choices}; write the full name.")
    return matches[0] if matches else given


def _reader_gone() -> bool:
    """Return whether stdout is a pipe nobody reads any more, as after `... --help | head -1`.

    The system is asked, because a broken pipe to a worker process must not end in silence.
    """
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:  # what is still buffered goes nowhere, or Python would complain on the way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return gone
