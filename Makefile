# Everything sets itself up: the first target that needs it makes .venv with pinned versions.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test check clean

train: .venv/installed data/stdlib/meta.json  ## train the demo on two local ranks
	rm -rf runs/tiny
	$(BIN)/olmo-shard train configs/tiny.yaml --nproc 2

test: .venv/installed-dev  ## all tests
	$(BIN)/python -m pytest

check: .venv/installed-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

clean:  ## remove what the other targets made
	rm -rf .venv data runs build *.egg-info

data/stdlib/meta.json: | .venv/installed
	rm -rf data/stdlib
	$(BIN)/olmo-shard prepare --stdlib --train-bpe 8192 --out data/stdlib

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed: make PYTHON=python3.11'"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev,data]'
	touch $@
