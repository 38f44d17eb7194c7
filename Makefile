# `make demo` and `make test` do everything on a fresh machine with Python 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/asyncrl train recipes/arithmetic/quickstart.yaml

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# torch first and alone: with a version pinned it is the CPU build, left to another package's range it is several GB of CUDA.
$(VENV)/.installed: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,wandb]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
