# Everything a newcomer needs is here; `make` alone lists it. Each target does its own set-up.

VENV ?= .venv
PYTHON ?=
TORCH ?=
TORCH_INDEX ?=
TESTS ?=
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-compat test-sycl lint format clean distclean

override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin
SOURCES := $(wildcard optimus data_prep kernels tests scripts)

help: ## List these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14
	@echo
	@echo 'make test TESTS=tests/model     run some of the tests; WORKERS=0: in one process'
	@echo 'make demo TORCH_INDEX=URL       another build of torch; README, "Choosing torch"'

setup: ## Make or refresh the virtual environment (every target below does so by itself)
	@VENV='$(VENV)' PYTHON='$(PYTHON)' TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' scripts/setup.sh

demo: setup ## Train a small Mixture-of-Experts on real text, on the CPU, in minutes
	PATH='$(BIN)':"$$PATH" scripts/demo.sh

test: setup ## Run the tests (TESTS=path for some of them)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

test-compat: ## Run the tests on the oldest stack, torch 2.8 with Intel's extension (8 GB of packages)
	@VENV='$(VENV)-compat' PYTHON='$(PYTHON)' TESTS='$(TESTS)' scripts/test_compat.sh

test-sycl: setup ## Run the SYCL kernels on the CPU through Intel's compiler (1.5 GB more)
	$(BIN)/python -m pip install --quiet -c constraints.txt intel-sycl-rt intel-opencl-rt
	$(BIN)/python -m pytest tests/kernels/test_sycl.py

lint: setup ## Check style, formatting, types and language
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python scripts/language.py

format: setup ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix --exit-zero $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## Remove caches
	find . -name .venv\* -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache build optimus.egg-info

distclean: clean ## Remove the checkout's own virtual environment too
	rm -rf .venv .venv.lock
