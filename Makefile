# `make demo` and `make test` prepare everything they need; a second call goes straight to work.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Environments that forbid it (containers do) would compile all of torch again at every start of Python.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test quick lint types unit grid format docs wheel clean

demo: $(VENV)/.run
	$(BIN)/credo demo

test: lint $(VENV)/.dev  # mypy beside the tests, not before them, when it would leave a core idle
	$(BIN)/mypy & types=$$!; $(PYTEST) -m "not grid"; unit=$$?; wait $$types && exit $$unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST) -m "not grid"

quick: $(VENV)/.dev  # while editing: no test that takes more than about three seconds
	$(PYTEST) -m "not slow and not grid"

grid: $(VENV)/.dev  # whole grids of cases, of which `make test` runs a part
	$(PYTEST) -m grid

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv-docs/.made  # the site, in build/site; needs neither torch nor Credo installed
	.venv-docs/bin/python docs/make_site.py
	.venv-docs/bin/zensical build --strict --clean
	.venv-docs/bin/python docs/make_site.py local
	.venv-docs/bin/python docs/check_site.py

.venv-docs/.made: constraints-docs.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check --quiet install -r constraints-docs.txt
	touch $@

wheel: .venv-release/.made  # sdist and wheel in dist, the same bytes from the same commit
	.venv-release/bin/python release/build.py

.venv-release/.made: constraints-release.txt
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip --disable-pip-version-check --quiet install -r constraints-release.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-docs .venv-release dist .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info

# Installing compiles nothing: what is imported is compiled then, which is a small part of these packages.
$(VENV)/.torch: constraints.txt
	@echo "Setting up $(VENV): PyTorch and a few packages, some minutes on the first call …"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -c constraints.txt torch
	touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	$(PIP) install --no-compile -c constraints.txt -e '.[cli,report,sklearn]'
	touch $@

# Beside pip, which leaves a core idle, torch is compiled once; else both workers of the tests do that at the same time.
$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(BIN)/python -c "import torch._dynamo" 2>/dev/null & \
	$(PIP) install --no-compile -c constraints.txt -e '.[dev,cli,report,sklearn,export,integrations]'; \
	installed=$$?; wait; exit $$installed
	touch $(VENV)/.run $@
