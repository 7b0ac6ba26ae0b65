"""Several processes write the tokens that one does, and none of them is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from deepenough.data import encoding
from deepenough.data.corpus import Corpus
from deepenough.data.encoding import encode_blocks
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import token_file
from deepenough.errors import UserError

ODD = ["", "  ", "of Éa 日本\u2028x", "ΑΣ\x85", "tab\tand \rreturn", "<unk> <|eos|>", "\x00"]


def blocks_of(lines, size=300):
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def encoded(blocks, tokenizer, workers, end=5):
    return list(encode_blocks(blocks, tokenizer, end, np.uint16, workers))


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_several_processes_give_what_one_does(kind, lower_tokenizer, prose, tmp_path, monkeypatch):
    tokenizer = lower_tokenizer
    if kind == "tokenizers":
        tokenizer.save_pretrained(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        # What earlier calls have left in it does not show.
        tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)
    blocks = [ODD, *blocks_of(prose), [""]]
    alone = encoded(blocks, tokenizer, 1)
    assert sum(len(block.ids) for block in alone) > 10_000
    monkeypatch.setattr(encoding, "encoder_of", lambda _: None)  # nothing is encoded here
    for one, other in zip(alone, encoded(blocks, tokenizer, 3), strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert one.ids.dtype == other.ids.dtype
        assert vars(one) | {"ids": 0} == vars(other) | {"ids": 0}


def test_only_a_long_text_starts_processes(tokenizer, prose, monkeypatch):
    started = []
    monkeypatch.setattr(encoding, "_in_processes", lambda *given: iter(started.append(given) or []))
    monkeypatch.setattr(encoding, "default_workers", lambda: 2)
    blocks = blocks_of(prose, len(prose) // encoding.BLOCKS_ALONE + 1)
    assert len(blocks) == encoding.BLOCKS_ALONE
    assert sum(block.num_lines for block in encoded(blocks, tokenizer, None)) == len(prose)
    assert not started
    encoded([*blocks, ["more"], ["and more"]], tokenizer, None)
    ((rest, num, *_),) = started
    assert (list(rest), num) == ([["more"], ["and more"]], 2)


def test_a_tokenizer_of_python_alone_runs_here(prose):
    class Characters:
        def __call__(self, lines, **_):
            return {"input_ids": [[ord(letter) for letter in line] for line in lines]}

    (block,) = encoded([["ab", "c"]], Characters(), 2)
    assert block.ids.tolist() == [97, 98, 5, 99, 5]


def test_a_dead_process_is_one_sentence_and_nothing_half_written(
    tokenizer, prose, tmp_path, monkeypatch
):
    started = []

    class Started(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)

    def lines():
        for number in range(100):
            if number == 50 and started:
                started[0].kill()
            yield from prose[:100]

    monkeypatch.setattr(encoding.subprocess, "Popen", Started)
    monkeypatch.setattr("deepenough.data.tokens.BLOCK_CHARACTERS", 1 << 14)
    given = Corpus("given", {"train": lines})
    with pytest.raises(UserError, match=r"has died.*--dataset.workers 1"):
        token_file(given, "train", tokenizer, cache_dir=tmp_path, workers=2)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert list((tmp_path / "tokens").iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at the processes of Linux")
def test_whatever_ends_a_command_none_of_its_processes_stays(tokenizer, tmp_path):
    """SIGINT is answered and leaves nothing; after SIGKILL, the next command clears away."""
    program = """
        import contextlib, sys
        from pathlib import Path
        from types import SimpleNamespace
        import numpy as np
        from deepenough.artifacts import entry
        from deepenough.data.encoding import SentencePieceEncoder, encode_blocks

        def blocks():
            for number in range(10**9):
                yield [f"{number} is a number"] * 100

        def fill(folder):
            model = Path(sys.argv[1]).read_bytes()
            tokenizer = SimpleNamespace(sentencepiece_encoder=SentencePieceEncoder(model, False))
            encoded = encode_blocks(blocks(), tokenizer, None, np.uint16, 2)
            with contextlib.closing(encoded), (folder / "ids.bin").open("wb") as file:
                for number, block in enumerate(encoded):
                    block.ids.tofile(file)
                    if number == 10:
                        # The processes import what this one does.
                        heavy = {"torch", "transformers"} & sys.modules.keys()
                        print("under way with", *heavy, flush=True)

        entry(Path(sys.argv[2]) / "tokens" / "key", fill)
    """
    (tmp_path / "model").write_bytes(tokenizer.sentencepiece_encoder.model)
    for kind in (signal.SIGINT, signal.SIGKILL):
        cache = tmp_path / kind.name
        command = [sys.executable, "-c", textwrap.dedent(program), tmp_path / "model", cache]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"under way with\n"
            children = children_of(process.pid)
            assert len(children) == 2
            process.send_signal(kind)
            process.communicate()
        until = time.monotonic() + 20
        while any(map(is_running, children)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(is_running, children))
        # Without a name that could be taken for a whole entry.
        left = [path.name for path in (cache / "tokens").iterdir()]
        assert len(left) == (kind == signal.SIGKILL)
        assert all(name.startswith(".") for name in left)


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
