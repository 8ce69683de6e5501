# Two commands a person needs: `make quickstart` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# A process for each core; a file stays in one, because its tests share what they have trained.
# Files are started in the order of collection (tests/conftest.py), not those with most tests first.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# Compiled once, not in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-gpu campaigns test-all check format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## build .venv with the pinned versions (nothing to do when it is up to date)

# Pins come from one file, so that every machine runs the versions the tests ran with.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bottega needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,data,audio,video,hub,plots,tune,wandb,jax]'
	@touch $@

quickstart: $(STAMP) ## train a small language model on this machine's CPU, about two minutes
	@$(BIN)/bottega train language

test: $(STAMP) ## the quick tests, about seven minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu'

test-gpu: $(STAMP) ## what needs a GPU: kernels, compiled models, fp16, exact resume of every task
	BOTTEGA_TEST_GPU=1 $(BIN)/python -m pytest -n 8 -m gpu

campaigns: $(STAMP) ## the long fault campaigns alone
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not gpu'

test-all: test campaigns ## the tests and the long fault campaigns

check: $(STAMP) ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and caches, never runs/
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build
