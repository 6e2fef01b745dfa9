# `make demo` and `make test` each set up .venv and need nothing else. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-device test-kernels fuzz lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/digits_vit/demo.py

test: $(VENV)/test.stamp $(VENV)/triton.stamp lint
	$(BIN)/python -m pytest -n 2

# Every case of every CUDA kernel on the emulated GPU, and each kernel compiled for each architecture where nvcc is
# there; `make test` runs a sample of both. The last lines say how many cases passed.
KERNEL_TESTS := $(addprefix tests/plugins/test_,emulation.py gemm_kernels.py attention_kernels.py block.py block_persistent.py)
test-kernels: $(VENV)/test.stamp
	TRTFORGE_ALL_KERNEL_TESTS=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)

# The tests run 200 damaged inputs; FUZZ_SEED=2 make fuzz runs another series.
fuzz: $(VENV)/test.stamp
	FUZZ_COUNT=2000 $(BIN)/python -m pytest -n 2 tests/fuzz

# On a GPU machine, which may be bare and offline: PYTHON has numpy, cupy and torch, nvcc is on PATH. Nothing is
# installed. The same command goes on with a run that was interrupted.
RESULTS ?= benchmarks/results/device.jsonl
MINUTES ?= 8
test-device:
	$(PYTHON) tests/device/run_on_gpu.py $(RESULTS) --minutes $(MINUTES)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trtforge needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[rtx]'
	touch $@

# torch first, in the release that the export extra's range admits: alone it is the smaller build where there is one.
$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[rtx,examples,export,serving,dev]'
	touch $@

# Triton Inference Server, in an environment of its own; with Python 3.13 it takes 3.12 or 3.11 from PATH. What is there
# already and has the same packages is left.
$(VENV)/triton.stamp: trtforge/serving/triton/install.py $(VENV)/test.stamp
	$(BIN)/trtforge triton install --dir $(VENV)/triton
	touch $@
