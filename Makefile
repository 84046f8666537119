# surokit: `make quickstart` runs the main job, `make test` everything that is tested, `make help` lists the rest.
#
# One environment in .venv, made with the pinned versions of constraints.txt. A stamp file remembers what was installed, so a
# second call goes straight to work; touching pyproject.toml or constraints.txt installs again.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# the first interpreter that is new enough
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
MIN_FREE_GIB ?= 4
PYTEST := $(PY) -m pytest

.PHONY: help quickstart lab check test test-plain-cpu test-deepspeed test-guidellm test-oldest test-gpu gpu-hour soak same-answers lint docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.lab ## install what is needed and run the main job: three recipes trained and compared, then fine-tuning, a profile and plans
	@$(VENV)/bin/surokit quickstart

lab: $(VENV)/.lab ## the notebooks in JupyterLab
	@$(PY) -m jupyterlab notebooks/01_quickstart.ipynb

MYPY := $(VENV)/bin/mypy surokit kernels tests docs
RUFF_AND_MYPY := $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(MYPY)
# one thread a process: where other work takes a core, a team of threads waits for its slowest at every small operation
TESTS := OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 --dist loadfile
# A process of tests that dies, or a test that hangs where no signal reaches it, ends all with its name: a run that waits says nothing.
TESTS += --max-worker-restart 0 -o faulthandler_timeout=1260 -o faulthandler_exit_on_timeout=true
UNITS := $(TESTS) --timeout 300 -m "not gpu and not soak"
test: $(VENV)/.test ## all tests: lint, types, units, notebooks
	@echo "== ruff and mypy"
	@$(RUFF_AND_MYPY)
	@echo "== tests"
	@$(UNITS)
	@echo "== notebooks"
	@$(TESTS) --nbval-lax notebooks

check: $(VENV)/.test ## before each commit: lint, types, and the half of the tests that is fast; two or three minutes
	@$(RUFF_AND_MYPY)
	@$(UNITS) --fast

# numbers must not depend on what the author's processor can do: without bf16 instructions and AMX, which oneDNN is told not to use
PLAIN_CPU := tests/nn tests/models tests/kernels tests/planner/test_memory.py tests/test_quantizer.py tests/test_accuracy.py tests/test_convert.py \
	tests/test_product.py tests/test_tuning.py tests/train/test_recipes.py tests/train/test_engine.py
test-plain-cpu: $(VENV)/.test ## tests of numbers as on a processor without bf16 instructions; a few minutes
	@ONEDNN_MAX_CPU_ISA=AVX512_CORE $(UNITS) $(PLAIN_CPU) \
		--ignore-glob "tests/kernels/test_*compiled.py" --ignore-glob "tests/kernels/test_triton_*.py"

# the environment at hand will do if it has torch, triton, numpy, safetensors and pytest: nothing is installed
GPU_PY ?= $(if $(wildcard $(PY)),$(PY),python3)
MINUTES ?= 60
HOUR_OUT ?= gpu-hour
gpu-hour: ## what is measured and tested on a GPU, the most needed first; the same command goes on (MINUTES=60, HOUR_OUT=gpu-hour, HOUR=--background)
	@$(GPU_PY) -m surokit.bench hour --minutes $(MINUTES) --out $(HOUR_OUT) $(HOUR)

test-gpu: ## its last steps alone, the tests, all of them anew (GPU_PY=python3 takes another environment than .venv)
	@out=$$(mktemp -d); PYTEST_ADDOPTS=--whole $(GPU_PY) -m surokit.bench hour --out $$out --only tests-device tests-kernels tests-others \
		|| { echo "What the tests said: $$out/tests-*.log" >&2; exit 1; }

# The interpreter of Triton 3.6 needs a numpy before 2.4. PyPI's torch is a CUDA build, which wants an older setuptools and brings
# libraries of 3 GiB that it loads without a GPU too.
OLDEST_VENV := .venv-oldest
OLDEST_PYTHON ?= $(shell command -v python3.12 >/dev/null && python3.12 -c '' 2>/dev/null && echo python3.12 || echo $(PYTHON))
test-oldest: ## the tests with the oldest torch and Triton that are allowed, on Python 3.12 where there is one; no notebooks
	@mkdir -p $(OLDEST_VENV)
	@{ grep -vE '^(torch|triton|numpy|setuptools|nvidia-cuda-[a-z]+|nvidia-nvvm)==' constraints.txt; \
		printf '%s\n' '$(call oldest,torch)' '$(call oldest,triton)' 'numpy<2.4'; } >$(OLDEST_VENV)/constraints.txt
	@$(MAKE) --no-print-directory VENV=$(OLDEST_VENV) CONSTRAINTS=$(OLDEST_VENV)/constraints.txt PYTHON=$(OLDEST_PYTHON) MIN_FREE_GIB=12 \
		$(OLDEST_VENV)/.test
	@OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q -n 2 --dist loadfile --timeout 900 -m "not gpu and not soak"

