"""Shortcuts on disk: what is read is what was written, and anything else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepenough.artifacts import sha256
from deepenough.errors import UserError
from deepenough.shortcut import modeling
from deepenough.shortcut.modeling import Shortcuts


@pytest.fixture
def saved(states: list[Tensor], tmp_path: Path) -> tuple[Shortcuts, Path]:
    shortcuts = Shortcuts.fit_states(states, affine=True)
    shortcuts.tuned = {1: (torch.eye(6), torch.ones(6))}
    shortcuts.meta["model"] = {"model": "some/model", "revision": "abc", "fingerprint": "12"}
    shortcuts.save_pretrained(tmp_path / "maps")
    return shortcuts, tmp_path / "maps"


def assert_equal(one: Shortcuts, two: Shortcuts) -> None:
    for name in ("num_layers", "width", "affine", "targets", "pairs", "meta", "mode"):
        assert getattr(one, name) == getattr(two, name), name
    for pair in one.pairs:
        assert torch.equal(one.matrix(*pair), two.matrix(*pair))
        assert one.affine == (one.bias(*pair) is not None)
        if one.affine:
            assert torch.equal(one.biases[pair], two.biases[pair])
    assert one.tuned.keys() == two.tuned.keys()
    for layer, (matrix, bias) in one.tuned.items():
        assert torch.equal(matrix, two.tuned[layer][0]) and torch.equal(bias, two.tuned[layer][1])
    torch.testing.assert_close(one.cka(), two.cka(), rtol=0, atol=0, equal_nan=True)


def test_round_trip(saved: tuple[Shortcuts, Path], states: list[Tensor], tmp_path: Path) -> None:
    shortcuts, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "shortcuts.json",
        "shortcuts.safetensors",
    ]
    read = Shortcuts.from_pretrained(folder)
    assert_equal(shortcuts, read)
    read.save_pretrained(folder)  # over the files it is mapped from
    assert_equal(shortcuts, read)
    assert_equal(shortcuts, Shortcuts.from_pretrained(folder))
    torch.testing.assert_close(read.r2(states), shortcuts.r2(states), equal_nan=True)
    tuned = read.apply(states[1].float(), 1, 3, "tuned")
    torch.testing.assert_close(tuned, states[1].float() + 1)
    linear = Shortcuts.fit_states([h.float() for h in states], targets="last")
    linear.save_pretrained(folder)  # in place of what was there
    assert_equal(linear, Shortcuts.from_pretrained(folder))
    assert_equal(linear, linear.to("cpu"))


def test_many_maps_are_spread_over_files(
    states: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling, "_FILE_BYTES", 2 * 6 * 6 * 8)
    shortcuts = Shortcuts.fit_states(states)
    shortcuts.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("shortcuts-0000?-of-00003.safetensors"))) == 3
    assert_equal(shortcuts, Shortcuts.from_pretrained(tmp_path))
    monkeypatch.undo()
    shortcuts.save_pretrained(tmp_path)  # leaves none of the others behind
    assert len(list(tmp_path.iterdir())) == 2


def change_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_tampered_and_truncated_files(saved: tuple[Shortcuts, Path]) -> None:
    _, folder = saved
    maps, index = folder / "shortcuts.safetensors", folder / "shortcuts.json"
    whole, about = maps.read_bytes(), index.read_text()
    change_byte(maps)
    with pytest.raises(UserError, match="truncated or altered"):
        Shortcuts.from_pretrained(folder)
    maps.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="truncated or altered"):
        Shortcuts.from_pretrained(folder)
    maps.unlink()
    with pytest.raises(UserError, match=r"shortcuts\.safetensors is missing"):
        Shortcuts.from_pretrained(folder)
    maps.write_bytes(whole)
    index.write_text(about[: len(about) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        Shortcuts.from_pretrained(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"there is no shortcuts\.json"):
        Shortcuts.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 2}, "missing or too many"),
        ({"num_layers": 0}, "at least two layers"),
        ({"width": 7}, "has the shape"),
        ({"affine": False}, "missing or too many"),
        ({"targets": "last"}, "missing or too many"),
        ({"targets": "some"}, "not known"),
        ({"cka": [["x"]]}, "does not describe"),
        ({"meta": 3}, "does not describe"),
        ({"format": "else"}, "format is not"),
        ({"version": 99}, "newer deepenough"),
        ({"files": {"../maps/shortcuts.safetensors": {"sha256": ""}}}, "missing"),
        ({"files": []}, "cannot be read"),
    ],
)
def test_an_altered_index(
    saved: tuple[Shortcuts, Path], changes: dict[str, Any], said: str
) -> None:
    _, folder = saved
    index = folder / "shortcuts.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))
    with pytest.raises(UserError, match=said):
        Shortcuts.from_pretrained(folder)


def test_a_file_that_is_no_safetensors_is_refused(saved: tuple[Shortcuts, Path]) -> None:
    _, folder = saved
    (folder / "shortcuts.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    index = json.loads((folder / "shortcuts.json").read_text())
    index["files"]["shortcuts.safetensors"]["sha256"] = sha256(folder / "shortcuts.safetensors")
    (folder / "shortcuts.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="damaged"):
        Shortcuts.from_pretrained(folder)


def test_places_that_hold_no_shortcuts(tmp_path: Path, states: list[Tensor]) -> None:
    for name in (tmp_path, tmp_path / "none", "./nowhere", "a/b/c/d"):
        with pytest.raises(UserError, match=r"holds no shortcuts|There is no folder"):
            Shortcuts.from_pretrained(name)
    with pytest.raises(UserError, match="neither a folder here nor shortcuts that the hub gives"):
        Shortcuts.from_pretrained("someone/maps")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        Shortcuts.fit_states(states).save_pretrained(tmp_path / "file")


def test_push_to_hub_uploads_what_from_pretrained_reads(
    saved: tuple[Shortcuts, Path], tmp_path: Path
) -> None:
    shortcuts, _ = saved

    class Hub:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
            assert (name, private, exist_ok) == ("me/maps", True, True)
            return "https://hub/me/maps"

        def upload_folder(self, folder_path: str, **options: Any) -> None:
            assert options["repo_id"] == "me/maps"
            Path(folder_path).rename(tmp_path / "uploaded")
            Path(folder_path).mkdir()

    assert shortcuts.push_to_hub("me/maps", private=True, api=Hub()) == "https://hub/me/maps"
    assert_equal(shortcuts, Shortcuts.from_pretrained(tmp_path / "uploaded"))
    card = (tmp_path / "uploaded" / "README.md").read_text()
    assert "base_model: some/model" in card and 'from_pretrained("me/maps")' in card
