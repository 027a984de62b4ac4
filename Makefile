# `make demo` and `make test` set themselves up: the virtual environment is made once and reused.
#
#   make setup                     a virtual environment with the development and plotting extras
#   make setup EXTRAS=bench        adds extras (commas between several: EXTRAS=bench,cuda12)
#   make demo                      trains a TreeLSTM on generated trees, in under two minutes
#   make test                      the test suite: that of the CPU, that of the CUDA backend, and most of the first again
#                                  on an emulated GPU; PYTEST_ARGS="-k cell -x" runs a part of it
#   make lint                      format check, ruff and mypy
#   make bench                     the five-minute comparison with DyNet and PyTorch
#   make clean                     removes builds and caches, and leaves the virtual environment
#
# PYTHON is the interpreter that a new environment is made with, VENV where it lies. An environment that works is
# kept as it is: to change its interpreter, remove it first.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
PYTEST_ARGS ?= -n auto
DEMO_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup

.PHONY: setup demo test lint bench clean

setup: $(STAMP) $(if $(EXTRAS),$(STAMP)-$(EXTRAS)) $(STAMP)-compiled

$(STAMP): setup.cfg pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	DYNBATCH_PURE=1 $(BIN)/python -m pip install --quiet --editable '.[dev,plot]'
	touch $@

# pip above leaves compiling to this: it then happens once, and again only where a source has changed.
$(STAMP)-compiled: $(STAMP) setup.py $(wildcard dynbatch/*.p* dynbatch/ops/record.p* dynbatch/functions/*.p*)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# One stamp per set of extras. They are added to the environment, never taken out of it.
$(STAMP)-%: $(STAMP)
	DYNBATCH_PURE=1 $(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@

demo: setup
	$(BIN)/python -m models.treelstm --demo $(DEMO_ARGS)

# One thread for each of pytest's processes: threads of BLAS that outnumber the cores wait for one another.
test: export OMP_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: export DYNBATCH_THREADS = 1
test: setup
	$(BIN)/python -m pytest tests --ignore=tests/cuda $(PYTEST_ARGS)
	$(BIN)/python -m tests.on_device $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy dynbatch/

bench: setup $(STAMP)-bench
	$(BIN)/python -m bench $(BENCH_ARGS)

clean:
	rm -f $(STAMP)-compiled
	find dynbatch -name '*.so' -delete -o -name 'compiled.*.txt' -delete
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
