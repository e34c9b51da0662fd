# Needs Python 3.11 or newer with pip; everything else is installed into .venv.

PYTHON ?= python3
PG ?= 18
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench bench-sweep clean

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1\t\2/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,embedded]'
	@touch $@

demo: $(READY)  ## a first workflow on a database of its own
	$(BIN)/python -m cyclone.demo $(ARGS)

test: $(READY)  ## the whole suite on PG=18 or 16, with ARGS for pytest
	CYCLONE_TEST_PG=$(PG) $(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## format, rules, types and floors, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)  ## format and sort
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## measure, with ARGS for the benchmark
	$(BIN)/python -m bench $(ARGS)

bench-sweep: $(READY)  ## which settings of a pool are the fastest here, with ARGS for the lists to try
	$(BIN)/python -m bench.sweep $(ARGS)

clean:  ## remove what was made
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .benchmarks
	find cyclone tests bench -name __pycache__ -prune -exec rm -rf {} +
