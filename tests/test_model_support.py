"""A sample of `benchmarks/model_support.py`: telling architectures, right or refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import model_support
from benchmarks.model_support import CRASH, IN_PART, REFUSED, RIGHT, WRONG, judge
from benchmarks.tiny_models import PAIR, model_types, variants_of

SPECULATION, SHORTCUT, PONDER = "speculation", "shortcut", "ponder"
#: Type, kind, variant; what becomes of each method.
SAMPLE: dict[tuple[str, str, str], dict[str, str]] = {
    ("llama", "causal", "gqa"): {SPECULATION: RIGHT, "early exit": RIGHT, SHORTCUT: RIGHT},
    ("llama", "causal", "longrope"): {SPECULATION: RIGHT},
    ("phi3", "causal", "longrope"): {SPECULATION: RIGHT, "early exit": IN_PART},
    ("mistral", "causal", "window"): {SPECULATION: RIGHT, SHORTCUT: RIGHT},
    ("gpt_neo", "causal", "window"): {SPECULATION: RIGHT},
    ("falcon", "causal", "new_decoder_architecture=True"): {SPECULATION: RIGHT, SHORTCUT: RIGHT},
    ("bart", "causal", "plain"): {SPECULATION: RIGHT, "early exit": IN_PART},
    ("moss_transcribe_diarize", "causal", "plain"): {SPECULATION: RIGHT},
    ("dbrx", "causal", "dynamic"): {SPECULATION: RIGHT},
    ("mamba", "causal", "plain"): {SPECULATION: RIGHT, "early exit": REFUSED},
    ("qwen3_next", "causal", "plain"): {SPECULATION: RIGHT},
    ("rwkv", "causal", "plain"): {SPECULATION: RIGHT},
    ("gpt_oss", "causal", "window"): {SPECULATION: RIGHT},
    ("llama4_text", "causal", "chunked"): {SPECULATION: RIGHT},
    ("xlnet", "causal", "plain"): {SPECULATION: RIGHT},
    ("t5", PAIR, "plain"): {SPECULATION: RIGHT},
    ("marian", PAIR, "plain"): {SPECULATION: RIGHT},
    ("whisper", PAIR, "plain"): {SPECULATION: RIGHT},
    ("pop2piano", PAIR, "plain"): {SPECULATION: REFUSED},
    ("opt", "causal", "do_layer_norm_before=False"): {SPECULATION: RIGHT, SHORTCUT: RIGHT},
    ("gemma4_text", "causal", "plain"): {SPECULATION: RIGHT, SHORTCUT: RIGHT},
    ("xlm", "masked", "plain"): {SHORTCUT: REFUSED},
    ("deberta-v2", "encoder", "plain"): {PONDER: RIGHT},
    ("flaubert", "encoder", "plain"): {PONDER: REFUSED},
    ("modernbert", "encoder", "window"): {PONDER: RIGHT},
}


@pytest.mark.parametrize("case", SAMPLE, ids=" ".join)
def test_a_method_is_right_or_refuses_the_model(case: tuple[str, str, str]) -> None:
    name, kind, variant = case
    if name not in model_types() or variant not in variants_of(name, kind):
        pytest.skip("this transformers does not have it")
    rows = model_support.measure_type(name, [kind], [variant], list(SAMPLE[case]))
    found = {row["method"]: (row["verdict"], row["why"]) for row in rows}
    assert (
        SAMPLE[case].items() <= {method: verdict for method, (verdict, _) in found.items()}.items()
    ), found
    assert not {WRONG, CRASH} & {verdict for verdict, _ in found.values()}, found


def test_what_is_wrong_is_called_wrong() -> None:
    def differs(model: Any, made: dict[str, Any], rows: int) -> None:
        if rows == 3:
            raise model_support.Different("token 5 is another")

    def fails(model: Any, made: dict[str, Any], rows: int) -> None:
        raise KeyError("layers")

    model: Any = None
    assert judge(model_support.Method(differs, ()), model, {})[0] == WRONG
    assert judge(model_support.Method(fails, ()), model, {})[0] == CRASH


def test_the_page_names_every_type() -> None:
    rows = [
        {"type": "llama", "kind": "causal", "variant": variant, "method": "speculation"}
        | {"drafts": True}
        | verdict
        for variant, verdict in {
            "plain": {"verdict": RIGHT, "why": ""},
            "longrope": {
                "verdict": REFUSED,
                "why": "LlamaModel (x: y) does not: use another.",
            },
        }.items()
    ]
    rows.append({"type": "blt", "kind": "causal", "variant": "plain", "method": None,
                 "verdict": model_support.NOT_BUILT, "why": "it has no sizes"})  # fmt: skip
    table = model_support.by_type(rows)
    page = model_support.page(rows, [SHORTCUT, SPECULATION])
    assert table["llama"]["speculation"] == (IN_PART, "right; refused: longrope")
    assert "| speculation, causal | 0 | 1 | 0 | 0 | 0 |" in page
    assert "| the model does not | 0 | 1 |" in page
    assert "| `llama` | - | right; refused: longrope |" in page
    assert "| `blt` | it has no sizes |" in page
