# make serve   a virtual environment, the default model, and a server on port 5000   (MODEL=..., ARGS="--port 8000")
# make test    everything the tests need, and all of them                            (ARGS="-k registry")
# make lint    what CI checks besides the tests
# make clean   removes what the others made here; models stay in their own folder

PYTHON ?= python3
MODEL ?= smollm2
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev

.PHONY: serve test lint clean

serve: $(RUNTIME)
	$(PY) torchchat.py server $(MODEL) $(ARGS)

test: $(DEV)
	$(PY) torchchat.py download smollm2
	$(PY) -m pytest $(ARGS)

lint: $(DEV)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A new environment's pip may be years old. torch comes first and alone, so that nothing else decides which build it is.
$(RUNTIME): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "$(PYTHON) can't make virtual environments (on Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV) (torch is the large one) ..."
	@$(PIP) install --upgrade pip
	@$(PIP) install "$$(grep '^torch==' requirements.txt)"
	@$(PIP) install -r requirements.txt
	@touch $@

$(DEV): requirements-dev.txt $(RUNTIME)
	@$(PIP) install -r requirements-dev.txt
	@touch $@
