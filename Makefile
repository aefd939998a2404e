# Every target makes its own virtual environment first; nothing but Python 3.11+ and make is needed.
VENV    ?= .venv
PYTHON  ?= python3
PIP     := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST  := $(VENV)/bin/python -m pytest
# more than cores: most tests wait for processes of their own
WORKERS ?= 4
COVERAGE ?=
RERUNS  ?= 0
SERVERS ?= yes
SHUFFLE ?=

# compiled modules are kept: without them, each of the thousands of processes that the tests start compiles the source
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo check test test-fast test-extra soak bench gpu gpu-all clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.base: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[train,report,real-base]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[train,report,real-base,trl,postgres,gguf,dev]'
	touch $@

$(VENV)/.extra: $(VENV)/.dev
	$(PIP) -e '.[qlora,kernels]'
	touch $@

$(VENV)/.bench: $(VENV)/.extra
	$(PIP) -e '.[bench]'
	touch $@

$(VENV)/.bench-gpu: $(VENV)/.bench
	$(PIP) -e '.[bench-gpu]'
	touch $@

setup: $(VENV)/.dev  ## install everything that make test needs

demo: $(VENV)/.base  ## run the whole loop once on this machine: train, judge, deploy
	$(VENV)/bin/tunesmith demo

check: $(VENV)/.dev  ## formatting, lint, strict types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy src

test: $(VENV)/.dev  ## all tests that need only package installs; COVERAGE=--cov prints branch coverage, SHUFFLE=SEED draws an order
	$(PYTEST) -m "not extra and not soak and not gpu" -n $(WORKERS) --dist loadgroup --reruns $(RERUNS) -r fEsR $(if $(SHUFFLE),--shuffle $(SHUFFLE)) $(COVERAGE)

test-fast: $(VENV)/.dev  ## the inner loop, two or three minutes: rules, architecture, the store on SQLite
	$(PYTEST) --fast -m "not extra and not soak and not gpu" -n $(WORKERS) --dist loadgroup -r fE tests/unit tests/store tests/test_architecture.py tests/test_transitions.py

test-extra: $(VENV)/.extra  ## the demo under test, models that teach, a real base (93 MB), a real vLLM (2.5 GB) and llama-server, each got once
	test "$(SERVERS)" = no || $(VENV)/bin/python tests/support/install_servers.py $(VENV)/servers
	$(PYTEST) -m "extra and not soak and not gpu" -n $(WORKERS) --dist loadfile --reruns $(RERUNS) -r fEsR

soak: $(VENV)/.dev  ## drills with their full counts; hours
	$(PYTEST) -m soak --timeout 7200
	$(PYTEST) -m "hypothesis and not soak and not extra and not gpu" --hypothesis-profile thorough --timeout 7200

bench: $(VENV)/.bench  ## every benchmark beside its peers
	for script in benchmarks/*.py; do $(VENV)/bin/python $$script $(BENCH_ARGS) || exit 1; done

gpu: $(VENV)/.dev  ## tests that need CUDA, then training and memory on the GPU; elsewhere it says why not
	@if $(VENV)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(MAKE) --no-print-directory gpu-all; \
	else echo "make gpu: skipped, torch sees no CUDA device on this machine"; fi

gpu-all: $(VENV)/.bench-gpu
	$(PYTEST) -m gpu
	$(VENV)/bin/python benchmarks/training.py --profile --out benchmarks/results $(GPU_ARGS)
	$(VENV)/bin/python benchmarks/memory.py

clean:  ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* tunesmith-demo benchmarks/results build dist
