# Shorthands. What they run works alone too.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Images forbid to keep compiled code: then each peer that a test starts, and each worker, compiles
# the project again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all explore lint lint-style lint-types lint-darwin lint-imports next-python \
	reference install browser screenshot clean

demo: .venv/runs
	$(BIN)/swarmnet local

test: .venv/installed
	$(BIN)/pytest -n auto --dist loadgroup --max-worker-restart 0 -m 'not processes and not long' --durations=10
	$(BIN)/pytest -n 3 --dist worksteal --max-worker-restart 0 -m 'processes and not long' --durations=10

# Those that are marked `long` too; leaves tests/every/last.json, to be committed.
test-all: test
	$(BIN)/python -m tests.every run

# The update of a shard through every order of events of deep worlds, and random schedules.
explore: .venv/installed
	$(BIN)/python -m tests.protocol.update.explorer.deep 50000

# Each takes one core: `make -j lint` runs them beside each other.
lint: lint-types lint-darwin lint-style lint-imports

lint-style: .venv/installed
	$(BIN)/ruff check && $(BIN)/ruff format --check

lint-types: .venv/installed
	$(BIN)/mypy

# What macOS does not have is used by nobody without a look.
lint-darwin: .venv/installed
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

lint-imports: .venv/installed
	$(BIN)/lint-imports

next-python: .venv/installed
	.ci/next-python

# docs/reference/, from the code.
reference: .venv/installed
	$(BIN)/python -m tests.reference

install: .venv/installed

# py-libp2p comes without its own requirements, of which one has to be compiled
# (docs/decisions/0016-py-libp2p-without-its-pins.md). The package `swarmnet` of PyPI is another one.
.venv/runs: pyproject.toml constraints.txt
	@echo "swarmnet: what comes takes 1.3 GB with torch for CPUs (make demo TORCH=cpu), and gigabytes more with the libraries of CUDA"
	.ci/make-venv $(PYTHON) .venv
	$(BIN)/pip -qq uninstall --yes swarmnet
	$(BIN)/pip install --no-compile $(if $(TORCH),--extra-index-url https://download.pytorch.org/whl/$(TORCH)) -c constraints.txt -e .
	$(BIN)/pip install --no-compile -c constraints.txt --no-deps libp2p
	touch .venv/runs

# With what tests and linters need.
.venv/installed: .venv/runs
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev]'
	touch .venv/installed

# Chromium, for the tests of the web page; nothing where there is one.
browser:
	.ci/install-browser

screenshot: .venv/installed browser
	SWARMNET_SCREENSHOT=docs/images/dashboard.png $(BIN)/pytest tests/dashboard/test_page.py -k real_swarm

clean:
	rm -rf .venv build *.egg-info
