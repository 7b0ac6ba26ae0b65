"""Settings as dataclasses: read from defaults, a YAML file and flags, checked, written as YAML.

A command's settings are one dataclass, nested where it has sections. The string literal under a
field is the only text of that option and becomes its `--help`; its range is declared on the field
(`steps: int = bounded(2000, ge=1)`), shown in `--help` and checked by `validate`. `jsonargparse`
converts the values, whether they come from a file or from flags, so both accept the same things.

Precedence: defaults < YAML file < flags. A key that no field has is an error. What `dump` adds to a
run's `config.yaml` (`method` and `provenance`) is passed over, so that the file can be given again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import numbers
import operator
import os
import platform
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

from deepenough.artifacts import write_text
from deepenough.errors import UserError

if TYPE_CHECKING:  # both take a while to load, which `deepenough --help` need not wait for
    from jsonargparse import ArgumentParser, Namespace

S = TypeVar("S")

METHOD, PROVENANCE = "method", "provenance"
#: Of a file of settings.
MAX_CHARACTERS = 1 << 17
#: First line of a run's config.yaml.
CHECKSUM_LINE = "# Written by deepenough; SHA-256 of what follows: "
#: What the sources of our methods and common trainers call an option.
_CALLED = {
    "num_blocks": "num_layers n_layer n_layers",
    "num_heads": "n_head n_heads",
    "d_ff": "d_ffn d_inner",
    "dropout": "dropout_rate",
    "div_value": "proj_factor proj_dims",
    "tau": "tau_is_trainable",
    "lr": "max_lr learning_rate",
    "warmup": "warmup_steps warmup_step",
    "steps": "max_step max_steps",
    "epochs": "num_epochs num_train_epochs",
    "optimizer": "opt_name optim",
    "clip": "clipnorm max_grad_norm",
    "clip_value": "clipvalue",
    "length": "seq_len tgt_len",
    "data": "train_directory valid_directory test_directory text_file input_text from_directory",
    "tokenizer": "sp_model_prefix train_tokenizer",
    "counts": "filename",
    "out": "model_name tfrecords_directory output_dir",
    "precision": "dtype mixed_precision",
}
HABITS = {word: name for name, words in _CALLED.items() for word in words.split()}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Command:
    """One verb of the command line, as a method's `commands.py` declares it."""

    name: str
    help: str
    """One line for the table of commands."""
    config: type | str | Callable[[list[str]], type]
    """Its settings class, as "package.module:Name" where importing it takes long, or a function
    that chooses the class by the words of the command line."""
    run: str | Callable[[Any], Any]
    """Does the work, as "package.module:function" where importing it takes long. What it returns is
    printed: a text, lines as they come, or figures by name (as JSON if the settings have `json`);
    a number is the exit code."""
    example: str
    description: str = ""
    """What `--help` says first; by default the line of the table."""
    positional: tuple[str, ...] = ()
    """Options whose values may stand first, without their names; `name*` takes all that follow."""
    draws: str = ""
    """The option that names a run whose figures are drawn afterwards, into `out`; where that is the
    run itself, into its plots."""
    goes_on: bool = False
    """Whether it has no `--resume`, but goes on where it was stopped when it is repeated."""

    def start(self, config: Any) -> Any:
        """Check the settings, do the work on their device and return what it is to print."""
        work = load_place(self.run) if isinstance(self.run, str) else self.run
        if not isinstance(validate(config), DeviceConfig):
            return work(config)
        from deepenough.devices import placed  # which loads torch

        where = config.device, getattr(config, "dtype", None)
        with placed(*where):
            found = work(config)
        return _each(found, placed(*where)) if isinstance(found, Iterator) else found


def load_place(place: str) -> Any:
    """Return what "package.module:name" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _each(found: Iterator[Any], within: contextlib.AbstractContextManager[None]) -> Iterator[Any]:
    """Yield what comes, made within a context."""
    with within:
        yield from found


@dataclass(kw_only=True)
class DeviceConfig:
    """Where a command computes; the settings of every command with a model inherit it."""

    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:1, mps or another that torch knows; auto is the GPU if
    there is one, else the CPU."""


@dataclass(kw_only=True)
class PlaceConfig(DeviceConfig):
    """Where and in which number format a finished model runs."""

    dtype: str | None = None
    """Number format of the weights: float32, bfloat16, float16 or float64; by default the one in
    which the model is used otherwise."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings by name, but for those of where the model runs."""
        place = {field.name for field in dataclasses.fields(PlaceConfig)}
        own = dataclasses.asdict(self)
        return {name: value for name, value in own.items() if name not in place}


