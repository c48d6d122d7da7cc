# Shorthands. What they run works alone too.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test lint install clean

demo: .venv/installed
	$(BIN)/swarmnet local

test: .venv/installed
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv && $(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch .venv/installed

clean:
	rm -rf .venv build *.egg-info
