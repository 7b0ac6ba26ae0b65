"""`deepenough generate`: text from a trained model."""

from __future__ import annotations

from dataclasses import dataclass

from deepenough.cli.parse import parse


@dataclass
class GenerateSettings:
    """Generate"""

    run: str
    """Folder of a finished run, or of a model."""

    prompt: str = "The"
    """Text to go on from."""

    tokens: int = 60
    """Number of tokens to write."""

    temperature: float = 0.8
    """Of the sampling; 0 takes the likeliest token every time."""

    top_k: int = 50
    """Sample from this many of the likeliest tokens."""

    seed: int = 0
    """Of the sampling."""


def main(argv: list[str]) -> int:
    settings = parse(
        "generate",
        GenerateSettings,
        argv,
        description="Continue a prompt with a trained model.",
        example="deepenough generate --run runs/mine --prompt 'The function returns'",
    )
    from deepenough.par.evaluation import continue_text

    print(
        continue_text(
            settings.run,
            settings.prompt,
            settings.tokens,
            settings.temperature,
            settings.top_k,
            settings.seed,
        )
    )
    return 0
