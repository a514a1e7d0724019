# make help | train | test | lint | build | clean
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?= model=deepfm data=criteo
TESTARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
REQUIREMENTS := requirements/$(DEVICE).txt
TORCH = $(shell grep -o '^torch==[^ ;]*' $(REQUIREMENTS))

# What a build depends on. Python sources do not count: the installation is editable.
NATIVE := pyproject.toml $(wildcard CMakeLists.txt) $(shell find csrc cmake -type f 2>/dev/null)
CXX_SOURCES = $(shell find csrc tests -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) 2>/dev/null)

# Each stamp says that its step is done; a step runs again when what it was made from has changed.
MADE := $(VENV)/.made
INSTALLED := $(VENV)/.installed-$(DEVICE)
BUILT := $(VENV)/.built
DEV := $(VENV)/.dev

.PHONY: help train test lint format build build-cuda clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

train: $(BUILT) ## train DeepFM on Criteo; ARGS="model=dcn data=criteo trainer.max_epochs=2" for anything else
	@$(BIN)/python train.py $(ARGS)

test: $(BUILT) $(DEV) ## run the tests; TESTARGS="-k cli" to choose
	@$(BIN)/python -m pytest $(TESTARGS)

lint: $(BUILT) $(DEV) ## ruff, mypy, clang-format: report, change nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))

format: $(DEV) ## let ruff and clang-format rewrite the sources
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

build: $(BUILT) ## set up .venv and build the native code

build-cuda: $(BUILT) ## compile the CUDA half too, where nvcc is; no GPU needed
	@$(BIN)/cmake -S . -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DHETREC_CUDA=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	@$(BIN)/cmake --build build/cuda

clean: ## remove the build and .venv; data/ and runs/ stay
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: hetrec needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@touch $@

# torch comes first and with its own needs, the rest without resolving: requirements/cpu.txt says why.
$(INSTALLED): $(MADE) $(REQUIREMENTS)
	@echo "installing $(REQUIREMENTS) (a few minutes the first time)"
	@$(PIP) install -c $(REQUIREMENTS) $(TORCH)
	@$(PIP) install --no-deps -r $(REQUIREMENTS)
	@touch $@

$(DEV): $(INSTALLED) requirements/dev.txt
	@echo "installing requirements/dev.txt"
	@$(PIP) install --no-deps -r requirements/dev.txt
	@touch $@

$(BUILT): $(INSTALLED) $(NATIVE)
	@command -v $${CXX:-c++} >/dev/null || { \
	  echo "error: no C++ compiler ($${CXX:-c++}); on Debian and Ubuntu: apt install g++" >&2; exit 1; }
	@echo "building the native code"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@
