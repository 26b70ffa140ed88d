# Everything sets itself up: the first target that needs it makes .venv with pinned versions.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-fast test-slow check docs clean

train: .venv/installed data/stdlib/meta.json  ## train the demo on two local ranks
	rm -rf runs/tiny
	$(BIN)/olmo-shard train configs/tiny.yaml --nproc 2

test: .venv/installed-dev  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-fast: .venv/installed-dev  ## tests that start no process: for the inner loop
	$(BIN)/python -m pytest -m fast

# The numeric tests run again with two other sets of CPU kernels, which add in other orders.
OLD_KERNELS := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
AVX2_KERNELS := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2

test-slow: .venv/installed-dev  ## slow tests, and numeric tests with other CPU kernels
	$(BIN)/python -m pytest -m slow
	$(OLD_KERNELS) $(BIN)/python -m pytest -m "numeric and not slow"
	$(AVX2_KERNELS) $(BIN)/python -m pytest -m "numeric and not slow"

check: .venv/installed-dev docs  ## lint, format, types, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs: .venv-docs/installed  ## build the documentation in site/; warnings are errors
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

clean:  ## remove what the other targets made
	rm -rf .venv .venv-docs data runs build site *.egg-info

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

# The tools of the documentation have an environment of their own: it needs no torch.
.venv-docs/installed: docs/requirements.txt constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement docs/requirements.txt
	touch $@
