"""What a user gets: run in an environment that has the wheel, its dependencies and nothing else.

`make test-wheel` makes that environment and runs this file with its Python, far from the repository
and with no compiler to be found. Prints a line for each thing that it has seen work.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import deepenough
from deepenough import cli

HERE = Path.cwd()
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++")
EXTRAS = ("gradio", "lm_eval", "pytest", "sphinx")
SMALL = ["--lines=20", "--eval_lines=10", "--prompts=1", "--new_tokens=8", "--rounds=1"]


def main() -> None:
    """Check one thing after the other; the first that fails ends it."""
    place = Path(deepenough.__file__)
    assert place.is_relative_to(sys.prefix) and "site-packages" in place.parts, place
    assert [name for name in COMPILERS if shutil.which(name)] == []
    assert [name for name in EXTRAS if importlib.util.find_spec(name)] == []
    print(f"installed: {place.parent}, no compiler, no extras")

    page = str(importlib.metadata.metadata("deepenough").get_payload())
    links = [part.partition(")")[0] for part in page.split("](")[1:]]
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links), links
    print(f"page of the package index: {len(links)} links, none to a file beside it")

    commands = cli.commands()
    for name in commands:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = cli.main([*name.split(), "--help"])
        assert code == 0 and f"deepenough {name}" in said.getvalue(), (name, code)
    print(f"--help: {len(commands)} commands")

    words = ["--config", "par-wikitext2"]
    assert cli.parse_command(commands["par search"], "par search", words).data == "wikitext-2"
    print("recipe: par-wikitext2")

    script = Path(sys.prefix) / "bin" / "deepenough"
    subprocess.run([script, "profile", "smollm2", *SMALL, "--out", "profile"], check=True)
    found = json.loads((HERE / "profile" / "profile.json").read_text("utf-8"))
    assert found["layers"] == 30 and found["verdict"] and found["generation"]
    assert "<title>" in (HERE / "profile" / "report.html").read_text("utf-8")
    print("profile: smollm2")

    done = subprocess.run([script, "explore"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "deepenough[explorer]" in done.stderr, done.stderr
    print("explore: names the extra that it needs")


if __name__ == "__main__":
    main()
