# `make quickstart` and `make test` set up everything. They need Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One set of versions per Python. Newer versions exist for 3.12 and up.
TAG := $(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
CONSTRAINTS := constraints-$(TAG).txt
WORKERS ?= 2

.PHONY: help quickstart demo test parity check studies lint docs clean
help:
	@echo "make quickstart  set up, then one bad answer in, a clean adapter and a report out (a minute on 2 cores)"
	@echo "make demo        all strategies on a toy, side by side (about 4 minutes on 2 cores)"
	@echo "make test        set up, then lint, types and tests (5 to 9 minutes on 2 quiet cores)"
	@echo "make check       the heavy tests: parity with torch, kill tests, statistics, a browser, GPU programs (11 to 20 minutes)"
	@echo "make studies     make cells of the studies again and compare them with the stored results"
	@echo "make tables      write the tables of docs/studies again, from the stored results"
	@echo "make parity      only the comparisons with torch, transformers and peft"
	@echo "make gpu-check   compile every step of real models for one H100 and for eight, without a GPU"
	@echo "make docs        build the documentation into site/, with warnings as errors"

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python must be 3.11 or newer, this is %d.%d: set PYTHON=" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed-run: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[data,eval]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.installed-run

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,parity]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

# XLA's compiler for GPUs, without CUDA's libraries: it needs no GPU.
.venv-gpu: $(VENV)/.installed-run
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $@ \
	  $$($(BIN)/python -c 'from raslik_jax.run import gpus; print(*gpus.wheels())')
	@touch $@

.PHONY: gpu-check
gpu-check: .venv-gpu
	PYTHONPATH=.venv-gpu $(BIN)/python experiments/gpu/check.py

# Installs Debian's browser for the test of the report, if there is none and we may.
.PHONY: browser
browser:
	@if ! { command -v chromium || command -v chromium-browser; } >/dev/null || ! command -v chromedriver >/dev/null; then \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
	      || echo "chromium could not be installed: the test of the report in a browser will be skipped"; \
	  else echo "chromium and chromedriver are missing: the test of the report in a browser will be skipped"; fi; fi

quickstart: $(VENV)/.installed-run
	$(BIN)/raslik quickstart

demo: $(VENV)/.installed-run
	$(BIN)/python experiments/run.py --flagfile=experiments/flags/demo.flags

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/language_test.py
	$(BIN)/mypy

# Both run at once, because the types keep only one core busy.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j 2 lint tests-alone

.PHONY: tests-alone
tests-alone: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist worksteal

parity: $(VENV)/.installed-parity
	$(BIN)/python -m pytest -q -m "heavy or study" tests/parity

# Makes cells of the studies again and compares them with the stored results. It also runs the quickstart
# on several devices. It takes 17 processor minutes.
studies: $(VENV)/.installed-parity
	$(BIN)/python -m pytest -q -rs -m study tests experiments/studies -n $(WORKERS) --durations=15

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

check: $(VENV)/.installed-parity .venv-gpu browser docs
	$(BIN)/python -m pytest -q -rs -m heavy -n $(WORKERS) --dist worksteal --durations=15

# Records again the texts of the program that tests compare, and the sizes of the rooms in docs/house.md.
.PHONY: snapshots house tables
snapshots: $(VENV)/.installed-dev
	rm -rf tests/snapshots
	RASLIK_RECORD_SNAPSHOTS=1 $(BIN)/python -m pytest -q -m "" $$(grep -rlE "^(from|import) (snapshots|folders)" tests --include='*_test.py')

# Takes the pictures of the report's first screen that the documents show.
.PHONY: screenshots
screenshots: $(VENV)/.installed-parity browser
	$(BIN)/python docs/make_screenshots.py

house: $(VENV)/.installed-dev
	$(BIN)/python tests/house_test.py

# Writes the tables of the studies again, in docs/studies and next to the stored results.
tables: $(VENV)/.installed-dev
	$(BIN)/python experiments/studies/pages.py

# Writes the reference pages that follow from the code: flags, settings, models, public names.
.PHONY: reference
reference: $(VENV)/.installed-dev
	PYTHONPATH=. $(BIN)/python docs/make_reference.py

clean:
	rm -rf $(VENV) .venv-gpu build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