@dataclass
class RunConfig:
    """Where a run goes; the settings of every command that writes a run folder inherit it."""

    METHOD: ClassVar[str] = ""

    out: str = "runs/latest"
    """Folder for everything that the run leaves."""

    resume: bool = False
    """Continue from the last checkpoint in the folder."""

    overwrite: bool = False
    """Delete an earlier run in the folder first."""


@dataclass
class TrustConfig:
    """Trust."""

    allow_pickle: bool = False
    """Load pickled weights too, which can run any code: only from people you trust."""

    trust_remote_code: bool = False
    """Run code that comes with the model: only from people you trust."""


def bounded(
    default: Any = MISSING,
    *,
    default_factory: Any = MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    unless: str = "",
) -> Any:
    """Return a dataclass field whose value, or each item of it if it is a list, lies in a range.

    `unless` is the full name of an option that, where it is given, leaves this one null.
    """
    given = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    bounds = {name: bound for name, bound in given.items() if bound is not None}
    metadata = {"bounds": bounds, "unless": unless}
    if default_factory is not MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class ContinueConfig(PlaceConfig):
    """Text from a trained model."""

    run: str
    """Folder of a finished run, or of a model."""

    prompt: str = "The"
    """Text to continue."""

    tokens: int = bounded(60, ge=1)
    """Number of tokens to write."""

    temperature: float = bounded(0.8, ge=0)
    """Temperature of the sampling; 0 takes the likeliest token every time."""

    top_k: int = bounded(50, ge=0)
    """Sample from this many of the likeliest tokens; 0 for all of them."""

    seed: int = 0
    """Seed of the sampling."""


def validate(config: S, prefix: str = "") -> S:
    """Return the settings, all choices, ranges and rules between fields (`check()`) checked."""
    hints = _hints(type(config))  # type: ignore[arg-type]
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, bounds = getattr(config, field.name), field.metadata.get("bounds", {})
        choices = _choices(hints[field.name])
        if dataclasses.is_dataclass(value):
            validate(value, f"{prefix}{field.name}.")
        each = "each of " if isinstance(value, list | tuple) else ""
        for item in value if each else [value]:
            if item is None or (isinstance(item, str) and item in _words(hints[field.name])):
                continue
            if choices and item not in choices:
                raise UserError(
                    f"{each}{prefix}{field.name} must be one of {', '.join(map(str, choices))}: "
                    f"got {item!r:.80}."
                )
            if not _within(item, bounds):
                raise UserError(
                    f"{each}{prefix}{field.name} must be {_range_text(bounds)}: got {item!s:.80}."
                )
    check_rules = getattr(config, "check", None)
    if check_rules is not None:
        check_rules()
    return config


def from_fields(cls: type[S], content: Any) -> S:
    """Return a dataclass from what a file holds of it; ValueError says which value is wrong."""
    if not isinstance(content, Mapping):
        raise ValueError(f"there is no {cls.__name__} in it")
    hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if wrong := [str(name) for name in content if name not in fields]:
        raise ValueError(f"{wrong[0]!r:.40} is unknown")
    for name, field in fields.items():
        if name not in content and _default(field) is MISSING:
            raise ValueError(f"{name} is missing")
    try:
        return validate(cls(**{n: _typed(content[n], hints[n], n) for n in fields if n in content}))
    except UserError as error:
        raise ValueError(f"{error}"[:200].rstrip(".")) from error


def _typed(value: Any, hint: Any, name: str) -> Any:
    """Return a value that JSON gave, if it is of a type; ValueError if it is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (origin is typing.Literal and value in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        for each in arguments:
            with contextlib.suppress(ValueError):
                return _typed(value, each, name)
    elif dataclasses.is_dataclass(hint):
        return from_fields(typing.cast(type, hint), value)
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        items = (_typed(item, arguments[0], name) for item in value)
        return list(items) if origin is list else tuple(items)
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _typed(item, arguments[1], name) for key, item in value.items()}
    elif hint is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{name} must be {_type_name(hint)}, not {value!r:.40}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal` in a type allows; none where anything may be given."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    inner = [part for part in typing.get_args(hint) if part is not type(None)]
    return _choices(inner[0]) if len(inner) == 1 else ()


def _words(hint: Any) -> set[str]:
    """Return the words that a type allows beside numbers or lists, such as "auto"."""
    parts = (part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal)
    return {word for part in parts for word in typing.get_args(part)}


def _within(value: Any, bounds: Mapping[str, float]) -> bool:
    """Return whether a value is a number in its range; NaN is in none."""
    tests = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    if bounds and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        return False
    return all(tests[name](value, bound) for name, bound in bounds.items())


def _range_text(bounds: Mapping[str, float]) -> str:
    """Return a range as people say it: "at least 0 and below 1"."""
    return " and ".join(f"{_BOUNDS[name]} {bound:g}" for name, bound in bounds.items())


@dataclass(frozen=True)
class Option:
    """One setting: its dotted name, type, default (`MISSING` if it must be given) and text."""

    name: str
    type: Any
    default: Any
    text: str
    section: str
    """Title of the section it belongs to, as people read it."""
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Range of its values, as `bounded` declares it."""
    unless: str = ""
    """The option that leaves this one null where it is given."""

    @property
    def help(self) -> str:
        """Return its text, its range, and whether it must be given."""
        range_text = f" ({_range_text(self.bounds)})" if self.bounds else ""
        return self.text + range_text + (" Must be given." if self.default is MISSING else "")


