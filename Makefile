# make demo        a small ResNet trains on digits in half of its memory, beside the baseline; about a minute; writes demo/report.html
# make picture     README's picture of that report, of a new run of the demo; `.ci/picture.py` alone draws the last numbers again
# make test        set up .venv and run every check; this is all of CI
# make test-all    the same with a hundred times as many random programs, files and values; takes hours
# make check       the checks alone
# make docs        the documentation site, in site/index.html
# make clean       remove what the other targets made
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Bytecode is kept: pip compiles nothing (a third of the time of the set-up), and tests start over a hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo picture test test-all check docs setup clean

demo: $(READY)
	$(BIN)/paredown demo

picture: demo
	$(BIN)/python .ci/browser.py
	$(BIN)/python .ci/picture.py demo/report.html

test: $(READY)
	$(BIN)/python .ci/browser.py
	$(MAKE) check

test-all: $(READY)
	$(BIN)/python .ci/browser.py
	PAREDOWN_TEST_SCALE=100 $(MAKE) check

# One thread each: two workers with two threads each are slower than either alone. Tests of a file mostly stay in one worker (worksteal), so that
# what they share is made once.
check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	touch $@

$(VENV)/docs: $(READY)
	$(BIN)/python .ci/install.py cli,docs
	touch $@

clean:
	rm -rf $(VENV) build dist demo site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
