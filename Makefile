# PYTHON makes a new environment; an existing one keeps its own.
PYTHON ?= python3
VENV ?= .venv
# Empty: the TensorFlow that the environment has, or 2.21.0 in a new one.
TF ?=
# For example: make test TESTS=tests/unit/test_buckets.py
TESTS ?=
# SLOW=1: with the tests that take long.
SLOW ?=

BIN := $(VENV)/bin

.PHONY: help setup train test lint format docs release-check clean

help:
	@echo "make setup   make the environment $(VENV): TensorFlow, Horovod, this package"
	@echo "make train   train examples/keras_mnist.py on two workers"
	@echo "make test    run all tests, or those named: make test TESTS=tests/unit"
	@echo "             make test SLOW=1 with the tests that take long"
	@echo "make lint    ruff, mypy and import-linter"
	@echo "make format  let ruff format the code"
	@echo "make docs    build the pages of docs/ into site/"
	@echo "make release-check   build the packages into dist/, and try the wheel in an empty environment"
	@echo "make clean   remove $(VENV) and what tools left behind"
	@echo "Settings: TF=2.15.1 VENV=.venv-tf215 PYTHON=python3.11"

setup:
	@$(PYTHON) scripts/setup_env.py --venv "$(VENV)" --tf "$(TF)"

train: setup
	$(BIN)/horovodrun -np 2 $(BIN)/python examples/keras_mnist.py

test: setup
	@$(BIN)/python scripts/run_tests.py $(if $(SLOW),--slow) $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hvd_compress
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: setup
	@$(BIN)/python -c "import material, mkdocstrings_handlers.python" 2> /dev/null \
		|| $(BIN)/python -m pip install -q -e ".[docs]"
	$(BIN)/mkdocs build --strict

# For example: make release-check TF=2.21.0 (it goes on to train with that TensorFlow).
release-check:
	@$(PYTHON) scripts/release_check.py --tf "$(TF)"

clean:
	[ ! -f "$(VENV)/hvd_compress.json" ] || rm -rf "$(VENV)"
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	rm -f hvd_compress/kernels/_native*.so
	find . -name __pycache__ -not -path "./.venv*" -prune -exec rm -rf {} +
