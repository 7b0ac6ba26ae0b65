"""The source's matrices come in; nothing else that a pickle can do happens."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.source_pickles import import_source, load_tensors_only


def dump(path: Path, content: Any) -> None:
    with open(path, "wb") as file:
        pickle.dump(content, file)


@pytest.fixture
def matrices() -> dict[tuple[int, int], torch.Tensor]:
    """As the source makes them: views, here of a larger storage and in column order."""
    base = torch.randn(9, 4, 4)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    return {pair: base[2 + number].T for number, pair in enumerate(pairs)}


def test_matrices_of_the_source(matrices: dict[Any, torch.Tensor], tmp_path: Path) -> None:
    for (i, j), matrix in matrices.items():
        dump(tmp_path / f"{i}_{j}.pickle", matrix)
    dump(tmp_path / "p0_1_2.pickle", torch.randn(4, 4))  # of a sub-module, of one block alone
    shortcuts = import_source(tmp_path)
    assert (shortcuts.num_layers, shortcuts.width, shortcuts.targets) == (3, 4, "all")
    assert not shortcuts.affine
    for pair, matrix in matrices.items():
        assert torch.equal(shortcuts.matrix(*pair), matrix)
        assert shortcuts.matrix(*pair).untyped_storage().nbytes() == 64  # not the whole of the base
    state = torch.randn(4)
    torch.testing.assert_close(shortcuts.apply(state, 0, 3), matrices[0, 3] @ state)
    shortcuts.save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match="no CKA"):
        shortcuts.cka()
    (tmp_path / "1_2.pickle").unlink()
    with pytest.raises(UserError, match=r"lacks 1_2\.pickle"):
        import_source(tmp_path)


def test_maps_of_sub_modules(
    matrices: dict[Any, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`pi_a_b.pickle`, b = 1 ... 6: norm, attention, residual, norm, feed-forward, residual."""
    for (i, j), matrix in matrices.items():
        dump(tmp_path / f"{i}_{j}.pickle", matrix)
    parts = {(i, b): torch.randn(4, 4) for i in range(3) for b in range(1, 7)}
    for (i, b), matrix in parts.items():
        dump(tmp_path / f"p{i}_{b - 1}_{b}.pickle", matrix)
    import_source(tmp_path).save_pretrained(tmp_path / "saved")
    found = Shortcuts.from_pretrained(tmp_path / "saved").submodules
    assert found is not None and found.kinds == ("attention", "feed_forward", "norms")
    names = {1: ("norms", 0), 2: ("attention", 0), 3: ("residuals", 0)}
    names |= {4: ("norms", 1), 5: ("feed_forward", 0), 6: ("residuals", 1)}
    assert len(found.maps) == 18
    for (i, b), matrix in parts.items():
        kind, number = names[b]
        assert torch.equal(found.maps[kind, i, number].weight, matrix)
    (tmp_path / "p1_3_4.pickle").unlink()
    found = import_source(tmp_path).submodules
    assert found is not None and found.kinds == ("attention", "feed_forward")
    assert "lacks some maps of norms" in caplog.text
    dump(tmp_path / "p0_1_2.pickle", torch.randn(3, 4))
    with pytest.raises(UserError, match=r"p0_1_2\.pickle is not a matrix of 4 x 4"):
        import_source(tmp_path)


def test_maps_to_the_last_layer_with_intercepts(tmp_path: Path) -> None:
    for i in range(3):
        coefficients, intercept = np.random.rand(4, 4), np.random.rand(4)
        dump(
            tmp_path / f"{i}_3.pickle",
            [torch.from_numpy(coefficients), torch.from_numpy(intercept)],
        )
    shortcuts = import_source(tmp_path)
    assert shortcuts.targets == "last" and shortcuts.affine
    dump(tmp_path / "2_3.pickle", torch.randn(4, 4))
    with pytest.raises(UserError, match="some have none"):
        import_source(tmp_path)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def inside_storage(path: Path) -> bytes:
    """A tensor whose numbers are themselves a malicious pickle, which torch would open."""
    inner = pickle.dumps(Malicious(path))

    class Numbers:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (inner,)

    return pickle.dumps(Numbers())


def test_malicious_pickles_run_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    pickle.loads(pickle.dumps(Malicious(ran)))
    assert ran.exists(), "this would test less than it says"
    ran.unlink()
    pickles = {
        "system": pickle.dumps(Malicious(ran)),
        "in a list": pickle.dumps([torch.ones(2, 2), Malicious(ran)]),
        "in a storage": inside_storage(ran),
        "eval": b"cbuiltins\neval\n(S'open(%r, \"w\")'\ntR." % str(ran),
        "getattr": b"cbuiltins\ngetattr\n(ctorch\nstorage\nS'x'\ntR.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "rebuilt of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n(S'a'\nI0\n(t(t(tI00\n(ttR.",
        "no pickle": b"hello",
        "truncated": pickle.dumps(torch.randn(4, 4))[:-30],
        "empty": b"",
    }
    for name, content in pickles.items():
        (tmp_path / "0_1.pickle").write_bytes(content)
        with pytest.raises(UserError):
            import_source(tmp_path)
        with pytest.raises(UserError):
            load_tensors_only(tmp_path / "0_1.pickle")
        assert not ran.exists(), name


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps(torch.zeros(4, 4))
    beyond = content.replace(b"K\x04K\x04\x86", b"K\x08K\x08\x86")
    assert beyond != content
    (tmp_path / "0_1.pickle").write_bytes(beyond)
    with pytest.raises(UserError, match="more numbers than there are"):
        import_source(tmp_path)


def test_other_content(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file such as 0_12\.pickle"):
        import_source(tmp_path)
    for content in ({"a": 1}, [1, 2], torch.ones(3), [torch.ones(2, 2)] * 3, 7):
        dump(tmp_path / "0_1.pickle", content)
        with pytest.raises(UserError, match="does not hold one matrix"):
            import_source(tmp_path)
    dump(tmp_path / "0_1.pickle", torch.ones(2, 3))
    with pytest.raises(UserError, match="not a matrix of 2 x 2"):
        import_source(tmp_path)
