"""A chat that streams its answers; what was said before is read only once."""

from collections.abc import Sequence
from typing import Any

from transformers import TextStreamer

import deepenough as de

QUESTIONS = ("Name three rivers in Europe.", "Which of them is the longest?")


def main(
    name: str = "smollm2", questions: Sequence[str] = QUESTIONS, tokens: int = 60
) -> list[int]:
    """Return how many tokens of each prompt had been read by an earlier call."""
    model, tokenizer = de.load(name)
    fast = de.speculate(model)
    chat: list[dict[str, Any]] = []
    reused = []
    for question in questions:
        chat.append({"role": "user", "content": question})
        print(f"> {question}")
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = fast.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            return_dict_in_generate=True,
        )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        chat.append(
            {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
        )
        reused.append(int(output.reused))
    print(f"tokens of each prompt that were not read again: {reused}")
    return reused


if __name__ == "__main__":
    main()