# DeepSpeed lies apart, since with it in the environment other libraries behave differently. Its AdamW is compiled at first use.
DEEPSPEED := deepspeed==0.19.8
DEEPSPEED_AT = $(CURDIR)/$(VENV)/$(subst ==,-,$(DEEPSPEED))
test-deepspeed: $(VENV)/.test ## DeepSpeed's engine and its ZenFlow beside ours, for which a C++ compiler is needed; three minutes
	@if [ ! -d $(DEEPSPEED_AT) ]; then echo "== installing $(DEEPSPEED) in $(DEEPSPEED_AT)"; \
		DS_BUILD_OPS=0 $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --upgrade --target $(DEEPSPEED_AT).new \
			$(DEEPSPEED) einops hjson msgpack ninja py-cpuinfo && mv $(DEEPSPEED_AT).new $(DEEPSPEED_AT); fi
	@PATH=$(DEEPSPEED_AT)/bin:$$PATH PYTHONPATH=$(DEEPSPEED_AT) OMP_NUM_THREADS=1 $(PYTEST) -q --timeout 900 tests/dissection/test_deepspeed.py

# guidellm's own requirements are gigabytes, and none of them is needed to serve and to ask
GUIDELLM := guidellm==0.8.1
GUIDELLM_AT = $(CURDIR)/$(VENV)/$(subst ==,-,$(GUIDELLM))
test-guidellm: $(VENV)/.test ## guidellm's client beside ours, on its mock server; two minutes
	@if [ ! -d $(GUIDELLM_AT) ]; then echo "== installing $(GUIDELLM) in $(GUIDELLM_AT)"; \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(GUIDELLM_AT).new \
			$(GUIDELLM) aiofiles aiologic 'culsans~=0.10.0' faker ftfy html5tagger httptools more-itertools msgpack pydantic-settings \
			python-dotenv sanic sanic-routing tracerite uvloop websockets wrapt && mv $(GUIDELLM_AT).new $(GUIDELLM_AT); fi
	@PYTHONPATH=$(GUIDELLM_AT) OMP_NUM_THREADS=1 $(PYTEST) -q --timeout 900 tests/serving/test_second_opinion.py

soak: $(VENV)/.test ## long runs: full counts, every case of sampled tests, new examples, many kills; raw output goes to docs/measurements
	@$(PYTEST) -m "soak or ((sampled or hypothesis) and not gpu)" --whole --hypothesis-profile explore -q
	@$(PYTEST) tests/gpu --rehearse -q
	@$(MAKE) --no-print-directory test-deepspeed
	@$(MAKE) --no-print-directory test-guidellm
	@$(MAKE) --no-print-directory test-oldest

# ANSWERS takes more of what `python -m tests.answers --help` lists: ANSWERS='--only plans,runs'
BASE ?= HEAD
same-answers: $(VENV)/.test ## whether every answer is the one of an earlier revision, to the bit (BASE=main~3); a quarter of an hour
	@$(PY) -m tests.answers $(BASE) $(ANSWERS)

lint: $(VENV)/.test ## ruff and mypy, fixing what can be fixed
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format . && $(MYPY)

docs: $(VENV)/.test ## the documentation as a site in site/, links checked; runs the notebooks that changed
	@$(PY) docs/notebooks.py
	@$(VENV)/bin/mkdocs build --strict --quiet && echo "site/index.html"

clean: ## remove the environment and everything that is generated
	rm -rf $(VENV) $(OLDEST_VENV) site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- the environment: $(VENV)/.lab has JupyterLab, $(VENV)/.test the oracles and tools as well

CONSTRAINTS := constraints.txt
# pyproject.toml's lower bound, as pip takes it: the tests compile every kernel with the oldest Triton as well, which lies apart
oldest = $(shell sed -nE 's/^ *"$(1)>=([0-9.]+).*/$(1)==\1/p' pyproject.toml)
OLDEST_TRITON = $(VENV)/$(subst ==,-,$(call oldest,triton))

$(VENV)/.lab: EXTRA := lab
$(VENV)/.test: EXTRA := dev
$(VENV)/.lab $(VENV)/.test: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "surokit needs Python 3.11 or newer and none was found: install it, or name one with 'make PYTHON=/path/to/python3'." >&2; exit 1; fi
	@free=$$(df -Pk . | awk 'NR==2 {print int($$4 / 1048576)}'); if [ "$$free" -lt $(MIN_FREE_GIB) ]; then \
		echo "Installing needs about $(MIN_FREE_GIB) GiB and this disk has $$free GiB free: make room first." >&2; exit 1; fi
	@if [ ! -x $(PY) ]; then echo "== new environment in $(VENV) with $(PYTHON)"; \
		$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)." >&2; exit 1; }; fi
	@echo "== installing surokit[$(EXTRA)] (pinned in constraints.txt; log: $(VENV)/install.log)"
	@$(PY) -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[$(EXTRA)]" >$(VENV)/install.log 2>&1 || { \
		{ grep -iE '^ *error' $(VENV)/install.log || true; } | tail -n 3 >&2; \
		if grep -qiE 'name resolution|connection|proxy|timed out|no matching distribution' $(VENV)/install.log; \
		then echo "The packages could not be fetched: check the network (or pip's index settings) and run make again." >&2; \
		elif grep -q 'No space left' $(VENV)/install.log; then echo "The disk is full: make room and run make again." >&2; \
		else echo "Installing failed: see $(VENV)/install.log." >&2; fi; exit 1; }
	@if [ $(EXTRA) = dev ] && [ "$$(uname -s)" = Linux ] && [ ! -d $(OLDEST_TRITON) ] && [ $(CONSTRAINTS) = constraints.txt ]; then \
		echo "== installing $(call oldest,triton), the oldest that is allowed, in $(OLDEST_TRITON)"; \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST_TRITON) $(call oldest,triton); fi
	@touch $@ $(if $(filter $(VENV)/.test,$@),$(VENV)/.lab)
