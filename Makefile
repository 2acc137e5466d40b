# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint types nixl trackers bench clean help

help: ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP) ## Make .venv with Paceline, its commands and the development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit("Paceline needs Python 3.11 or 3.12, and this is %d.%d: make PYTHON=python3.11 …" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	@touch $(STAMP)

demo: setup ## Train a small ResNet on real images with two workers and show the result
	$(BIN)/python examples/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

test: lint types ## Lint, types and all tests
	$(BIN)/python -m tests.harness.compile_kernels
	$(BIN)/pytest -p tests.harness.processor_seconds -m 'not alone' \
		--numprocesses logical --maxprocesses 4 --dist worksteal
	$(BIN)/pytest -m alone

nixl: setup ## The suites of windows over NIXL as well; installs some 400 MB more
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[nixl]'
	$(BIN)/pytest tests/contract tests/process/test_window.py -k 'nixl or NIXL'

trackers: setup ## The tests of W&B and MLflow as well; installs some 200 MB more
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[wandb,mlflow]'
	$(BIN)/pytest tests/unit/test_tracker_wandb.py tests/unit/test_tracker_mlflow.py

bench: setup ## The benchmarks that need no network namespaces
	$(BIN)/python benchmarks/input.py
	$(BIN)/python benchmarks/wires.py
	$(BIN)/python benchmarks/step.py --links loopback
	$(BIN)/python benchmarks/checkpoint.py

clean: ## Remove what make made, but not the runs
	rm -rf demo-data $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
