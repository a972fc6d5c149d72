# make train     from nothing to a small trained model and a sample of it, on the CPU, in minutes
# make test      the quick tests; make test-all: every test; make lint: ruff
# The first of them makes the virtual environment. Another interpreter: make train PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
# the markers in pyproject.toml leave `hopper` out where it is not Linux on x86-64
INSTALL = $(VENV)/bin/python -m pip install -q -c constraints.txt

.PHONY: train test test-all lint
.DELETE_ON_ERROR:

train: $(VENV)/.train data/pysrc/train.bin
	$(VENV)/bin/python train.py configs/quickstart.py
	$(VENV)/bin/python sample.py --out_dir=out/quickstart --num_samples=2 \
		--start="$$(printf 'import os\n\nclass Path:\n    def ')"

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m "not slow"

test-all: $(VENV)/.test
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

data/pysrc/train.bin: | $(VENV)/.train
	$(VENV)/bin/python data/pysrc/prepare.py --max_document 1023

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing PyTorch and the rest into $(VENV): 2.4 GB, 3 GB more with a CUDA build of PyTorch"
	$(INSTALL) -e '.[hopper]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.train
	$(INSTALL) -e '.[hopper,test]'
	@touch $@

# bin/pip is the last thing that venv makes
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
		f"$(PYTHON) is Python {v}; nanoMSA needs 3.11 or newer: make ... PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
