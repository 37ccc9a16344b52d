# Each target makes .venv, installs into it once what it needs (`demo`: what runs Weft; the others: test tools too), and
# runs. Variables:
#   PYTHON     the interpreter that makes .venv          (default: python3)
#   PIP_FLAGS  further arguments of pip install          (for example an index with CPU builds of torch)
#   JOBS       test processes                            (default: 2)
#   INPUTS     how many `make fuzz` sends                (default: 100000)
#   ENGINES    how many `make fuzz-engine` starts        (default: 110; in CI 5)
#   IMAGES     how many `make fuzz-images` starts        (default: 30; in CI 3)
PYTHON ?= python3
PIP_FLAGS ?=
JOBS ?= 2
INPUTS ?= 100000
ENGINES ?= 110
IMAGES ?= 30

BIN := .venv/bin

QUESTION_1 := "What is 348 + 275?"
QUESTION_2 := "A shop has 5 boxes with 12 pens each and sells 17 pens. How many pens are left?"
QUESTION_3 := "What is 63 x 7 - 129?"

RUNS := .venv/.runs
INSTALLED := .venv/.installed

.PHONY: demo test test-all test-busy test-clients fuzz fuzz-engine fuzz-options fuzz-images fuzz-tiers fuzz-restores fuzz-speculation fuzz-drafts fuzz-deterministic mutate lint types docs install clean

demo: $(RUNS)
	$(BIN)/weft generate --chat $(foreach question,1 2 3,$(QUESTION_$(question)))

# Compiled modules are kept, whatever the environment says: the tests start many processes.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The whole suite, which takes hours (CONTRIBUTING.md). `make test` runs the part that each file names: a quick test of
# every subject.
test-all: $(INSTALLED)
	WEFT_WHOLE_MATRIX=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The suite three times beside a process per core that computes all the time; not part of CI.
test-busy: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.busy -n $(JOBS) --dist worksteal

# Other people's clients, each in an environment of its own (a gigabyte of downloads).
test-clients: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients.run

# Hostile inputs at the server; as many as INPUTS says.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.fuzz --inputs $(INPUTS)

# Random traffic at whole engines, as many as ENGINES says, against transformers (two minutes).
fuzz-engine: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_engine --count $(ENGINES) --seconds 900

# The same with every option and every kind of layer, against a plain engine (two minutes).
fuzz-options: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_options

# Random traffic with images and videos at as many engines as IMAGES says, against transformers (two minutes).
fuzz-images: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_images --count $(IMAGES) --seconds 900

# Random traffic at 60 engines with a tier in host memory, against transformers (two minutes).
fuzz-tiers: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_tiers --count 60 --seconds 900

# 10,000 restored prefixes, in engines that are killed and started again on damaged files (half an hour).
fuzz-restores: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_restores --restores 10000 --seconds 7200

# 10,000 random requests at whole engines with drafts (20 processor minutes, in JOBS processes).
fuzz-speculation: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_engine --drafts --requests 10000 --seconds 3600 --jobs $(JOBS)

# 10,000 random requests at deterministic engines: the bits of each are those of the request alone (an hour).
fuzz-deterministic: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_deterministic --requests 10000 --seconds 7200

# 10,000 random requests with drafts through scheduler and cache, without a model (two minutes).
fuzz-drafts: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.speculation.traffic

# Bugs planted one at a time: do the tests notice? (Half an hour; verdicts in tests/mutation/verdicts.json.)
mutate: $(INSTALLED)
	$(BIN)/python -m tests.mutation.run

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python docs/make_file_map.py
	$(BIN)/python docs/make_tables.py

install: $(INSTALLED)

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

# The pip of Python 3.11 takes twice as long to choose releases.
define VENV
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Weft needs Python 3.11 or newer: make PYTHON=python3.11")'
test -x $(BIN)/python || $(PYTHON) -m venv .venv
$(PIP_INSTALL) 'pip>=26'
endef

$(RUNS): pyproject.toml constraints.txt
	$(VENV)
	$(PIP_INSTALL) -e .
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	touch $(RUNS) $@

clean:
	rm -rf .venv .venv-clients build dist *.egg-info
