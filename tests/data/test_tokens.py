"""Token files: what is in them, how it is counted, and that they are written once."""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deepenough.data import tokens as tokens_module
from deepenough.data.corpus import Corpus, open_corpus
from deepenough.data.encoding import encoder_of
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import TokenFile, id_type, token_file, tokenizer_fingerprint
from deepenough.errors import UserError

LINES = [" The class ", "", "of Éa 日本", "  "]


def corpus_of(lines):
    return Corpus("given", {"train": lambda: iter(lines)})


@pytest.mark.parametrize("end_of_line", [True, False])
def test_ids_and_counts(tokenizer, end_of_line):
    file = token_file(corpus_of(LINES), "train", tokenizer, end_of_line=end_of_line)
    end = [tokenizer.eos_token_id] if end_of_line else []
    expected = [i for line in LINES for i in [*encoder_of(tokenizer)([line])[0], *end]]
    assert file.ids.tolist() == expected
    assert len(file) == len(expected)
    assert file.ids.dtype == np.uint16
    assert file.num_words == 5 + (4 if end_of_line else 0)
    assert file.num_bytes == len("".join(LINES).encode()) + (4 if end_of_line else 0)
    counts = file.vocab_counts()
    assert len(counts) == file.vocab_size == len(tokenizer)
    assert {i: n for i, n in enumerate(counts) if n} == Counter(expected)


def test_blocks_do_not_show(tokenizer, prose, monkeypatch, tmp_path):
    whole = token_file(corpus_of(prose), "train", tokenizer, cache_dir=tmp_path / "1")
    monkeypatch.setattr(tokens_module, "BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(tokens_module, "COUNT_BLOCK", 999)
    blocks = token_file(corpus_of(prose), "train", tokenizer, cache_dir=tmp_path / "2")
    assert blocks.folder != whole.folder
    assert np.array_equal(whole.ids, blocks.ids)
    assert replace(whole, folder=blocks.folder) == blocks
    assert blocks.vocab_counts().sum() == len(whole)


def test_a_tokenizer_that_encodes_by_itself(tokenizer, prose, tmp_path):
    tokenizer.save_pretrained(tmp_path / "t")
    plain = load_tokenizer(tmp_path / "t")
    assert not hasattr(plain, "sentencepiece_encoder")
    mine = token_file(corpus_of(prose), "train", tokenizer, cache_dir=tmp_path / "1")
    theirs = token_file(corpus_of(prose), "train", plain, cache_dir=tmp_path / "2")
    assert replace(mine, folder=theirs.folder) == theirs
    assert np.array_equal(mine.vocab_counts(), theirs.vocab_counts())


def test_written_once(tokenizer, monkeypatch):
    corpus = corpus_of(LINES)
    first = token_file(corpus, "train", tokenizer)
    monkeypatch.setattr(tokens_module, "encode_blocks", None)
    assert token_file(corpus, "train", tokenizer) == first
    assert token_file(corpus_of(list(LINES)), "train", tokenizer) == first


def test_the_key_is_text_tokenizer_and_line_ends(tokenizer, lower_tokenizer):
    folders = {
        token_file(corpus_of(LINES), "train", tokenizer).folder,
        token_file(corpus_of(LINES), "train", tokenizer, end_of_line=False).folder,
        token_file(corpus_of(LINES), "train", lower_tokenizer).folder,
        token_file(corpus_of([*LINES, ""]), "train", tokenizer).folder,
    }
    assert len(folders) == 4


def test_the_tokenizers_fingerprint_survives_use_and_saving(tokenizer, tmp_path):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    loaded(["a", "b c"], padding=True, truncation=True, max_length=5)
    assert tokenizer_fingerprint(loaded) == before


def test_large_vocabularies_get_wider_ids():
    assert id_type(65_535) is np.uint16
    assert id_type(65_536) is np.uint32


def test_damage_is_found(tokenizer):
    file = token_file(corpus_of(LINES), "train", tokenizer)
    with (file.folder / "ids.bin").open("ab") as ids:
        ids.write(b"x")
    with pytest.raises(UserError, match="damaged"):
        TokenFile.open(file.folder)


def test_no_tokens(tokenizer):
    with pytest.raises(UserError, match="gives no tokens"):
        token_file(corpus_of(["", ""]), "train", tokenizer, end_of_line=False)


def test_wikitext_counts_are_the_known_ones(data_dir):
    """The counts every paper on WikiText-2 reports: words and one end for each line."""
    corpus = open_corpus(str(data_dir / "wikitext-2"))
    tokenizer = load_tokenizer(data_dir / "par" / "wiki2_12k.model")
    words = [token_file(corpus, split, tokenizer).num_words for split in corpus.splits]
    assert words == [2_088_628, 217_646, 245_569]


def test_wikitext_tokens_are_the_sources(data_dir):
    """As PAR's source has them: no line ends, 2,825 windows of 32 x 33 tokens."""
    corpus = open_corpus(str(data_dir / "wikitext-2"))
    tokenizer = load_tokenizer(data_dir / "par" / "wiki2_12k.model", lowercase=True)
    sizes = [
        len(token_file(corpus, split, tokenizer, end_of_line=False)) for split in corpus.splits
    ]
    assert sizes == [2_982_265, 314_913, 357_981]
    assert -(-sizes[0] // (32 * 33)) == 2_825


MEASURE = """
    import json, resource, sys
    from deepenough.data.corpus import Corpus
    from deepenough.data.tokenizer import load_tokenizer
    from deepenough.data import tokens
    from deepenough.data.tokens import token_file

    # The smaller text, too, is long enough for several processes, and for a whole block of counts.
    tokens.BLOCK_CHARACTERS, tokens.COUNT_BLOCK = 1 << 18, 1 << 18

    def lines(num_bytes):
        size, number = 0, 0
        while size < num_bytes:
            line = f"line {number} of a text that nobody holds in memory at once " * 4
            yield line
            size, number = size + len(line) + 1, number + 1

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    tokenizer = load_tokenizer(sys.argv[1])
    peaks = []
    for megabytes in (5, 30):
        corpus = Corpus("lazy", {"train": lambda: lines(megabytes << 20)})
        token_file(corpus, "train", tokenizer, cache_dir=sys.argv[2]).vocab_counts()
        peaks.append(peak())
    print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path):
    from deepenough.data.tokenizer import save_tokenizer

    save_tokenizer(tokenizer, tmp_path / "t")
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), tmp_path / "t", tmp_path / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = json.loads(done.stdout)
    # 25 MB more text; to keep it, or its ids, would take more than this.
    assert large - small < 10 << 20


def test_two_processes_at_once(tokenizer, prose, tmp_path):
    from deepenough.data.tokenizer import save_tokenizer

    save_tokenizer(tokenizer, tmp_path / "t")
    (tmp_path / "text.txt").write_text("\n".join(prose), encoding="utf-8")
    program = """
        import sys
        from deepenough.data.corpus import open_corpus
        from deepenough.data.tokenizer import load_tokenizer
        from deepenough.data.tokens import token_file
        corpus = open_corpus(sys.argv[1], valid_fraction=0, test_fraction=0)
        file = token_file(corpus, "train", load_tokenizer(sys.argv[2]), cache_dir=sys.argv[3])
        print(file.ids.sum(), len(file))
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(program),
        *(str(tmp_path / name) for name in ("text.txt", "t", "cache")),
    ]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [path.name[0] for path in (tmp_path / "cache" / "tokens").iterdir()] != ["."]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
