# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ZOO := build/zoo-venv

# Each process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# What a machine with torch, NumPy, numba and no network lacks: the other dependencies, and what they
# need. GPU_MORE names further ones: numba with llvmlite is five times as large as all the rest.
GPU_WHEELS := cloudpickle docstring_parser lmdb markdown-it-py mdurl pillow plyvel protobuf \
	Pygments redis rich simplejpeg tomli_w typeguard typing_extensions tyro
GPU_MORE :=
# pip takes a wheel for exactly these names.
GPU_PLATFORMS := manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1
GPU_OPTIONS ?= --json build/gpu.json

.PHONY: setup demo test test-zoo lint types nixl trackers bench site test-gpu gpu-wheels clean help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

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

test-zoo: $(ZOO)/.installed ## The tests of models of other packages; installs some 5 GB in build/
	$(ZOO)/bin/pytest tests/zoo

# torchvision and timm can't be imported beside torch's CPU wheel, but without a GPU they can.
$(ZOO)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/pip install --quiet 'torch===2.13.0' 'torchvision==0.28.0'
	$(ZOO)/bin/pip install --quiet --editable '.[torchvision,timm,hf,safetensors]' \
		hypothesis psutil pytest pytest-timeout
	@touch $(ZOO)/.installed

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
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/checkpoint.py

site: setup ## The documents as a site with search, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test-gpu: ## Correctness and speed on a GPU, in under five minutes
	@mkdir -p build
	@if [ -d gpu-wheels ] && $(PYTHON) -c 'import torch' 2>/dev/null; then \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade \
			--target build/gpu-site gpu-wheels/*.whl && \
		PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-site \
			$(PYTHON) benchmarks/gpu.py $(GPU_OPTIONS); \
	else \
		$(MAKE) setup && $(BIN)/python benchmarks/gpu.py $(GPU_OPTIONS); \
	fi

gpu-wheels: setup ## Collect what `make test-gpu` needs on a machine without a network
	rm -rf gpu-wheels
	$(BIN)/pip download --quiet --dest gpu-wheels --no-deps --only-binary=:all: \
		--python-version 3.12 --implementation cp $(GPU_PLATFORMS:%=--platform %_x86_64) \
		$$(for name in $(GPU_WHEELS) $(GPU_MORE); do grep "^$$name==" constraints.txt; done)
	$(BIN)/pip wheel --quiet --wheel-dir gpu-wheels --no-deps .  # for its version: this folder is first

clean: ## Remove what make made, but not the runs
	rm -rf demo-data gpu-wheels $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
