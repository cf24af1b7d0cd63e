PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready
NEWEST := .venv-newest

.DEFAULT_GOAL := help
.PHONY: help demo test interpreted compiled compat mutants lint format docs gpu-test bench clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-9s %s\n", $$1, $$2}'

# --no-build-isolation: the package is built by the pinned setuptools that torch needs anyway.
# --no-compile: pip compiles one file after another; below all cores do, without models and tests that nobody imports.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install --no-compile -c constraints.txt --no-build-isolation -e '.[dev]'
	-$(BIN)/python -m compileall -qq -j 0 -x '/(models|tests?|_internal)/' .venv/lib
	@touch $@

demo: $(READY)  ## every family once on this machine's best device, and an HTML report
	$(BIN)/python -m isogemm demo

# Two at a time, each shown when it is done: mypy and the end of a test run leave cores idle.
test: $(READY)  ## lint, and every test this machine can run
	@$(MAKE) --no-print-directory --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint interpreted compiled

# One thread a process: two that share the cores wait for each other (362 s became 192 on two cores). Tests of several
# threads ask for them; threads that wait leave the core to others.
SHARING := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

interpreted: $(READY)
	$(SHARING) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) tests/interpreter

compiled: $(READY)
	$(SHARING) $(BIN)/python -m pytest -n $(JOBS) --ignore=tests/interpreter

# The newest torch and Triton that pyproject.toml allows, and the package as pip installs it for a user.
$(NEWEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --no-compile -c $(NEWEST)/constraints.txt '.[dev]'
	@touch $@

# What can differ between releases: fusion, compilation, autograd, fakes, the interpreter, a sample of the compile matrix.
COMPAT := tests/core tests/fusion tests/gemm tests/tiny tests/nn tests/cli tests/test_import.py tests/test_readme.py \
	tests/encoder/test_compile.py tests/encoder/test_bits.py tests/encoder/test_fused_compile_matrix.py tests/integrations tests/test_warm_calls.py \
	tests/attention tests/norm/test_use.py tests/norm/test_norm_compile_matrix.py tests/loss/test_use.py tests/loss/test_loss_compile_matrix.py
COMPAT_INTERPRETED := tests/interpreter/test_gemm.py tests/interpreter/test_tiny.py tests/interpreter/test_encoder.py \
	tests/interpreter/test_attention_decode.py tests/interpreter/test_softmax.py

compat: $(NEWEST)/.ready  ## the newest supported torch and Triton: what can differ there, and the demo
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --force-reinstall .
	$(SHARING) $(NEWEST)/bin/python -m pytest -n $(JOBS) $(COMPAT)
	$(SHARING) TRITON_INTERPRET=1 $(NEWEST)/bin/python -m pytest -n $(JOBS) $(COMPAT_INTERPRETED)
	mkdir -p build/compat && cd build/compat && ../../$(NEWEST)/bin/isogemm demo

mutants: $(READY)  ## change the source in one place after another: some test must notice each
	$(BIN)/python tests/mutants --jobs $(JOBS)

lint: $(READY)  ## style, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## rewrite the generated tables of README and docs from benchmarks/results
	$(BIN)/python benchmarks/documents.py

gpu-test:  ## tests that need a GPU, side by side, with the python3 that is there
	$(PYTHON) tests/gpu $(if $(GPU_JOBS),--jobs $(GPU_JOBS)) $(ARGS)

bench:  ## measure on this GPU, with the python3 that is there; ARGS="--quick" for less
	PYTHONPATH=src $(PYTHON) -m isogemm bench $(ARGS)

clean:  ## remove all that make made
	rm -rf .venv $(NEWEST) build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
