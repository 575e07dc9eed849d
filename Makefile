# Each target is one line that a person could type. With VENV= the PYTHON given is used as it is,
# with what it has installed: `make test VENV= PYTHON=python3`.
VENV ?= .venv
PYTHON ?= python3
JOBS ?= $(shell nproc)
ARCH ?=
CUDA ?=
ifeq ($(VENV),)
PY := $(PYTHON)
else
BIN := $(VENV)/bin/
PY := $(BIN)python
READY := $(VENV)/.ready
endif
BUILD := $(PY) tools/dev_build.py --jobs $(JOBS)
REPO := org/sparse-delta-memory=$(CURDIR)
WORKERS ?= 2

.PHONY: demo test test-cuda-units build build-cuda variants lint bench gpu clean

# Waiting threads sleep: beside other programs, spinning ones make the demo several times slower.
demo: export OMP_WAIT_POLICY ?= passive
demo: build
	LOCAL_KERNELS="$(REPO)" $(PY) examples/byte_lm.py

test: build
	LOCAL_KERNELS="$(REPO)" $(PY) -m pytest -n $(WORKERS)

# Parts of the CUDA kernels by themselves, on a machine with a GPU and nvcc.
test-cuda-units: build
	LOCAL_KERNELS="$(REPO)" $(PY) -m pytest -s -n 0 tests/test_cuda_units.py

build: $(READY)
	$(BUILD)

build-cuda: $(READY)
	$(BUILD) --backend cuda $(ARCH:%=--arch %)

# Every variant with every CUDA version: hours. CUDA=12.8 ARCH=9.0 makes less of it.
variants: $(READY)
	$(PY) tools/build_variants.py --jobs $(JOBS) $(CUDA:%=--cuda %) $(ARCH:%=--arch %) --record _cmake_build/variants.json

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	git ls-files '*.h' '*.cuh' '*.cpp' '*.cu' | xargs $(BIN)clang-format --dry-run --Werror
	$(PY) tools/check_tree.py
	$(BUILD) --werror
	$(BUILD) --werror --std 20 --compile-only
	$(PY) tools/check_abi.py

bench: build
	LOCAL_KERNELS="$(REPO)" $(PY) benchmarks/measure.py

# Everything that needs a GPU, into one file of benchmarks/results: docs/performance.md.
gpu: $(READY)
	LOCAL_KERNELS="$(REPO)" $(PY) benchmarks/gpu.py $(GPU_OPTIONS)

clean:
	rm -rf build _cmake_build

$(VENV)/.ready: requirements.txt requirements-dev.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
