"""What users do with a model and its tokenizer: pipelines, chats, streamers, strings to stop at."""

import threading

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

from deepenough.decoding.api import speculate

OPTIONS = {"max_new_tokens": 12, "do_sample": False}
TEXTS = ["once upon", "a", "who is it"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    signs = "abcdefghijklmnopqrstuvwxyz 0123456789"
    vocab = {sign: number for number, sign in enumerate(["[PAD]", "[BOS]", "[EOS]", *signs])}
    made = Tokenizer(BPE(vocab, merges=[]))
    made.decoder = Fuse()
    template = "{% for m in messages %}[BOS]{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]",
        padding_side="left", chat_template=template,
    )  # fmt: skip


@pytest.fixture
def model(make_model):
    return make_model(eos_token_id=None, max_position_embeddings=256)


def test_pipelines_write_the_same(model, tokenizer) -> None:
    own, fast = (
        pipeline("text-generation", model=each, tokenizer=tokenizer, **OPTIONS)
        for each in (model, speculate(model))
    )
    assert fast(TEXTS[0]) == own(TEXTS[0])
    assert fast(TEXTS, batch_size=3) == own(TEXTS, batch_size=3)
    options = {"return_full_text": False, "repetition_penalty": 1.5, "stop_sequence": "e"}
    assert fast(TEXTS[0], **options) == own(TEXTS[0], **options)


def test_a_chat_goes_on_in_a_pipeline(model, tokenizer) -> None:
    fast = speculate(model)
    chats = []
    for each in (model, fast):
        answer = pipeline("text-generation", model=each, tokenizer=tokenizer, **OPTIONS)
        chat: list = []
        for text in TEXTS[:2]:
            chat = answer([*chat, {"role": "user", "content": text}])[0]["generated_text"]
        chats.append(chat)
    assert chats[0] == chats[1]
    ids = tokenizer.apply_chat_template(chats[1], return_tensors="pt", return_dict=True)
    found = fast.generate(**ids, **OPTIONS, return_dict_in_generate=True)
    assert found.reused > 12  # what was said before


def test_text_is_streamed_to_another_thread(model, tokenizer) -> None:
    given = tokenizer(TEXTS[0], return_tensors="pt") | OPTIONS
    given.pop("token_type_ids", None)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {**given, "streamer": streamer}
    thread = threading.Thread(target=speculate(model).generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(**given)[0, 9:])


@pytest.mark.parametrize(("rows", "sampled"), [(1, False), (1, True), (3, False)])
def test_strings_end_a_text_where_transformers_ends_it(model, tokenizer, rows, sampled) -> None:
    given = tokenizer(TEXTS[:rows], return_tensors="pt", padding=True)
    given.pop("token_type_ids", None)
    options = {**OPTIONS, "do_sample": sampled, "stop_strings": list("abcdefghijklmn")}
    found = []
    for each in (model, speculate(model)):
        torch.manual_seed(0)
        found.append(each.generate(**given, **options, tokenizer=tokenizer))
    assert torch.equal(*found)
    assert found[0].shape[1] < given["input_ids"].shape[1] + 12
