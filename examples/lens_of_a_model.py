"""What would every layer answer? Fit the maps to the last layer, and read each layer with them."""

from texts import paragraphs

import deepenough as de
from deepenough.shortcut.lens import lens


def main(
    name: str = "smollm2", prompt: str = "The capital of France is", num_texts: int = 300
) -> list[str]:
    """Return the next word as read from every layer."""
    model, tokenizer = de.load(name)
    texts = paragraphs(num_texts)
    shortcuts = de.Shortcuts.fit(model, tokenizer, texts, targets="last", ridge=1e-3)
    seen = lens(model, tokenizer, shortcuts, prompt).values
    words = [row[-1] for row in seen["words"]]
    for layer, word, chances in zip(seen["layers"], words, seen["probability"], strict=True):
        print(f"layer {layer:2}: {word!r:15} {chances[-1]:6.1%}")
    return words


if __name__ == "__main__":
    main()
