"""What README.md and docs/ say is true: commands parse, links resolve, named files exist.

Each command is parsed and its settings are checked: an option that was renamed, a value that is no
longer allowed or a recipe that has moved is noticed here.
"""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepenough.cli import commands, parse_command
from deepenough.config import options, validate
from deepenough.errors import UserError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "deepenough"
PAGES = [page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if page.exists()]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
#: Images of README.md have absolute addresses, so that the package's page shows them too.
OWN_FILES = "https://raw.githubusercontent.com/deepenough/deepenough/main/"
ENDS_A_COMMAND = ("|", "||", "&", "&&", ";", ">", ">>", "<")


def fenced(text: str, language: str) -> Iterator[str]:
    return (body for name, body in FENCE.findall(text) if name == language)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every command in the bash fences, comments dropped, long lines joined."""
    for body in fenced(text, "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def own_words(words: list[str]) -> list[str] | None:
    """What `deepenough` is given in a command line, however it is started; None if it is not."""
    if "deepenough" not in words:
        return None
    rest = words[words.index("deepenough") + 1 :]
    end = next((i for i, word in enumerate(rest) if word in ENDS_A_COMMAND), len(rest))
    return rest[:end]


def without_settings_of_a_run(words: list[str]) -> list[str]:
    """The words without `--config runs/...`: that file is what an earlier command leaves."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word != "--config":
            kept.append(word)
        elif not (given := next(rest)).startswith("runs/"):
            kept += [word, given]
    return kept


def check_command(words: list[str]) -> None:
    """Raise what the command line would be refused with."""
    table = commands()
    name = " ".join(words[:2]) if " ".join(words[:2]) in table else words[0]
    if name in ("--help", "--version"):
        return
    if name not in table:
        raise UserError(f"There is no command {name}.")
    rest = without_settings_of_a_run(words[len(name.split()) :])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        try:
            validate(parse_command(table[name], name, rest))
        except SystemExit as end:  # --help
            assert end.code == 0


def commands_of(page: Path) -> list[list[str]]:
    found = (own_words(words) for words in command_lines(page.read_text("utf-8")))
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for words in commands_of(page):
        try:
            check_command(words)
        except UserError as error:
            pytest.fail(f"{page.name}: deepenough {shlex.join(words)}: {error}")


def test_many_commands_were_checked() -> None:
    found = [words for page in PAGES for words in commands_of(page)]
    assert len(found) > 20
    verbs = {" ".join(words[:2]) for words in found}
    assert verbs >= {"par search", "par derive", "par train", "par eval", "par plot", "lazy sweep"}


@pytest.mark.parametrize(
    "line",
    [
        "deepenough par serach",
        "deepenough par search --stpes 10",
        "deepenough par search --search.tau exponentially",
        "torchrun --nproc-per-node 2 -m deepenough par train --steps many",
        "OMP_NUM_THREADS=1 deepenough par train --config configs/nowhere.yaml",
        "deepenough par plot runs/mine --output there",
        "deepenough par derive --budget 0.65",
    ],
)
def test_wrong_commands_are_noticed(line: str) -> None:
    (words,) = command_lines(f"```bash\n{line}  # why\n```\n")
    with pytest.raises(UserError):
        check_command(own_words(words) or [])


def test_other_commands_name_what_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        for words in command_lines(page.read_text("utf-8")):
            if words[0] == "make":
                assert set(words[1:]) <= targets, f"{page.name}: {shlex.join(words)}"
            if words[0] == "python" and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), f"{page.name}: {shlex.join(words)}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text("utf-8"))
    broken = []
    for target in LINK.findall(text):
        own = target.startswith(OWN_FILES)
        if re.match(r"[a-z]+:", target) and not own:
            continue
        path, _, anchor = target.removeprefix(OWN_FILES).partition("#")
        place = (ROOT if own else page.parent) / path if path else page
        if not place.exists():
            broken.append(target)
        elif anchor and place.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: two words\n[a](nowhere.md) [b](#a-heading-two-words) [c](#elsewhere)\n"
        "[d](https://example.org/x) ![e](picture.png) "
        f"![g]({OWN_FILES}docs/images/none.png)\n```\n[f](in-code.md)\n```\n"
    )
    assert broken_links(page) == [
        *("nowhere.md", "#elsewhere", "picture.png"),
        f"{OWN_FILES}docs/images/none.png",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_import_what_exists(page: Path) -> None:
    for body in fenced(page.read_text("utf-8"), "python"):
        for node in ast.walk(ast.parse(body)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("deepenough") and ".toy" not in module:
                loaded = importlib.import_module(module)
                for alias in node.names:
                    assert hasattr(loaded, alias.name), f"{page.name}: {ast.unparse(node)}"


def test_code_for_engines_that_no_test_has_is_python() -> None:
    # `make test-serving` installs the engines and runs the same calls.
    found = [body for page in PAGES for body in fenced(page.read_text("utf-8"), "py")]
    assert found
    for body in found:
        ast.parse(body)


def table_paths(text: str) -> list[str]:
    """What stands in backticks in the first column of the tables."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [path for row in rows for path in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_architecture_is_true_to_the_tree() -> None:
    page = ROOT / "docs" / "architecture.md"
    if not page.exists():
        pytest.skip("there is no docs/architecture.md")
    named = [path for path in table_paths(page.read_text("utf-8")) if path.endswith((".py", "/"))]
    places = [PACKAGE / path for path in named]
    assert len(places) > 15
    assert [str(place.relative_to(PACKAGE)) for place in places if not place.exists()] == []
    parts = {
        path
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {path.name for path in parts} - {"__init__.py", "__main__.py"} <= {
        p.name for p in places
    }


def test_every_option_of_the_method_is_documented() -> None:
    page = ROOT / "docs" / "par.md"
    if not page.exists():
        pytest.skip("there is no docs/par.md")
    from deepenough.par.config import ParSearchConfig

    text = page.read_text("utf-8")
    names = [option.name for option in options(ParSearchConfig)]
    own = [name for name in names if name.startswith(("model.", "search."))]
    assert len(own) > 20
    assert [name for name in own if f"`{name}`" not in text] == []