def options(cls: type, prefix: str = "", section: str = "", defaults: Any = None) -> list[Option]:
    """Return all options of a settings class in order, those of nested sections after its own."""
    hints, texts = typing.get_type_hints(cls), _field_texts(cls)
    own: list[Option] = []
    nested: list[Option] = []
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        default = getattr(defaults, field.name) if defaults is not None else _default(field)
        text = texts.get(field.name, "")
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            title = text or (hint.__doc__ or field.name)
            base = None if default is MISSING else default
            nested += options(hint, f"{name}.", title.strip().splitlines()[0].rstrip("."), base)
        else:
            extra = field.metadata
            bounds, unless = extra.get("bounds", {}), extra.get("unless", "")
            own.append(Option(name, hint, default, text, section, bounds, unless))
    return own + nested


def resolve(
    cls: type[S],
    yaml_path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> S:
    """Return the settings from defaults, the YAML file and `overrides` (nested or dotted names)."""
    values = read_yaml(cls, yaml_path) if yaml_path is not None else {}
    values |= _flatten(cls, overrides or {}, "the given settings")
    return build(cls, convert(make_parser(cls), cls, values))


def read_yaml(cls: type, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values of a settings file by dotted name; a key that `cls` lacks is refused."""
    content = load_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"The settings file {path} must hold `name: value` lines, nested by section."
        )
    for key in (METHOD, PROVENANCE):
        content.pop(key, None)
    return _flatten(cls, content, str(path))


def load_yaml(path: str | os.PathLike[str]) -> Any:
    """Return what a YAML file of settings holds; UserError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise UserError(
            f"The settings file {path} cannot be read ({error.strerror}): give a YAML file."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"The settings file {path} is not UTF-8 text; give a YAML file.") from error
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path} is far longer than settings are; give a YAML file of settings.")
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # a value that does not fit its tag raises any kind
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(
            f"The settings file {path} is not valid YAML{where}; correct it."
        ) from error


class _Loader(yaml.SafeLoader):
    """Reads plain values, and no aliases by which a short file holds more than a long one could."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if not is_alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            node.size = 1 + sum(part.size for part in parts)
        if not hasattr(node, "size") or node.size > MAX_CHARACTERS:
            raise yaml.YAMLError("an alias of itself, or aliases of aliases")
        return node


def make_parser(cls: type, **kwargs: Any) -> ArgumentParser:
    """Return a parser with one flag for every option of `cls`, grouped by section."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config=None, **kwargs)
    groups: dict[str, Any] = {"": parser}
    for option in options(cls):
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        groups[option.section].add_argument(
            f"--{option.name}",
            type=option.type,
            default=None if option.default is MISSING else option.default,
            help=option.help,
        )
    return parser


def convert(
    parser: ArgumentParser, cls: type, values: Mapping[str, Any], argv: list[str] | None = None
) -> Namespace:
    """Values by dotted name, then flags, converted to their types or refused in a sentence."""
    try:
        namespace = parser.parse_object(dict(values))
        return namespace if argv is None else parser.parse_args(argv, namespace=namespace)
    except argparse.ArgumentError as error:
        raise UserError(_sentence(str(error), cls)) from error


def build(cls: type[S], namespace: Namespace) -> S:
    """Return the settings object from checked values."""
    for option in options(cls):
        value = namespace[option.name]
        if value is None and option.default is MISSING:
            raise UserError(f"Option --{option.name} must be given; {_lower_first(option.text)}")
        allowed = (option.type, *typing.get_args(option.type))
        if value is None and Any not in allowed and type(None) not in allowed:
            raise UserError(f"Option --{option.name} needs a value: {_lower_first(option.text)}")
    return _build(cls, namespace)


def _build(cls: type[S], namespace: Namespace) -> S:
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint, value = hints[field.name], namespace[field.name]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[field.name] = _build(hint, value) if nested else value
    return cls(**values)


def to_dict(settings: Any) -> dict[str, Any]:
    """Return the settings as nested dicts of plain values, as they stand in YAML."""
    return {
        field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)
    }


