# Everything from a bare checkout: each target makes what it needs, and a second call starts at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest   # two tests at a time: one thread each, or they wait for each other

.PHONY: demo test test-slow test-faults test-data lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/core          ## train a digit generator and show it: runs/digits/report.html
	$(BIN)/ict train digits --overwrite
	$(BIN)/ict sample runs/digits --count 80 --columns 10 --steps 1 --out runs/digits/one-step.png
	$(BIN)/ict sample runs/digits --count 80 --columns 10 --steps 2 --out runs/digits/two-steps.png
	$(BIN)/ict eval runs/digits --steps 1,2 --samples 2000
	@echo "Open runs/digits/report.html in a browser."

test: $(VENV)/dev           ## the fast tests
	$(PYTEST) -n 2

WHICH ?= slow
test-slow: $(VENV)/dev      ## trains the digits, and every method; makes every known mistake on purpose
	$(PYTEST) -m "$(WHICH)" -n 2 --dist loadfile -rP

test-faults: $(VENV)/dev    ## kills runs, damages checkpoints, fills disks, loses ranks (10 minutes on two cores)
	$(PYTEST) -m faults -n 2 -rP tests/faults

test-data: $(VENV)/dev      ## with the real CIFAR-10 and Inception: make test-data CIFAR10=folder INCEPTION=file
	ICT_CIFAR10=$(CIFAR10) ICT_INCEPTION=$(INCEPTION) $(if $(LPIPS),ICT_LPIPS=$(LPIPS)) $(BIN)/pytest -rP -k the_real \
	  tests/data/test_cifar10.py tests/evaluation tests/test_lpips.py

lint: $(VENV)/dev           ## style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) dist

# Stamps, so that a half-made environment is made again: one for the environment, one for what running needs, one for
# what developing needs. The constraints also hold for what builds the package.
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ict needs Python 3.11 or newer; point to one with: make PYTHON=/path/to/python3.12 ..."; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/core: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) -e '.[dev]'
	@touch $@
