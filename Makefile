# Everything runs inside $(VENV); variables may be set on the command line, e.g. `make train NPROC=4`.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
# Ranks of `make train`; unset means one per GPU, or two on CPU.
NPROC ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# Shells start a script's background jobs with SIGINT ignored. make and all that it runs inherit that, so that an interrupt of
# the group would stop nothing; the programs at least take it, and make starts no further one.
INT := $(shell grep -qs '^SigIgn:.*[2367abef]$$' /proc/self/status && \
	env --default-signal=INT true 2>/dev/null && echo env --default-signal=INT)
RUN := $(strip $(INT) $(BIN)/python)

.PHONY: help setup train test coverage mutation cuda-api lint docs docs-serve clean

help:
	@echo 'make setup   create $(VENV) and install the project into it'
	@echo 'make train   train a small GPT under torchrun (NPROC=ranks, ARGS="options of examples/train_gpt.py")'
	@echo 'make test    lint, types and tests'
	@echo 'make lint    ruff and mypy --strict'
	@echo 'make coverage  the same tests with branch coverage (slow)'
	@echo 'make mutation  mutation testing of four packages (half an hour; ARGS="PACKAGE --sample N")'
	@echo 'make cuda-api  what is called of CUDA, in a CUDA build of torch over stubs, without a GPU (downloads 530 MB)'
	@echo 'make docs    build the documentation into site/; a warning is an error'
	@echo 'make docs-serve  serve it at http://127.0.0.1:8000 and rebuild it when a page changes'
	@echo 'make clean   remove $(VENV) and all caches'

setup: $(STAMP)

# On a terminal pip shows how far it is; elsewhere that would be hundreds of lines.
PIP = @if test -t 1; then quiet=; else quiet=--quiet; fi; set -x; $(RUN) -m pip install $$quiet

# The stamp is written last: an interrupted set-up is done again from where pip left it.
$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo 'setting up $(VENV), about 5 GB in all'
	@echo '1 of 2: installing torch; this takes minutes'
	$(PIP) $(TORCH)
	@echo '2 of 2: installing this project and what its tests need (transformers, lightning, ruff, ...); this takes minutes'
	$(PIP) -e '.[test]'
	touch $(STAMP)
	@echo '$(VENV) is set up'

# One thread per rank on CPU: with one thread per core, two ranks would compete for the cores. The program names make in the
# commands that it proposes at its end.
train: setup
	@set -e; nproc=$(NPROC); gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	test "$$gpus" -gt 0 || export OMP_NUM_THREADS=1; \
	test -n "$$nproc" || nproc=$$([ "$$gpus" -gt 0 ] && echo "$$gpus" || echo 2); \
	export TRAIN_GPT_MAKE='make train$(if $(NPROC), NPROC=$(NPROC))'; \
	exec $(RUN) -m torch.distributed.run --standalone --nproc_per_node "$$nproc" examples/train_gpt.py $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy --strict zhooks offload tools/zprof tests benchmarks examples/finetune.py examples/lora.py

# Two processes: most tests wait for other ranks, for disks or for children, so one alone leaves the cores idle. Hundreds of the
# programs that tests start import the packages, which are compiled once unless the environment forbids it.
test: export PYTHONDONTWRITEBYTECODE =
test: lint
	$(RUN) -m pytest -n 2 --dist loadfile --durations 20

# Every process writes a file, wherever it runs; they are added up at the end, also where a test has failed (pytest ends with 1),
# but not where the tests were interrupted. What is measured writes, too, where no file may grow.
coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/data
coverage: setup
	rm -rf build/coverage && mkdir -p build/coverage
	$(RUN) -m coverage run -m pytest -n 2 --dist loadfile -k 'not a_full_disk' $(ARGS) || \
		{ ended=$$?; touch build/coverage/failed; test $$ended -eq 1; }
	$(RUN) -m coverage combine --quiet build/coverage
	$(RUN) -m coverage report
	@test ! -e build/coverage/failed || { echo 'tests have failed'; exit 1; }

# By hand: it says how much the tests of these packages hold, which no change alters by much.
mutation: setup
	$(PIP) -e '.[mutation]'
	$(RUN) -m tests.mutation $(or $(ARGS),--sample 110 --seed 17)

# By hand: no value is computed; CONTRIBUTING.md says what it shows.
cuda-api: setup
	$(RUN) -m tests.cuda_api $(ARGS)

# The theme's notice on MkDocs 2 has nothing to do with this site: setup.cfg keeps to MkDocs 1.
docs: setup
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:tools $(BIN)/python -m mkdocs build --strict

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:tools $(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