def dump(settings: Any, path: str | os.PathLike[str]) -> None:
    """Write the settings and where they come from (versions, commit), whole or not."""
    method = getattr(settings, "METHOD", "")
    content: dict[str, Any] = {METHOD: method} if method else {}
    content |= to_dict(settings) | {PROVENANCE: provenance()}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    write_text(path, f"{CHECKSUM_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def nearest(name: str, names: list[str]) -> str | None:
    """Return the known name that was most likely meant, or None."""
    endings = {known.rpartition(".")[2]: known for known in reversed(names)}
    ending = name.rpartition(".")[2]
    if (habit := endings.get(HABITS.get(ending, ""))) and ending not in endings:
        return habit
    same_ending = [known for known in names if known.rpartition(".")[2] == ending]
    close = difflib.get_close_matches(
        name, same_ending or names, n=1, cutoff=0.0 if same_ending else 0.6
    ) or [endings[each] for each in difflib.get_close_matches(ending, endings, n=1)]
    return close[0] if close else None


@functools.cache
def _field_texts(cls: type) -> dict[str, str]:
    """Return the string literals under the fields, inherited ones included."""
    import docstring_parser

    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for part in docstring_parser.parse_from_object(base).params:
                texts[part.arg_name] = " ".join((part.description or "").split())
    return texts


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _flatten(cls: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Nested or dotted values by dotted name; UserError at the first that is no option of `cls`."""
    names = [option.name for option in options(cls)]
    sections = {name[: end.start()] for name in names for end in re.finditer(r"\.", name)}
    flat: dict[str, Any] = {}

    def visit(part: Mapping[str, Any], prefix: str) -> None:
        for key, value in part.items():
            name = f"{prefix}{key}"
            if name in names:
                flat[name] = value
            elif name not in sections:
                hint = nearest(name, names + [part for part in sections if part not in prefix])
                meant = f"; did you mean {hint}?" if hint else "; remove it."
                raise UserError(f"There is no setting {name:.80} (in {source}){meant}")
            elif isinstance(value, Mapping):
                visit(value, f"{name}.")
            elif value is not None:  # a section heading with nothing under it is empty, not wrong
                raise UserError(f"{name} (in {source}) is a section and needs settings under it.")

    visit(values, "")
    return left_null(cls, flat) | flat


def left_null(cls: type, given: Collection[str]) -> dict[str, None]:
    """Return null for the options that are not given but in whose place another one is."""
    rivals = {option.name: option.unless for option in options(cls)}
    return {name: None for name, rival in rivals.items() if rival in given and name not in given}


def _sentence(message: str, cls: type) -> str:
    """Return a message of jsonargparse, lines about types, as one sentence about the option."""
    known = {option.name: option for option in options(cls)}
    if unrecognized := re.match(r"unrecognized arguments: (\S*)", message):
        given = unrecognized[1].partition("=")[0]
        if not given.startswith("-"):
            return f"{given!r} does not belong to an option; give settings as --name value."
        hint = nearest(given.strip("-"), list(known))
        return f"There is no option {given}; " + (
            f"did you mean --{hint}?" if hint else "see --help for those there are."
        )
    key = re.match(r'Parser key "([^"]+)"', message)
    if key and key[1] in known:
        value = re.search(r"(?:Got|Given) value: (.*)", message, re.DOTALL)
        got = f", not {value[1].strip()!r:.80}" if value else ""
        return f"Option --{key[1]} must be {_type_name(known[key[1]].type)}{got}."
    if missing := re.match(r"argument --([\w.]+)\S*: expected one argument", message):
        return f"Option --{missing[1]} needs a value; write --{missing[1]} VALUE."
    return " ".join(message.split())


def _type_name(hint: Any) -> str:
    """Return a type as people say it."""
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        Path: "a path",
    }
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"a list, each item {_type_name(arguments[0])}, such as [1,2]"
    if hint is type(None):
        return "null"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if text else "see --help."


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def provenance() -> dict[str, Any]:
    """Return what a result depends on besides its settings."""
    return {"versions": dict(_versions()), "commit": _commit(), "processor": processor()}


@functools.cache  # as the commit: what is running does not change
def _versions() -> dict[str, str]:
    import importlib.metadata  # takes a while to load

    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepenough"):
        try:  # from the metadata: importing torch for its version would take seconds
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def processor() -> str:
    """Return the name of this machine's processor, or of its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """Return the commit of this package's checkout, `-dirty` if changed; None if installed."""
    package = Path(__file__).resolve().parent
    try:
        top = _git(package, "rev-parse", "--show-toplevel")
        # An installed copy may lie inside a repository of its user's, whose commit says nothing.
        if Path(top) / "src" / package.name != package:
            return None
        return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
