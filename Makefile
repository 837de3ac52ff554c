# Everything runs in a virtual environment that the first target to need it creates.
PYTHON ?= python3
VENV ?= .venv
# Index of the torch build to use, for GPUs that need another than the default one.
TORCH_INDEX ?=
MODEL ?= tiny
DEVICES ?= 1
# Further options of the command line, such as ARGS="--model.optimizer.learning_rate 5e-5".
ARGS ?=
LOGDIR ?= runs
SWEEP ?= experiments/ablations/components.yaml
# What the report compares: run directories, or directories above them.
RUNS ?= $(LOGDIR)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread: the tests' tensors are small, and threads that wait for a busy core slow them down many times over.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup train-nova test test-fast lint format tensorboard sweep report bench rewards clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: $(STAMP) ## Create the virtual environment and install the package.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, %s is %s.%s; name another with PYTHON=" % ("$(PYTHON)", *sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes, about 6 GB with CUDA."
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[dev,experiments]'
	@touch $@

train-nova: $(STAMP) ## Train NOVA: MODEL=tiny (default, on a CPU) or MODEL=sd512 DEVICES=8.
	$(BIN)/margrpo fit --config experiments/nova-$(MODEL).yaml --trainer.devices $(DEVICES) $(ARGS)

test: $(STAMP) ## Run all tests.
	$(PYTEST)

test-fast: $(STAMP) ## Run the tests that take seconds.
	$(PYTEST) -m "not slow"

lint: $(STAMP) ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tensorboard: $(STAMP) ## Show the curves of all runs.
	$(BIN)/tensorboard --logdir $(LOGDIR)

sweep: $(STAMP) ## Run an ablation: SWEEP=experiments/ablations/….yaml, ARGS="--jobs 2", or "--dry-run" to list its runs.
	$(BIN)/python experiments/sweep.py $(SWEEP) $(ARGS)

report: $(STAMP) ## Compare runs: RUNS=runs/… gives one page, RUNS/report/index.html, and tables.
	$(BIN)/python experiments/report.py $(RUNS) $(ARGS)

bench: $(STAMP) ## Measure rollout and update against plain generation.
	$(BIN)/python experiments/bench.py

rewards: $(STAMP) ## Install what the published reward models need.
	$(PIP) --editable '.[rewards]'
	$(PIP) --no-deps hpsv2==1.2.0

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info build dist
