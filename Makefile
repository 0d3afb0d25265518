# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The demo observes this very environment, so it needs what a person who trains has: torch and transformers.
$(VENV)/.observed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[observed]'
	touch $@

demo: $(VENV)/.observed ## check the 27B example, for this machine and for an H100
	$(BIN)/python tools/demo.py

test: $(VENV)/.installed lint ## everything that needs no Docker engine, GPU or browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not thorough'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache dist build

.PHONY: bench-check
bench-check: $(VENV)/.observed ## how long a static check takes, beside `transformers env` and importing torch
	$(BIN)/python benchmarks/check.py --json benchmarks/results/check.json
