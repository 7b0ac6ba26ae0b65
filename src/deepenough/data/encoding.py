"""Lines of text to the ids of their tokens: block by block, in this process or in several.

Blocks come back in the order in which they went out, so several processes write what one does. Each
works on one block while the next is read here: memory is that of the blocks under way.

The processes are programs of their own that are spoken to through pipes, not children of
`multiprocessing`, which would copy the threads of torch into them or run the caller's script a
second time. They import no torch and no transformers, and end when their pipe does: whatever kills
this process, none of them stays.
"""

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import sentencepiece
from tokenizers import Tokenizer, normalizers

from deepenough.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTRIBUTE = "sentencepiece_encoder"
#: So many blocks are encoded here before processes are started: a small text is through by then.
BLOCKS_ALONE = 8
#: More processes than this wait for the one that reads the text.
MOST_WORKERS = 8

Encode = Callable[[list[str]], list[list[int]]]


class SentencePieceEncoder:
    """A SentencePiece model with what its Hugging Face form does to the text beforehand."""

    def __init__(self, model: bytes, lowercase: bool, num_threads: int = -1) -> None:
        """Take a model; by default it uses as many threads as there are cores."""
        self.model, self.lowercase, self.num_threads = model, lowercase, num_threads
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __call__(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of each line."""
        if self.lowercase:
            lines = [lower(line) for line in lines]
        ids: list[list[int]] = self._processor.encode(lines, num_threads=self.num_threads)
        return ids


def lower(text: str) -> str:
    """Lower case as the saved tokenizer makes it: letter by letter.

    `str.lower` differs in one place, a capital sigma at the end of a word.
    """
    return text.lower() if text.isascii() else str(normalizers.Lowercase().normalize_str(text))


def encoder_of(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Return a function from lines to their ids, special tokens not added."""

    def encode(lines: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = tokenizer(lines, **options)["input_ids"]
        return ids

    return getattr(tokenizer, ATTRIBUTE, encode)


@dataclass(frozen=True)
class EncodedBlock:
    """The ids of some lines one behind the other, and what the lines were."""

    ids: npt.NDArray[np.unsignedinteger]
    num_lines: int
    num_words: int
    num_bytes: int


@dataclass(frozen=True)
class BlockEncoder:
    """Encode blocks of lines; `end`, if given, is the id that follows each line."""

    encode: Encode
    end: int | None
    dtype: str

    def __call__(self, lines: list[str]) -> EncodedBlock:
        """Return the ids of all lines, counted."""
        encoded = self.encode(lines)
        if self.end is not None:
            for ids in encoded:
                ids.append(self.end)
        return EncodedBlock(
            np.array(list(chain.from_iterable(encoded)), dtype=self.dtype),
            len(lines),
            sum(len(line.split()) for line in lines),
            sum(len(line.encode("utf-8")) for line in lines),
        )


def encode_blocks(
    blocks: Iterable[list[str]],
    tokenizer: "PreTrainedTokenizerBase",
    end: int | None,
    dtype: type[np.unsignedinteger],
    workers: int | None = None,
) -> Generator[EncodedBlock]:
    """Yield each block encoded, in order.

    Args:
        blocks: Lines of text, some at a time.
        tokenizer: One written in Python alone is run in this process, whatever `workers` says.
        end: The id that follows each line, if any does.
        dtype: Of the ids.
        workers: Processes that encode; by default as many as cores, once the text has turned out
            to be long.
    """
    here = BlockEncoder(encoder_of(tokenizer), end, np.dtype(dtype).name)
    settings, model = _description(tokenizer)
    num = default_workers() if workers is None else workers
    rest = iter(blocks)
    if num == 1 or not model or not sys.executable:
        yield from map(here, rest)
        return
    if workers is None:
        yield from map(here, islice(rest, BLOCKS_ALONE))
        following = next(rest, None)
        if following is None:
            return
        rest = chain([following], rest)
    yield from _in_processes(rest, num, settings | {"end": end, "dtype": here.dtype}, model)


def default_workers() -> int:
    """Return how many processes encode a long text: one for each core that may be used."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(usable or 1, MOST_WORKERS)


def _description(tokenizer: "PreTrainedTokenizerBase") -> tuple[dict[str, Any], bytes]:
    """Return what another process needs to encode as a tokenizer does; no bytes if none can."""
    own = getattr(tokenizer, ATTRIBUTE, None)
    if own is not None:
        return {"sentencepiece": True, "lowercase": own.lowercase}, own.model
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {"sentencepiece": False}, b"" if backend is None else backend.to_str().encode()


# -- several processes -----------------------------------------------------------------------------

_LENGTH = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")


def _in_processes(
    blocks: Iterable[list[str]], num: int, settings: Mapping[str, Any], model: bytes
) -> Iterator[EncodedBlock]:
    """Yield blocks that `num` processes encode in turns."""
    with contextlib.ExitStack() as stack:
        workers = [_Worker(str(settings["dtype"])) for _ in range(num)]
        for worker in workers:
            stack.callback(worker.end)
        for worker in workers:  # all are starting by now
            worker.send(json.dumps(settings).encode())
            worker.send(model)
        busy: deque[tuple[_Worker, int]] = deque()
        for lines, worker in zip(blocks, cycle(workers), strict=False):
            if len(busy) == num:  # its turn again: what it has made is next in order
                first, num_lines = busy.popleft()
                yield first.answer(num_lines)
            worker.send("\n".join(lines).encode("utf-8"))
            busy.append((worker, len(lines)))
        for worker, num_lines in busy:
            yield worker.answer(num_lines)


class _Worker:
    """A process that runs `serve`."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # A group of its own, so that Ctrl-C is for this process, which then ends the other.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def send(self, content: bytes) -> None:
        """Hand over a model or a text."""
        try:
            _write(self._input, content)
        except OSError:
            self._refuse()

    def answer(self, num_lines: int) -> EncodedBlock:
        """Wait for the ids of the text that was sent first of those without answer."""
        content = _read(self._output)
        if content is None:
            self._refuse()
        words, size = _COUNTS.unpack_from(content)
        ids = np.frombuffer(content, dtype=self.dtype, offset=_COUNTS.size)
        return EncodedBlock(ids, num_lines, words, size)

    def _refuse(self) -> NoReturn:
        raise UserError(
            "A process that encodes the text has died, perhaps for lack of memory: repeat the "
            "command, with --dataset.workers 1 if it dies again."
        )

    def end(self) -> None:
        """End the process: it holds nothing that is needed."""
        self._process.kill()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):  # what it was not told yet
                pipe.close()
        self._process.wait()


def serve() -> None:
    """Encode the texts that come through standard input, until it ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    settings, model = json.loads(_read(source) or b"{}"), _read(source)
    if model is None:
        return
    encode: Encode
    if settings["sentencepiece"]:
        encode = SentencePieceEncoder(model, settings["lowercase"], num_threads=1)
    else:
        backend = Tokenizer.from_str(model.decode())
        backend.no_padding()
        backend.no_truncation()

        def encode(lines: list[str]) -> list[list[int]]:
            return [one.ids for one in backend.encode_batch_fast(lines, add_special_tokens=False)]

    encoder = BlockEncoder(encode, settings["end"], settings["dtype"])
    while (text := _read(source)) is not None:
        block = encoder(text.decode("utf-8").split("\n"))
        try:
            _write(target, _COUNTS.pack(block.num_words, block.num_bytes) + block.ids.tobytes())
        except OSError:
            os._exit(1)  # nobody listens any more


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return what was written next, None at the end."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    content = pipe.read(length)
    return content if len(content) == length else None
