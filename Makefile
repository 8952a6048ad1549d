# Every target creates the environment, installs what it needs once, and acts.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install study test test-fast test-all lint format clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## the environment in .venv, from constraints.txt

# torch first and pinned: asked for in a range, an installer may take a build of several GB
$(STAMP): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing (once; again only when pyproject.toml or constraints.txt change)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

SCALE ?= small
study: $(STAMP)  ## the first study and its report: about 12 minutes on two cores (SCALE=smoke: one)
	@$(BIN)/lab run first --scale $(SCALE)

test: $(STAMP)  ## lint, types, and all tests but the long ones
	@echo "==> lint and types"
	@$(BIN)/ruff check lab plugins tests
	@$(BIN)/ruff format --check lab plugins tests
	@$(BIN)/mypy
	@echo "==> tests (all but the long ones)"
	@$(BIN)/python -m pytest -m "not long"

test-fast: $(STAMP)  ## the tests that take seconds
	@echo "==> fast tests"
	@$(BIN)/python -m pytest -m "not slow and not long"

test-all: $(STAMP)  ## every test
	@echo "==> all tests"
	@$(BIN)/python -m pytest

lint: $(STAMP)  ## ruff and mypy alone
	@$(BIN)/ruff check lab plugins tests
	@$(BIN)/ruff format --check lab plugins tests
	@$(BIN)/mypy

format: $(STAMP)  ## rewrite the code in its format
	@$(BIN)/ruff check --fix lab plugins tests
	@$(BIN)/ruff format lab plugins tests

clean:  ## remove the environment and caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
