# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-engine test-slurm test-train demo-train lint format clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	# Where PYTHONDONTWRITEBYTECODE is set, an editable install would be compiled anew by every command.
	$(BIN)/python -m compileall -q src
	touch $@

# The demo observes this very environment, so it needs what a person who trains has: torch and transformers.
$(VENV)/.observed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[observed]'
	touch $@

demo: $(VENV)/.observed ## check the 27B example, for this machine and for an H100
	$(BIN)/python tools/demo.py

test: $(VENV)/.installed lint ## everything that needs no Docker engine, GPU or browser
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not thorough and not browser and not engine and not slurm'

test-engine: $(VENV)/.installed ## images built, refused and promoted by a Docker engine: .ci/engine.sh make test-engine
	$(BIN)/python -m pytest -m engine

test-slurm: $(VENV)/.installed ## a guarded launch and the prolog on two nodes of a real Slurm: apt-get install slurm-wlm munge
	$(BIN)/python -m pytest -m slurm

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The trainer stands alone, so it is tested in an environment that has torch and nothing of kernelguard.
TRAIN := .venv-train
$(TRAIN)/.installed: train/pyproject.toml
	test -x $(TRAIN)/bin/python || $(PYTHON) -m venv $(TRAIN)
	$(TRAIN)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 --editable './train[test]'
	$(TRAIN)/bin/python -m compileall -q train
	touch $@

test-train: $(TRAIN)/.installed ## the trainer on the CPU, one and two real ranks
	OMP_NUM_THREADS=1 $(TRAIN)/bin/python -m pytest tests/train

demo-train: $(TRAIN)/.installed ## two CPU ranks train a tiny Qwen3.5, about a minute
	rm -rf runs/demo-train
	$(TRAIN)/bin/python -m kernelguard_train.demo.make runs/demo-train/tiny
	OMP_NUM_THREADS=1 $(TRAIN)/bin/torchrun --nproc-per-node 2 -m kernelguard_train train/kernelguard_train/demo/demo.toml

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(TRAIN) .cache dist build

.PHONY: docs
$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs ## the documentation site, in build/site; a broken link is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/site

.PHONY: bench-check
bench-check: $(VENV)/.observed ## how long a static check takes, beside `transformers env` and importing torch
	$(BIN)/python benchmarks/check.py --json benchmarks/results/check.json

.PHONY: bench-survey
bench-survey: $(VENV)/.observed ## how long reading every model type of transformers takes, with two processes
	$(BIN)/python benchmarks/survey.py --json benchmarks/results/survey.json
