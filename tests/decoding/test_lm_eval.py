"""A local task of lm-eval: full depth scores as the base model, and exits count."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deepenough import Shortcuts
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.early_exit import FixedLayer, TopProbability

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install deepenough[eval]")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
WORDS = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3}
    words |= {f"w{number}": number for number in range(4, WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]",
        unk_token="[UNK]", model_max_length=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shortcuts() -> Shortcuts:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(300, 16, generator=generator)]
    for _ in range(3):
        states.append(states[-1] + 0.5 * torch.randn(300, 16, generator=generator))
    return Shortcuts.fit_states(states)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which of three words comes next, and what would the model write."""
    folder = tmp_path_factory.mktemp("task")
    ids = torch.randint(4, WORDS, (12, 9), generator=torch.Generator().manual_seed(3)).tolist()
    rows = [
        {
            "question": " ".join(f"w{n}" for n in row[:6]),
            "choices": [f"w{n}" for n in row[6:]],
            "answer": number % 3,
        }
        for number, row in enumerate(ids)
    ]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (
        "dataset_path: json\n"
        "dataset_kwargs:\n"
        "  data_files:\n"
        f"    test: {folder / 'words.jsonl'}\n"
        "test_split: test\n"
        'doc_to_text: "{{question}}"\n'
    )
    (folder / "next.yaml").write_text(
        "task: own_next_word\n" + data + "output_type: multiple_choice\n"
        'doc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    (folder / "write.yaml").write_text(
        "task: own_writing\n" + data + "output_type: generate_until\n"
        'doc_to_target: "{{choices[answer]}}"\n'
        "generation_kwargs:\n  until: ['w5']\n  max_gen_toks: 6\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)


def answers(found: dict[str, Any], name: str) -> list[Any]:
    rows = sorted(found["samples"][name], key=lambda row: row["doc_id"])
    return [row["filtered_resps"] for row in rows]


def run(model: Any, tokenizer: Any, task: Path, names: list[str]) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=4),
        tasks=names,
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        bootstrap_iters=0,
    )


def test_full_depth_scores_are_the_models_own(model, tokenizer, shortcuts, task) -> None:
    names = ["own_next_word", "own_writing"]
    expected = run(model, tokenizer, task, names)
    never = {"policy": TopProbability(1.0), "exit_layers": [1, 2]}
    for fast in (
        speculate(model, "none"),
        speculate(model),
        early_exit(model, shortcuts, **never),
    ):
        found = run(fast, tokenizer, task, names)
        for name, metric in (("own_next_word", "acc,none"), ("own_writing", "exact_match,none")):
            score, own = (each["results"][name][metric] for each in (found, expected))
            assert score == pytest.approx(own)
        assert answers(found, "own_writing") == answers(expected, "own_writing")
        scores = [torch.tensor(answers(each, "own_next_word")) for each in (found, expected)]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_exits_count(model, tokenizer, shortcuts, task) -> None:
    from deepenough.decoding.evaluation import evaluate

    options = {"policy": FixedLayer(1), "exit_layers": [1], "kv_propagation": "copy"}
    fast = early_exit(model, shortcuts, **options)
    found = evaluate(fast, tokenizer, ["own_next_word"], str(task), 4, bootstrap_iters=0)
    scores = found["own_next_word"]
    assert 0 <= scores["acc,none"] <= 1
    # Only the first of six or seven positions runs through all three layers.
    assert 1 < scores["mean_layers"] < 1.6
    other = run(fast, tokenizer, task, ["own_next_word"])
    assert answers(other, "own_next_word") != answers(
        run(model, tokenizer, task, ["own_next_word"]), "own_next_word"
    )
