# Two commands: `make run` does the main job on the default model, `make test` runs the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD := $(VENV)/.build-tools
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

# The build tools go into the environment itself: the extension is then rebuilt only where its sources changed.
$(BUILD): | $(VENV)/bin/python
	@echo "== installing the build tools"
	@$(PIP) install --quiet --constraint constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

$(PACKAGE): pyproject.toml constraints.txt $(wildcard native/*) $(BUILD)
	@echo "== installing outrider and what it needs, and building its C++ part (a few minutes the first time)"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[grammar,serve]"
	@touch $@

$(DEV): $(PACKAGE)
	@echo "== installing the development tools"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[serve,dev]"
	@touch $@
