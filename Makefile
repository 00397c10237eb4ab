# Everything runs inside .venv, which these targets make and fill; nothing outside this folder changes.
# Another interpreter: make PYTHON=python3.12 test.  More arguments: make test ARGS="-k window".

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamp carries the checkout's path: a virtual environment that was moved or copied along is filled anew, else it
# would go on running the code of the old place.
STAMP := $(VENV)/.installed-$(shell printf '%s' "$(CURDIR)" | cksum | cut -d' ' -f1)
UNFINISHED := $(VENV)/.unfinished
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help venv quickstart smollm2 test test-slow lint format types readme check clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv and install the package with its development tools

quickstart: $(STAMP) ## Train the built-in tiny model to decode in parallel and show what it gained
	$(BIN)/jforce quickstart $(ARGS)

smollm2: $(STAMP) ## Fetch SmolLM2-135M-Instruct and measure it with the adapter that ships for it
	$(BIN)/python scripts/fetch_smollm2.py runs/smollm2-base
	$(BIN)/jforce bench --model runs/smollm2-base --adapter models/smollm2-orders --pack-weights --prompts builtin:orders \
		--limit 8 --max-new-tokens 96 --decoder window --block-size 8 $(ARGS)

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)

test-slow: $(STAMP) ## Run the tests that are too slow for every day
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP) ## Check style and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP) ## Mend style and formatting where it can be done by machine
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(STAMP) ## Check types
	$(BIN)/python -m mypy

readme: $(STAMP) ## Run the commands that README.md shows
	$(BIN)/python scripts/check_readme.py

check: lint types readme test ## All of the above, as CI does

clean: ## Remove .venv, caches and build results (never runs/)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last. An install that was interrupted may have left half a package behind, so it is begun anew, as is
# an environment that does not run (half made, or its interpreter is gone).
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the path. Install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.11 or newer is needed. Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@rm -f $(VENV)/.installed-*
	@{ test ! -e $(UNFINISHED) && $(BIN)/python -c '$(SUPPORTED)' && $(BIN)/python -m pip --version; } >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $(UNFINISHED)
	@echo "Installing into $(VENV); the first time this takes a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm $(UNFINISHED)
	@touch $@
