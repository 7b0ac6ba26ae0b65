"""Which blocks does a language model need for your text, on this machine?"""

import deepenough as de
from deepenough.runs import read_records


def main(data: str = "python", steps: int = 300, out: str = "runs/par-example") -> str:
    """Return the pattern that the search found."""
    sizes = {"data": data, "vocab_size": 2000, "steps": steps, "overwrite": True}
    found = de.train("par", "search", budget=0.7, out=out, log_every=50, **sizes)
    records, _ = read_records(found.metrics)
    pattern = next(str(record.values["pattern"]) for record in records if record.kind == "derive")
    print(f"found {pattern}: a is attention, d dense, - nothing")
    return pattern


if __name__ == "__main__":
    main()
