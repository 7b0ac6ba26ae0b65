"""A translator that updates only what still changes, on made-up pairs of sentences."""

import random
from pathlib import Path

from transformers import AutoTokenizer

import deepenough as de

WORDS = {
    "a": "ein",
    "the": "das",
    "small": "kleine",
    "red": "rote",
    "dog": "Hund",
    "cat": "Katze",
    "child": "Kind",
    "runs": "läuft",
    "sleeps": "schläft",
    "sees": "sieht",
}


def write_pairs(folder: Path, num: int) -> None:
    """Write pairs of sentences, word for word; put files of your own in their place."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", num), ("val", num // 10), ("test", num // 10)):
        english = [draw.choices(list(WORDS), k=draw.randint(3, 8)) for _ in range(size)]
        german = [[WORDS[word] for word in words] for words in english]
        for ending, sentences in (("en", english), ("de", german)):
            text = "\n".join(" ".join(words) for words in sentences)
            (folder / f"{split}.{ending}").write_text(f"{text}\n", "utf-8")


def main(folder: str = "runs/pairs", num_pairs: int = 2000, steps: int = 300) -> str:
    """Return the translation of a sentence."""
    write_pairs(Path(folder), num_pairs)
    run = de.train(
        "lazy",
        task="translation",
        data=folder,
        dataset__source="en",
        dataset__target="de",
        dataset__vocab_size=320,
        model__d_model=64,
        model__d_ff=128,
        steps=steps,
        train__warmup=steps // 10,
        out=f"{folder}-translator",
        overwrite=True,
    )
    model = de.LazyTransformerForConditionalGeneration.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    source = tokenizer("a small dog sees the cat" + tokenizer.eos_token, return_tensors="pt")
    written = model.generate(**source, max_new_tokens=20, epsilon=0.1)
    text = str(tokenizer.decode(written[0], skip_special_tokens=True))
    depth = model.encoder(source["input_ids"], epsilon=0.1).trace.depth
    print(f"{text!r}; steps of each source token: {depth[0].tolist()}")
    return text


if __name__ == "__main__":
    main()
