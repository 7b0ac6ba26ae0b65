"""`deepenough explore` refuses before it loads anything."""

import importlib.util

import pytest

from deepenough.__main__ import main
from deepenough.explorer.commands import PASSWORD


def test_other_addresses_need_a_password(capsys, monkeypatch):
    monkeypatch.delenv(PASSWORD, raising=False)
    assert main(["explore", "--host", "0.0.0.0"]) == 2
    assert "set a password with --password" in capsys.readouterr().err


def test_without_gradio_it_says_what_to_install(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else find(name)
    )
    monkeypatch.setenv(PASSWORD, "secret")
    assert main(["explore", "--host", "0.0.0.0"]) == 2
    assert "pip install 'deepenough[explorer]'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--port", "0"], ["--waiting", "0"], ["--max_tokens", "1"]])
def test_limits_are_checked(words, capsys):
    assert main(["explore", *words]) == 2
    assert "must be" in capsys.readouterr().err
