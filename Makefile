# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One thread per process: four workers share the cores of one machine.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, which would each compile the package where the environment forbids bytecode.
export PYTHONDONTWRITEBYTECODE :=
# Code that is checked and formatted.
CODE := src tests benchmarks thin_gpt examples reproductions tools conftest.py
# Tests that run side by side. Half of their time is waiting, so there are more of them than cores.
JOBS   ?= 4

.PHONY: demo test core test-all matrix gpu coverage check lint types layout format bench race reproduce docs dist clean help
help:            ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

$(VENV)/ok: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all,tune]" --group dev
	@touch $@

demo: $(VENV)/ok  ## a language model over an emulated 100 Mbit link, several strategies side by side
	$(BIN)/thinwire demo

# A sample of the tests: none that is slow, and CASES cases of each grid. `make test-all` runs all of them.
CASES  ?= 2

test: $(VENV)/ok lint core  ## set-up, format, lint and a sample of the tests

# Many tests start processes that share two cores. What has failed is run once more, alone, and must pass then. Failures
# of earlier runs are forgotten first, since they would be run in place of tests that could not be collected.
core: $(VENV)/ok
	$(BIN)/python -m pytest --cache-clear -n $(JOBS) --dist worksteal -m "not slow" --cases $(CASES) --durations=10 || \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not slow" -v

test-all: $(VENV)/ok check  ## set-up, checks and all tests, those of reproductions and of the site too
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests reproductions

matrix: $(VENV)/ok  ## the core tests on each Python that is installed, with the oldest, pinned and newest torch. ONLY='3.13'
	$(BIN)/python tools/matrix.py $(if $(ONLY),--only '$(ONLY)')

gpu: $(VENV)/ok  ## all that needs a GPU, in eight minutes: tests, then figures in gpu-results
	$(BIN)/python -m benchmarks.gpu

coverage: $(VENV)/ok  ## the tests, and which lines and branches they reach; takes longer
	$(BIN)/python -m pytest --cov --cov-report=term

check: $(VENV)/ok lint ## format, lint, types, architecture
	@$(MAKE) --no-print-directory --output-sync=target -j 2 types layout

lint: $(VENV)/ok
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/python tools/spdx.py --check

types: $(VENV)/ok
	$(BIN)/pyright --pythonpath $(BIN)/python

layout: $(VENV)/ok
	$(BIN)/python -m pytest tests/test_architecture.py -p no:randomly --no-cov

format: $(VENV)/ok  ## let ruff write
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/python tools/spdx.py
	$(BIN)/python tools/write_stub.py

bench: $(VENV)/ok  ## speeds against DDP in the same run, five minutes; python -m benchmarks --all has the other bars
	$(BIN)/python -m benchmarks

race: $(VENV)/ok  ## the race, whole; hours, and goes on where it was stopped. ONLY='100mbit/4/*' runs a part of it
	$(BIN)/python -m benchmarks.race all $(if $(ONLY),--only '$(ONLY)')

reproduce: $(VENV)/ok  ## the papers' claims at the scale of one machine
	$(BIN)/python -m reproductions

docs: $(VENV)/ok  ## the site, in docs/_build/html
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

dist: $(VENV)/ok  ## wheel and source distribution, in dist; each is installed in a clean environment and used
	rm -rf dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/smoke.py dist

clean:           ## remove what the commands made
	rm -rf $(VENV) .matrix docs/_build dist .pytest_cache .ruff_cache .coverage runs
