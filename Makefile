# One environment, .venv; a stamp file per set of extras, so that nothing is installed twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
SOURCES := pyproject.toml

.PHONY: help setup demo test lint types docs clean

help:
	@echo "make demo    install and run the whole tour on published training runs (1 to 3 minutes)"
	@echo "make setup   install into $(VENV)"
	@echo "make test    install with test extras and run the tests"
	@echo "make lint    ruff"
	@echo "make types   pyright"
	@echo "make docs    build the pages into site/"
	@echo "make clean   remove $(VENV) and build results"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python %d.%d is too old: diffperf needs 3.11 or newer. Try: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-base: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.stamp-%: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

setup: $(VENV)/.stamp-base

demo: setup
	$(BIN)/diffperf demo

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile  # a file's tests share what was compiled for them

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .

types: $(VENV)/.stamp-dev
	$(BIN)/pyright

docs: $(VENV)/.stamp-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site diffperf-demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
