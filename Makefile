# `make demo` and `make test` do everything on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Python compiles what it imports, once: less than all that is installed, and not again in each process of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test check pytest pytest-fast docs bench wheels lint ruff types layers protos clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and what else is needed into $(VENV): about two minutes, 2 GB"
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot]' & \
	pip=$$!; seconds=0; while sleep 5; kill -0 $$pip 2>/dev/null; do seconds=$$((seconds + 5)); \
	  echo "  $$seconds s: $$(du -sm $(VENV) | cut -f1) MB"; done; wait $$pip
	touch $@

demo: install
	$(BIN)/python -m examples.demo

# Everything: lint beside all tests. See docs/tests.md.
test: install
	$(MAKE) --no-print-directory -j2 lint pytest

# For the inner loop: lint beside the tests that start no client processes and sweep through nothing.
check: install
	$(MAKE) --no-print-directory -j2 lint pytest-fast

pytest: install
	$(BIN)/python -m pytest --workers=auto

pytest-fast: install
	$(BIN)/python -m pytest --workers=auto -m "not processes and not slow"

# The documentation as a site, from docs/ and the docstrings; it refers to nothing outside.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built site/index.html; to search, too: $(BIN)/python -m http.server --directory site"

# Writes docs/benchmarks.md; figures mean something on a machine that does nothing else. QUICK=1: on less, in three minutes.
bench: install
	$(BIN)/python -m benchmarks.run $(if $(QUICK),--quick)

# For machines with a GPU and no network: benchmarks/gpu.sh installs them there. See docs/measuring.md.
GPU_PYTHON    := 3.12
GPU_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(GPU_PLATFORMS:%=--platform %) -c constraints.txt -r benchmarks/gpu_wheels.txt -d wheels

lint: ruff types layers

ruff: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

protos:
	$(PYTHON) -m venv $(VENV)-protos
	$(VENV)-protos/bin/python -m pip install --quiet --disable-pip-version-check -r protos/requirements.txt
	$(VENV)-protos/bin/python protos/generate.py

clean:
	rm -rf $(VENV) $(VENV)-protos demo-output site
