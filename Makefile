# The first target that needs .venv creates it, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint
# A second environment has another torch: the newest that the project supports, or TORCH=2.11.0.
TORCH := 2.14.1
OTHER := .venv-torch-$(TORCH)

.PHONY: train test test-fast test-slow test-torch check docs clean

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

test-slow: .venv/installed-dev  ## slow tests; numeric tests with other CPU kernels and torch
	$(BIN)/python -m pytest -m slow
	$(OLD_KERNELS) $(BIN)/python -m pytest -m "numeric and not slow"
	$(AVX2_KERNELS) $(BIN)/python -m pytest -m "numeric and not slow"
	$(MAKE) test-torch

test-torch: $(OTHER)/installed  ## numeric tests with the newest torch, or with TORCH=2.11.0
	$(OTHER)/bin/python -m pytest -m "numeric and not slow"

check: .venv/installed-dev docs  ## lint, format, types, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs: .venv-docs/installed  ## build the documentation in site/; warnings are errors
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

clean:  ## remove what the other targets made
	rm -rf .venv .venv-docs .venv-torch-* data runs build site *.egg-info

data/stdlib/meta.json: | .venv/installed
	rm -rf data/stdlib
	$(BIN)/olmo-shard prepare --stdlib --train-bpe 8192 --out data/stdlib

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python $(PIP_INSTALL) constraints.txt --editable '.[dev,data]'
	touch $@

# torch pins the versions of Triton and of NVIDIA's packages; all others are those of .venv.
$(OTHER)/installed: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|triton|nvidia-|nvshmem)' constraints.txt >$(OTHER)/constraints.txt
	echo torch==$(TORCH) >>$(OTHER)/constraints.txt
	$(OTHER)/bin/python $(PIP_INSTALL) $(OTHER)/constraints.txt --editable '.[dev,data]'
	touch $@

# The tools of the documentation have an environment of their own: it needs no torch.
.venv-docs/installed: docs/requirements.txt constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement docs/requirements.txt
	touch $@
