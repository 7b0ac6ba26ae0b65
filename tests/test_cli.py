"""The command line as a user meets it: `main(words)` in process, exit codes and sentences."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepenough import __version__, cli
from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.config import Command, bounded
from deepenough.errors import UserError


@dataclass
class Run:
    folder: str = "runs/echo"
    """Where to write."""
    overwrite: bool = False
    """Whether to replace an earlier run."""


@dataclass
class Twin:
    folder: str = "elsewhere"
    """Another folder."""


@dataclass
class EchoConfig:
    steps: int = bounded(10, ge=1, le=100)
    """Number of steps."""
    pattern: str | None = None
    """Blocks to use: 100 % by hand."""
    scale: float = 1.0
    """A factor."""
    cutoffs: list[int] = field(default_factory=lambda: [1])
    """Ends of clusters."""
    run: Run = field(default_factory=Run)
    """Where the run goes."""
    twin: Twin = field(default_factory=Twin)
    """The other one."""


class Echo:
    """A command that keeps what it was given; its pattern may stand first."""

    settings: EchoConfig

    def run(self, settings: EchoConfig) -> None:
        self.settings = settings


AddCommand = Callable[..., None]


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> AddCommand:
    """Add a command to the tree, for one test."""
    added: dict[str, Command] = {}
    known = cli.commands

    def add(name: str, run: Any, config: Any = EchoConfig, **options: Any) -> None:
        texts = {"help": f"the help of {name}", "description": "Say it again."}
        texts["example"] = f"deepenough {name}"
        added[name] = Command(name.split()[-1], config=config, run=run, **texts, **options)

    monkeypatch.setattr(cli, "commands", lambda: known() | added)
    return add


@pytest.fixture
def echo(add_command: AddCommand) -> Echo:
    command = Echo()
    add_command("echo", command.run, positional=("pattern", "run.folder"))
    return command


class TestOverview:
    @pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
    def test_lists_every_command_and_an_example(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 0
        output = capsys.readouterr().out
        assert len(commands()) > 20
        for name, command in commands().items():
            assert name in output
            assert command.help in output
        assert output.rstrip().splitlines()[-2] == "example:"

    @pytest.mark.parametrize("words", [["lazy"], ["lazy", "--help"]])
    def test_a_group_lists_its_own_and_an_example_of_them(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 0
        output = capsys.readouterr().out
        assert "lazy sweep" in output and "ponder" not in output and "search" not in output
        assert re.search(r"example:\n  deepenough lazy train .*\n$", output)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"deepenough {__version__}\n"

    def test_help_loads_no_heavy_library(self) -> None:
        program = (
            "import sys; from deepenough.__main__ import main; main(['--help']); "
            "heavy = {'torch', 'transformers', 'matplotlib', 'datasets', 'jsonargparse'}; "
            "sys.exit(' '.join(heavy & sys.modules.keys()) or 0)"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")

    @pytest.mark.parametrize(
        ("given", "asked"),
        [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    )
    def test_openmp_is_asked_for_a_short_spin_unless_the_user_says_otherwise(
        self, given: dict[str, str], asked: str
    ) -> None:
        program = (
            "import os; from deepenough.__main__ import main; main(['--version']); "
            "print(os.environ.get('GOMP_SPINCOUNT'))"
        )
        unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        environment = {k: v for k, v in os.environ.items() if k not in unset} | given
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert result.stdout.split()[-1] == asked

    @pytest.mark.parametrize("script", ["app.py", "benchmarks/__main__.py"])
    def test_entry_points_ask_before_torch_is_loaded(self, script: str) -> None:
        program = (
            "import os, runpy, sys\n"
            "class Ask:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name in ('torch', 'gradio'): sys.exit()\n"
            "sys.meta_path.insert(0, Ask()); sys.argv = ['', '--list']\n"
            f"try: runpy.run_path({script!r}, run_name='__main__')\n"
            "except SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))"
        )
        unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert (result.stdout.split()[-1], result.stderr) == ("3000", "")

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        command = f"{sys.executable} -u -m deepenough --help"
        script = f"set -o pipefail; {command} | true; {command} | head -1"
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert result.returncode in (0, 141)
        assert result.stderr == ""


class TestDispatch:
    def test_unknown_command_is_refused_with_a_suggestion(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["shortcutt", "fit"]) == 2
        expected = "deepenough: error: There is no command shortcutt; did you mean shortcut fit?\n"
        assert capsys.readouterr().err == expected

    def test_unknown_command_unlike_any(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["xyzzy"]) == 2
        assert "there are par, ponder, lazy, shortcut, decode, profile" in capsys.readouterr().err

    @pytest.mark.parametrize("verb", ["search", "train"])
    def test_a_verb_without_its_method_gets_a_suggestion(
        self, verb: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([verb]) == 2
        assert f"did you mean par {verb}?" in capsys.readouterr().err

    def test_commands_of_two_words(
        self, add_command: AddCommand, capsys: pytest.CaptureFixture[str]
    ) -> None:
        add_command("pair one", lambda settings: settings.steps)
        assert main(["pair", "one", "--steps", "3"]) == 3
        for words in (["pair"], ["pair", "--help"]):
            assert main(words) == 0
            output = capsys.readouterr().out
            assert "the help of pair one" in output and "par search" not in output
        assert main(["pair", "onne"]) == 2
        assert "no command pair onne; did you mean pair one?" in capsys.readouterr().err
        assert main(["pair", "quite another"]) == 2
        assert "there are pair one." in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("raised", "code", "said"),
        [
            (UserError("The corpus is empty; give another."), 2, "deepenough: error: The corpus"),
            (KeyboardInterrupt(), 130, "interrupted"),
            (SystemExit(0), 0, ""),
            (SystemExit(3), 3, ""),
            (SystemExit(None), 0, ""),
        ],
    )
    def test_how_a_command_ends(
        self,
        raised: BaseException,
        code: int,
        said: str,
        add_command: AddCommand,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(settings: EchoConfig) -> int:
            raise raised

        add_command("fail", fail)
        assert main(["fail"]) == code
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error

    def test_a_bug_is_not_hidden(self, add_command: AddCommand) -> None:
        def fail(settings: EchoConfig) -> int:
            raise ZeroDivisionError

        add_command("fail", fail)
        with pytest.raises(ZeroDivisionError):
            main(["fail"])


@pytest.mark.parametrize("command", list(commands()))
def test_help_of_every_command_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert re.search(
        rf"^examples?:\n\s*deepenough {command} ", capsys.readouterr().out, re.MULTILINE
    )


class TestParse:
    def test_flags_beat_file_beats_defaults_wherever_they_stand(
        self, echo: Echo, tmp_path: Path
    ) -> None:
        file = tmp_path / "echo.yaml"
        file.write_text("steps: 20\nscale: 2\n")
        assert main(["echo", "--steps", "30", "--config", str(file)]) == 0
        settings = echo.settings
        assert (settings.steps, settings.scale, settings.pattern) == (30, 2.0, None)

    def test_help_has_texts_sections_defaults_and_example(
        self, echo: Echo, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["echo", "--help"]) == 0
        output = capsys.readouterr().out
        assert "Say it again." in output
        assert "--run.overwrite {true,false}" in output
        assert "Blocks to use: 100 % by hand." in output
        assert "Where the run goes:" in output
        assert "default: 10" in output
        assert "Number of steps. (at least 1 and at most 100)" in output
        assert output.endswith("example:\n  deepenough echo\n")

    @pytest.mark.parametrize(
        ("words", "overwrite"),
        [
            (["--run.overwrite", "true"], True),
            (["--run.overwrite=false"], False),
            (["--run.overwrite"], True),
            (["--overwrite", "--steps", "3"], True),
        ],
    )
    def test_switches(self, echo: Echo, words: list[str], overwrite: bool) -> None:
        assert main(["echo", *words]) == 0
        assert echo.settings.run.overwrite is overwrite

    @pytest.mark.parametrize(
        "words", [["--pattern", "-ad"], ["--pattern=-ad"], ["--pattern", "-ad", "--steps", "3"]]
    )
    def test_values_may_begin_with_a_dash(self, echo: Echo, words: list[str]) -> None:
        assert main(["echo", *words]) == 0
        assert echo.settings.pattern == "-ad"

    @pytest.mark.parametrize(
        ("words", "pattern", "folder"),
        [
            (["aad"], "aad", "runs/echo"),
            (["aad", "here", "--steps", "3"], "aad", "here"),
            (["aad", "--run.folder", "here"], "aad", "here"),
            (["x=y --z"], "x=y --z", "runs/echo"),
        ],
    )
    def test_first_values_need_no_names(
        self, echo: Echo, words: list[str], pattern: str, folder: str
    ) -> None:
        assert main(["echo", *words]) == 0
        assert (echo.settings.pattern, echo.settings.run.folder) == (pattern, folder)

    def test_dashes_are_as_good_as_underscores(self) -> None:
        @dataclass
        class Dashed:
            long_name: int = 0
            """A name of two words."""

        command = Command("dashed", "", Dashed, lambda _: 0, "", "")
        assert parse_command(command, "dashed", ["--long-name", "3"]).long_name == 3

    def test_all_that_stands_first_can_be_one_list(self) -> None:
        @dataclass
        class Several:
            runs: list[str] = field(default_factory=list)
            """Folders."""
            out: str = ""
            """Where to."""

        command = Command("several", "", Several, lambda _: 0, "", "", positional=("runs*",))
        settings = parse_command(command, "several", ["a b", "c,d", "--out", "e"])
        assert (settings.runs, settings.out) == (["a b", "c,d"], "e")

    def test_negative_numbers_and_lists(self, echo: Echo) -> None:
        assert main(["echo", "--scale", "-1e-3", "--cutoffs", "[3, 4]"]) == 0
        assert echo.settings.scale == -0.001
        assert echo.settings.cutoffs == [3, 4]

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["--stps", "3"], "There is no option --stps; did you mean --steps?"),
            (["--run.floder", "3"], "There is no option --run.floder; did you mean --run.folder?"),
            (["--folder", "x"], "could be --run.folder or --twin.folder; write the full name."),
            (["--step", "3"], "There is no option --step; did you mean --steps?"),
            (["--steps", "three"], "Option --steps must be a whole number, not 'three'."),
            (["--steps"], "Option --steps needs a value; write --steps VALUE."),
            (["--steps", "0"], "steps must be at least 1 and at most 100: got 0."),
            (["--steps", "--scale", "3"], "Option --steps needs a value; write --steps VALUE."),
            (["--overwrite", "perhaps"], "--run.overwrite must be true or false, not 'perhaps'."),
            (["a", "b", "file.txt"], "'file.txt' does not belong to an option"),
            (["--config"], "Option --config needs a YAML file"),
            (["--config", "missing.yaml"], "There is no settings file missing.yaml: give a YAML"),
        ],
    )
    def test_bad_words_get_one_sentence_and_exit_code_2(
        self,
        echo: Echo,
        words: list[str],
        sentence: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["echo", *words]) == 2
        output = capsys.readouterr()
        assert sentence in output.err
        assert output.err.startswith("deepenough: error: ")
        assert output.err.count("\n") == 1
        assert output.out == ""

    def test_a_recipe_that_ships_is_found_by_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        words = ["--config", "par-wikitext2", "--steps", "3"]
        found = parse_command(commands()["par search"], "par search", words)
        assert (found.data, found.train.steps) == ("wikitext-2", 3)

    def test_unknown_key_in_the_file_is_refused(
        self, echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "echo.yaml"
        file.write_text("run:\n  foldr: x\n")
        assert main(["echo", "--config", str(file)]) == 2
        assert "no setting run.foldr" in capsys.readouterr().err


def test_a_command_that_says_nothing_shows_signs_of_life(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SECONDS_OF_SILENCE", 0.0)
    with cli._signs_of_life(["par", "train", "--steps", "3"], enabled=True):
        print("a result")
        time.sleep(1.5)
    said = capsys.readouterr()
    assert said.out == "a result\n" and said.err.startswith("par train: at work for ")
    monkeypatch.setattr(cli, "SECONDS_OF_SILENCE", 60.0)
    with cli._signs_of_life(["par", "train"], enabled=True):
        time.sleep(1.2)
    assert capsys.readouterr().err == ""
