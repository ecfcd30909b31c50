# One set of commands for people and CI.
#
#   make demo     two workers serve a real model behind a router, and a long prompt arrives: read the report
#   make bench    prefill and decode speed, beside the servers that PEERS names
#   make up       the same cluster, in the foreground, until Ctrl-C
#   make test     the tests that need no GPU; each takes under 30 seconds
#   make test-all the slow ones too
#   make check    formatting, lint, types, import contracts
#
# MODEL=…         any Hugging Face id, folder or GGUF file; by default the demo model that a package brings along
# PEERS=…         for bench: --peer NAME=COMMAND, once for each other server of the same model
# PIP_ARGS=…      more arguments for pip, such as an index of CPU builds of torch

PYTHON ?= python3
MODEL ?= demo:gemma3-270m
PEERS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
SETUP := .venv/.setup-done
MANIFESTS := $(wildcard */pyproject.toml services/*/pyproject.toml) requirements-dev.txt constraints.txt
KERNELS := $(wildcard services/worker/native/*) services/worker/hatch_build.py

.PHONY: setup demo bench up test test-all check format clean

setup: $(SETUP)

$(SETUP): $(MANIFESTS) $(KERNELS)
	@start=$$(date +%s); \
	$(PYTHON) -m venv .venv && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt \
		--editable shared --editable services/router --editable 'services/worker[demo]' --editable loadtest \
		--requirement requirements-dev.txt && \
	touch $@ && echo "setup took $$(( $$(date +%s) - start )) s"

demo: $(SETUP)
	$(BIN)/stallfree-loadtest demo --model '$(MODEL)'

bench: $(SETUP)
	$(BIN)/stallfree-loadtest bench --model '$(MODEL)' $(PEERS)

up: $(SETUP)
	$(BIN)/stallfree-local --model '$(MODEL)' --dtype bfloat16

test: $(SETUP)
	@start=$$(date +%s); $(BIN)/python -m pytest $(PYTEST_ARGS); status=$$?; \
	echo "tests took $$(( $$(date +%s) - start )) s"; exit $$status

test-all: $(SETUP)
	@start=$$(date +%s); $(BIN)/python -m pytest -m 'not gpu' $(PYTEST_ARGS); status=$$?; \
	echo "tests took $$(( $$(date +%s) - start )) s"; exit $$status

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv
