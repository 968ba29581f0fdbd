# Every target sets up what it needs by itself; Python and make are all a bare machine must have.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help quickstart notebooks test test-real test-slow test-lowest dist lint bench practice results docs clean

help:
	@echo "make quickstart   train, fit and show uncertainty on scikit-learn's digits"
	@echo "make notebooks    notebooks/*.ipynb, made from the recipes"
	@echo "make test         the test suite (make test-slow: the longer checks; test-real: all modules of other libraries)"
	@echo "make test-lowest  the test suite with the lowest versions of torch and Lightning that are supported"
	@echo "make lint         ruff and mypy"
	@echo "make bench        time and memory against the peers and a plain epoch (CASES=MLP: some; KEEP=1: into README and docs)"
	@echo "make practice     does a posterior help? ordinary trainings and methods (FULL=1: all of them)"
	@echo "make results      recipes/papers/RESULTS.md, from the numbers that the papers' programs have saved"
	@echo "make docs         the documentation, in site/"
	@echo "make dist         the archives of a release, checked, in dist/"

quickstart: $(VENV)/.recipes
	$(BIN)/python recipes/quickstart.py

notebooks: | $(BIN)/python
	$(BIN)/python notebooks/make.py

test: $(VENV)/.test $(VENV)/.real
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-real: $(VENV)/.test $(VENV)/.real
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/real_modules

test-slow: $(VENV)/.test $(VENV)/.peers $(VENV)/.real $(VENV)/.slow
	$(BIN)/python -m pytest -m slow

test-lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint .ci/lowest.txt --editable ".[test]"
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.test $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.recipes $(VENV)/.peers $(VENV)/.real
	$(BIN)/python -m benchmarks $(if $(CASES),--cases '$(CASES)') $(if $(LIST),--list) $(if $(KEEP),--keep)

practice: $(VENV)/.recipes $(VENV)/.peers
	$(BIN)/python -m benchmarks.practice

results: $(VENV)/.recipes
	$(BIN)/python -m recipes.papers.results

docs: $(VENV)/.recipes $(VENV)/.docs
	$(BIN)/mkdocs build --strict

dist: | $(BIN)/python
	$(BIN)/python -m pip install --quiet build twine check-wheel-contents
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

clean:
	rm -rf $(VENV) $(VENV)-lowest site build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: `make lint` after `make test` installs only what is new.
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@
