"""The command line as a user meets it: `main(words)` in process, exit codes and sentences."""

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepenough import __version__
from deepenough.__main__ import main
from deepenough.cli.legacy import COMMANDS
from deepenough.cli.parse import parse
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
class EchoSettings:
    steps: int = 10
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


class Echo(ModuleType):
    """A command that keeps what it was given; its pattern may stand first."""

    settings: EchoSettings

    def main(self, argv: list[str]) -> int:
        self.settings = parse(
            "echo",
            EchoSettings,
            argv,
            "Say it again.",
            "deepenough echo",
            ["pattern", "run.folder"],
        )
        return 0


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    return add_command(monkeypatch, Echo("deepenough.cli.echo"))


def add_command(monkeypatch: pytest.MonkeyPatch, module: Any) -> Any:
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, name, "a command of the tests")
    return module


class TestOverview:
    @pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
    def test_lists_every_command_and_an_example(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 0
        output = capsys.readouterr().out
        assert len(COMMANDS) > 3
        for name, text in COMMANDS.items():
            assert name in output
            assert text in output
        assert output.rstrip().splitlines()[-2] == "example:"

    @pytest.mark.parametrize("words", [["lazy"], ["lazy", "--help"]])
    def test_a_group_lists_its_own_and_an_example_of_them(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 0
        output = capsys.readouterr().out
        assert "lazy sweep" in output and "ponder" not in output and "search" not in output
        assert output.endswith("example:\n  deepenough lazy train --help\n")

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"deepenough {__version__}\n"

    def test_help_answers_at_once(self) -> None:
        program = (
            "import sys; from deepenough.__main__ import main; main(['--help']); "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        seconds = []
        for _ in range(3):  # the fastest of three: the machine may be busy
            start = time.perf_counter()
            result = subprocess.run([sys.executable, "-c", program], capture_output=True)
            seconds.append(time.perf_counter() - start)
            assert result.returncode == 0
        assert min(seconds) < 0.5

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
        assert main(["serch"]) == 2
        expected = "deepenough: error: There is no command serch; did you mean search?\n"
        assert capsys.readouterr().err == expected

    def test_unknown_command_unlike_any(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["xyzzy"]) == 2
        assert "there are demo, search, derive" in capsys.readouterr().err

    def test_commands_of_two_words(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = ModuleType("deepenough.cli.pair.one")
        module.main = len  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deepenough.cli.pair", ModuleType("deepenough.cli.pair"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(COMMANDS, "pair one", "the first of the pair")
        assert main(["pair", "one", "x", "y", "z"]) == 3
        capsys.readouterr()
        for words in (["pair"], ["pair", "--help"]):
            assert main(words) == 0
            output = capsys.readouterr().out
            assert "the first of the pair" in output and "find which blocks" not in output
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
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(argv: list[str]) -> int:
            raise raised

        module = add_command(monkeypatch, ModuleType("deepenough.cli.fail"))
        module.main = fail
        assert main(["fail"]) == code
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error

    def test_a_bug_is_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(argv: list[str]) -> int:
            raise ZeroDivisionError

        add_command(monkeypatch, ModuleType("deepenough.cli.fail")).main = fail
        with pytest.raises(ZeroDivisionError):
            main(["fail"])


@pytest.mark.parametrize("command", list(COMMANDS))
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

    def test_dashes_are_as_good_as_underscores(
        self, monkeypatch: pytest.MonkeyPatch, echo: Echo
    ) -> None:
        @dataclass
        class Dashed:
            long_name: int = 0
            """A name of two words."""

        assert parse("echo", Dashed, ["--long-name", "3"], "", "").long_name == 3

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
            (["--steps", "--scale", "3"], "Option --steps needs a value; write --steps VALUE."),
            (["--overwrite", "perhaps"], "--run.overwrite must be true or false, not 'perhaps'."),
            (["a", "b", "file.txt"], "'file.txt' does not belong to an option"),
            (["--config"], "Option --config needs a YAML file"),
            (["--config", "missing.yaml"], "missing.yaml cannot be read: No such file"),
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

    def test_unknown_key_in_the_file_is_refused(
        self, echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "echo.yaml"
        file.write_text("run:\n  foldr: x\n")
        assert main(["echo", "--config", str(file)]) == 2
        assert "no setting run.foldr" in capsys.readouterr().err
