"""A smaller model in minutes: the parts that matter least become linear maps, or nothing."""

from texts import paragraphs

import deepenough as de


def main(
    name: str = "smollm2", keep: float = 0.8, num_texts: int = 600, folder: str = "smaller"
) -> float:
    """Return the share of parameters that is left, of a model that is saved in `folder`."""
    model, tokenizer = de.load(name)
    small = de.prune(model, tokenizer, paragraphs(num_texts), keep=keep, budget="weights")
    small.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share = small.num_parameters() / model.num_parameters()
    print(f"{folder} has {share:.0%} of the parameters")
    return share


if __name__ == "__main__":
    main()
