"""Settings: precedence, refusals in one sentence, and a saved file that can be given again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from deepenough.config import (
    _commit,
    bounded,
    dump,
    from_fields,
    load_yaml,
    nearest,
    options,
    provenance,
    resolve,
    to_dict,
    validate,
)
from deepenough.errors import UserError


@dataclass
class Depth:
    """How deep."""

    num_blocks: int = 6
    """Number of blocks."""
    pattern: str | None = None
    """Letters of the blocks,
    or nothing for a search."""


@dataclass
class Model:
    """The model."""

    d_model: int = 128
    """Width of the hidden states."""
    dropout: float = 0.1
    """Share of values dropped."""
    cutoffs: list[int] = field(default_factory=lambda: [250, 2500])
    """Ends of the clusters."""
    activation: Literal["relu", "gelu"] = "relu"
    """Function between the two layers."""
    depth: Depth = field(default_factory=Depth)


@dataclass
class Base:
    seed: int = 0
    """Where random numbers start."""


@dataclass
class Settings(Base):
    """Settings of a command."""

    model: Model = field(default_factory=lambda: Model(d_model=64))
    """What to build."""
    folder: Path = Path("runs/x")
    """Where to write."""
    compile: bool = False
    """Whether to compile."""


@dataclass
class Needy:
    counts: str
    """File of word counts."""


@dataclass
class Checked:
    kind: Literal["a", "b"] | None = None
    kinds: list[Literal["a", "b"]] = field(default_factory=list)
    share: float = bounded(0.5, ge=0, lt=1)
    inner: Model = field(default_factory=Model)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


class TestOptions:
    def test_text_is_the_string_under_the_field(self) -> None:
        texts = {option.name: option.text for option in options(Settings)}
        assert texts == {
            "seed": "Where random numbers start.",
            "folder": "Where to write.",
            "compile": "Whether to compile.",
            "model.d_model": "Width of the hidden states.",
            "model.dropout": "Share of values dropped.",
            "model.cutoffs": "Ends of the clusters.",
            "model.activation": "Function between the two layers.",
            "model.depth.num_blocks": "Number of blocks.",
            "model.depth.pattern": "Letters of the blocks, or nothing for a search.",
        }

    def test_sections_are_titled_by_field_or_class(self) -> None:
        sections = {option.name: option.section for option in options(Settings)}
        assert sections["seed"] == ""
        assert sections["model.d_model"] == "What to build"
        assert sections["model.depth.pattern"] == "How deep"


class TestPrecedence:
    def test_defaults(self) -> None:
        assert resolve(Settings) == Settings()
        assert resolve(Settings).model.d_model == 64

    def test_file_beats_defaults_and_overrides_beat_file(self, file: Path) -> None:
        file.write_text("seed: 1\nmodel:\n  d_model: 32\n  dropout: 1e-2\n")
        settings = resolve(Settings, str(file), {"model": {"d_model": 16}, "compile": True})
        assert settings.seed == 1
        assert settings.model.d_model == 16
        assert settings.model.dropout == 0.01
        assert settings.compile is True
        assert settings.model.cutoffs == [250, 2500]

    def test_overrides_may_be_dotted(self) -> None:
        settings = resolve(Settings, overrides={"model.depth.pattern": "aad-", "folder": "here"})
        assert settings.model.depth.pattern == "aad-"
        assert settings.folder == Path("here")

    def test_defaults_are_not_shared(self) -> None:
        resolve(Settings).model.cutoffs.append(3)
        assert resolve(Settings).model.cutoffs == [250, 2500]

    @pytest.mark.parametrize("text", ["", "model:\n", "# nothing\n"])
    def test_an_empty_file_changes_nothing(self, file: Path, text: str) -> None:
        file.write_text(text)
        assert resolve(Settings, file) == Settings()


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("sed: 1", r"no setting sed \(in .*settings\.yaml\); did you mean seed\?"),
            ("model: {dmodel: 3}", r"no setting model\.dmodel .* did you mean model\.d_model\?"),
            ("d_model: 3", r"no setting d_model .* did you mean model\.d_model\?"),
            ("modle: {d_model: 3}", r"no setting modle .* did you mean model\?"),
            ("zzzzzz: 3", r"no setting zzzzzz .*; remove it"),
            ("model: 3", "model .* is a section"),
            ("seed: many", "--seed must be a whole number, not 'many'"),
            ("seed: 1.5", "--seed must be a whole number, not '1.5'"),
            ("seed: null", "--seed needs a value: where random"),
            ("model: {activation: tanh}", "--model.activation must be relu or gelu, not 'tanh'"),
            ("model: {cutoffs: 3}", r"--model.cutoffs must be a list.*such as \[1,2\], not '3'"),
            ("model: {depth: {pattern: 3}}", "pattern must be text or null, not '3'"),
            ("- 1", "must hold `name: value` lines"),
            ("seed: [", "not valid YAML at line"),
        ],
    )
    def test_one_sentence(self, file: Path, text: str, message: str) -> None:
        file.write_text(text + "\n")
        with pytest.raises(UserError, match=message) as error:
            resolve(Settings, file)
        assert "\n" not in str(error.value)

    def test_unreadable_files(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="No such file"):
            resolve(Settings, tmp_path / "missing.yaml")
        with pytest.raises(UserError, match="Is a directory"):
            resolve(Settings, tmp_path)
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="not UTF-8"):
            resolve(Settings, binary)

    def test_overrides_are_checked_alike(self) -> None:
        with pytest.raises(UserError, match="in the given settings"):
            resolve(Settings, overrides={"sed": 3})
        with pytest.raises(UserError, match="whole number"):
            resolve(Settings, overrides={"seed": "x"})

    def test_a_field_without_default_must_be_given(self) -> None:
        with pytest.raises(UserError, match="--counts must be given; file of word counts"):
            resolve(Needy)
        assert resolve(Needy, overrides={"counts": "a.txt"}) == Needy("a.txt")


class TestDump:
    def test_round_trip(self, file: Path) -> None:
        settings = resolve(Settings, overrides={"folder": "elsewhere", "model.cutoffs": [7]})
        dump(settings, file)
        assert resolve(Settings, file) == settings
        assert list(file.parent.iterdir()) == [file]

    def test_provenance_is_beside_the_settings(self, file: Path) -> None:
        dump(Settings(), file)
        content = yaml.safe_load(file.read_text())
        origin = content.pop("provenance")
        assert content == to_dict(Settings())
        assert set(origin["versions"]) == {"python", "torch", "transformers", "deepenough"}
        assert "commit" in origin

    def test_plain_values(self) -> None:
        assert to_dict(Settings())["folder"] == "runs/x"
        assert to_dict(Settings())["model"]["depth"] == {"num_blocks": 6, "pattern": None}


class TestValidate:
    def test_good_settings_are_returned(self) -> None:
        settings = Checked(kind="b", kinds=["a", "b"])
        assert validate(settings) is settings

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (Checked(kind="c"), "kind must be one of a, b: got 'c'."),  # type: ignore[arg-type]
            (Checked(kinds=["a", "c"]), "each of kinds must be one of a, b: got 'c'."),  # type: ignore[list-item]
            (Checked(share=1.0), "share must be at least 0 and below 1: got 1.0."),
            (Checked(share=float("nan")), "share must be at least 0 and below 1: got nan."),
            (
                Checked(inner=Model(activation="tanh")),  # type: ignore[arg-type]
                "inner.activation must be one of relu, gelu: got 'tanh'.",
            ),
        ],
    )
    def test_the_first_wrong_value_is_named(self, settings: Checked, message: str) -> None:
        with pytest.raises(UserError) as refusal:
            validate(settings)
        assert str(refusal.value) == message


def test_commit_is_that_of_the_package_not_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = provenance()["commit"]
    monkeypatch.chdir(tmp_path)
    assert _commit.__wrapped__() == here
    assert here is None or len(here.removesuffix("-dirty")) == 40


def test_nearest() -> None:
    names = ["model.d_model", "run.folder", "seed"]
    assert nearest("folder", names) == "run.folder"
    assert nearest("modl.d_model", names) == "model.d_model"
    assert nearest("sede", names) == "seed"
    assert nearest("qqqq", names) is None


# -- what files hold -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    number: float = bounded(ge=0)
    count: int = 1
    way: Literal["one", "other"] = "one"
    inner: Inner | None = None
    rest: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        if self.count > 9:
            raise UserError("The count is more than 9.")


def test_a_dataclass_is_read_from_what_a_file_holds() -> None:
    content = {"number": 2, "way": "other", "inner": {"names": ["a"]}, "rest": {"b": 3}}
    assert from_fields(Kept, content) == Kept(2.0, 1, "other", Inner(("a",)), {"b": 3})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "there is no Kept"),
        ({}, "number is missing"),
        ({"number": 1, "nmber": 2}, "'nmber' is unknown"),
        ({"number": "1"}, "number must be a number, not '1'"),
        ({"number": True}, "number must be a number"),
        ({"number": float("nan")}, "number must be a number, not nan"),
        ({"number": 10**400}, "number must be a number"),
        ({"number": -1}, "number must be at least 0"),
        ({"number": 1, "count": 1.0}, "count must be a whole number"),
        ({"number": 1, "count": 10}, "more than 9"),
        ({"number": 1, "way": ["one"]}, "way must be one or other"),
        ({"number": 1, "inner": {"names": "ab"}}, "inner must be"),
        ({"number": 1, "rest": {"b": None}}, "rest must be a whole number, not None"),
    ],
)
def test_what_does_not_fit_its_field_is_refused(content: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_fields(Kept, content)


def test_aliases_may_stand_in_settings_but_not_multiply_them(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: &same [1, 2]\nb: *same\nc: &one x\nd: *one\n")
    assert load_yaml(file) == {"a": [1, 2], "b": [1, 2], "c": "x", "d": "x"}
    lines = [f"a{n}: &a{n} [{', '.join(['*a' + str(n - 1)] * 9)}]" for n in range(1, 9)]
    for text in (
        "\n".join(["a0: &a0 [1]", *lines]),
        "a: &a [*a]",
        "a: !!bool maybe",
        "#" * 200_000,
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml"):
            load_yaml(file)
