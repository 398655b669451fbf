# Two commands: `make run` does the main job on the default model, `make test` runs the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGE := $(VENV)/.package
DEV := $(VENV)/.dev

.PHONY: help run test check format clean

help:
	@echo "make run     plain and speculative decoding side by side on the default model"
	@echo "make test    all tests"
	@echo "make check   format, lint, types, import contract, layout"
	@echo "make format  format and fix what can be fixed"

run: $(PACKAGE)
	@$(BIN)/outrider pull smollm2 >/dev/null
	@$(BIN)/outrider demo smollm2

test: $(DEV)
	@$(BIN)/outrider pull smollm2 >/dev/null
	$(BIN)/python -m pytest -n auto --dist loadfile --durations 10

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_layout

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@echo "== creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(PACKAGE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing outrider and what it needs (a minute or two the first time)"
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(PACKAGE)
	@echo "== installing the development tools"
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
