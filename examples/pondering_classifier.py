"""A classifier that stops when it is sure, with the Trainer and pipeline of transformers."""

import random

from datasets import Dataset
from transformers import Trainer, TrainingArguments, pipeline

import deepenough as de

GOOD = ["wonderful", "moving", "clever", "a joy", "beautifully made", "funny"]
BAD = ["dull", "a waste of time", "clumsy", "tedious", "badly acted", "a mess"]


def reviews(num: int) -> Dataset:
    """Return made-up reviews; put your own texts and labels in their place."""
    draw = random.Random(0)
    rows = []
    for _ in range(num):
        label = draw.randrange(2)
        first, second = draw.sample((BAD, GOOD)[label], 2)
        rows.append({"text": f"The film is {first}, and it is {second}.", "label": label})
    return Dataset.from_list(rows)


def main(name: str = "minilm", num_texts: int = 640, folder: str = "runs/trainer") -> float:
    """Return the accuracy on texts that were not trained on."""
    encoder, tokenizer = de.load(name)
    model = de.PonderEncoderForSequenceClassification.from_encoder(encoder, num_labels=2)
    data = reviews(num_texts).map(lambda row: tokenizer(row["text"]), batched=True)
    parts = data.train_test_split(0.2, seed=0)
    settings = TrainingArguments(
        folder, num_train_epochs=2, learning_rate=1e-4, report_to="none", use_cpu=True
    )
    trainer = Trainer(model, settings, train_dataset=parts["train"], processing_class=tokenizer)
    trainer.train()

    classify = pipeline("text-classification", model=model.eval(), tokenizer=tokenizer)
    texts, labels = parts["test"]["text"], parts["test"]["label"]
    answers = [int(answer["label"][-1]) for answer in classify(list(texts))]
    right = sum(a == b for a, b in zip(answers, labels, strict=True)) / len(answers)
    passes = [answer.passes for answer in model.predict(list(texts), tokenizer)]
    print(f"accuracy {right:.0%}, {sum(passes) / len(passes):.1f} of {model.num_passes} layers")
    return right


if __name__ == "__main__":
    main()
