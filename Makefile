# `make demo` and `make test` do everything on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

RUN    := $(BIN)/torchrun --standalone --nproc-per-node

.PHONY: install demo test bench wheels lint protos clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot]'
	touch $@

demo: install
	$(BIN)/python -m examples.demo

# Tests that start client processes wait more than they work, but are about time: never more than two at once.
test: install lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not processes"
	$(BIN)/python -m pytest -n 2 --dist worksteal -m processes

# Tables of docs/benchmarks.md; they mean something on a machine that does nothing else.
bench: install
	$(RUN) 2 -m benchmarks.save_restore
	$(RUN) 2 -m benchmarks.save_restore --tensors 4000 --shape 64x64
	$(RUN) 2 -m benchmarks.save_restore --keep bench-output
	$(RUN) 1 -m benchmarks.save_restore --restore bench-output
	$(RUN) 4 -m benchmarks.save_restore --restore bench-output
	$(BIN)/python -c "import shutil; shutil.rmtree('bench-output')"
	$(RUN) 2 -m benchmarks.async_save
	$(BIN)/python -m benchmarks.manifest
	$(BIN)/python -m benchmarks.planning
	$(RUN) 2 -m benchmarks.redistribute
	$(RUN) 4 -m benchmarks.redistribute
	$(BIN)/python -m benchmarks.received_bytes
	$(BIN)/python -m benchmarks.local_redistribute
	$(BIN)/python -m benchmarks.dispatch
	$(BIN)/python -m benchmarks.randomness
	$(BIN)/python -m benchmarks.coordinator

# For machines with a card and no network: benchmarks/card.sh installs them there. See docs/benchmarks.md.
CARD_PYTHON    := 3.12
CARD_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(CARD_PYTHON) --implementation cp \
		$(CARD_PLATFORMS:%=--platform %) -c constraints.txt -r benchmarks/card_wheels.txt -d wheels

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: install
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) demo-output
