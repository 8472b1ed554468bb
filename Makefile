# make train   set up, then train the default agent and show it learning
# make test    set up, then lint, types, the images that tests need, and every test this machine can run
#              AGENTGYM_TEST_ALL=1: on all of the real data, and with every kill, where samples are taken otherwise
# make bench   the quick form of every benchmark, one after another, in some minutes (ARGS: names of some)
# make images  build all images of sandboxes, for Docker too if an engine answers; quick where they are there
# make pictures   draw docs/pictures again, in a real Chromium (some minutes: it trains)
# make docs    build the documentation site into site/, which needs no web server
# make lint, make format, make clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup train test bench test-images images pictures docs lint format clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(VENV)/.installed

$(VENV)/.installed: constraints.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

train: setup
	$(BIN)/agent-train +env=frozen_lake $(ARGS)

test: setup lint test-images
	$(BIN)/python -m pytest $(ARGS)

test-images: setup
	$(BIN)/agentgym sandbox build python sql search swe || echo "make: tests that need these images will be skipped"

bench: setup
	$(BIN)/python benchmarks/quick.py $(ARGS)

images: setup
	$(BIN)/agentgym sandbox build

pictures: setup
	AGENTGYM_NEED_BROWSER=1 AGENTGYM_PICTURES=docs/pictures $(BIN)/python -m pytest --timeout 3000 \
	  tests/agentgym/viewer/test_viewer_page_pictures.py $(ARGS)

# Not --quiet: what is not told does not fail a strict build.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "make: open site/index.html, or see your changes at once: $(BIN)/mkdocs serve"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
