"""The same tokens, sooner: wrap a model, call `generate` as ever."""

import time

import torch

import deepenough as de


def main(name: str = "smollm2", prompt: str = "The history of the", tokens: int = 64) -> float:
    """Return how many times faster the wrapped model is, after checking that nothing changed."""
    model, tokenizer = de.load(name)
    fast = de.speculate(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    seconds, written = {}, {}
    for label, way in (("generate", model), ("speculate", fast)):
        way.generate(**inputs, max_new_tokens=4, do_sample=False)  # the first call prepares
        begun = time.perf_counter()
        written[label] = way.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        seconds[label] = time.perf_counter() - begun
    assert torch.equal(written["generate"], written["speculate"])
    print(tokenizer.decode(written["speculate"][0], skip_special_tokens=True))
    ratio = seconds["generate"] / seconds["speculate"]
    print(f"the same {tokens} tokens, {ratio:.1f} times as fast")
    return ratio


if __name__ == "__main__":
    main()
