"""Let tokens leave before the last layer, with a bound on how many of them change."""

from texts import paragraphs

import deepenough as de


def main(
    name: str = "smollm2",
    prompt: str = "The function returns",
    max_disagreement: float = 0.1,
    num_texts: int = 300,
    new_tokens: int = 32,
) -> de.Calibration:
    """Return what calibration found, after using it if it found something that holds."""
    model, tokenizer = de.load(name)
    texts = paragraphs(num_texts)
    fit_on, held_out = texts[: num_texts // 2], texts[num_texts // 2 :]
    shortcuts = de.Shortcuts.fit(model, tokenizer, fit_on, ridge=1e-3)

    early = de.early_exit(model, shortcuts)
    found = de.calibrate(early, tokenizer, held_out, max_disagreement, new_tokens=new_tokens)
    print(found.verdict())
    if found.threshold is None:
        return found

    early = de.early_exit(model, shortcuts, guarantee=found)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = early.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
    )
    print(tokenizer.decode(output.sequences[0]))
    print(f"{output.trace.mean_blocks:.1f} of {shortcuts.num_layers} layers a token")
    return found


if __name__ == "__main__":
    main()
