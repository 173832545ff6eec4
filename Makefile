# What the README's commands call. Everything is installed from the package index into virtual
# environments of the checkout; nothing outside it is touched.

PYTHON ?= python3
FAST   := .venv
ENGINE := .venv-engine
VLLM   := 0.32.0
TORCH  := 2.13.0
SOURCES := $(shell git ls-files csrc pyproject.toml 2>/dev/null)

.PHONY: demo test test-fast test-engine test-gpu lint bench cpp-test clean

demo: $(ENGINE)/.installed
	$(ENGINE)/bin/python examples/demo.py $(ARGS)

test: test-fast test-engine

# unit, conformance, model, golden, faults, sim, docs: no engine, some minutes
test-fast: $(FAST)/.installed cpp-test
	$(FAST)/bin/python -P -m pytest -q -m "not engine and not gpu" $(ARGS)

# a real vLLM with a real model, with and without kvtier
test-engine: $(ENGINE)/.installed
	$(ENGINE)/bin/python -P -m pytest -q -m engine tests/engine $(ARGS)

# every kernel and path on a real device; skipped, with the reason, where there is none
test-gpu: $(FAST)/.installed
	$(FAST)/bin/python -P -m pytest -q -m gpu tests/gpu $(ARGS)

cpp-test: $(FAST)/.installed
	$(FAST)/bin/cmake -S csrc -B build/cpp -DKVTIER_CPP_TESTS=ON -DKVTIER_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
	$(FAST)/bin/cmake --build build/cpp -j 2 | tail -1
	$(FAST)/bin/ctest --test-dir build/cpp --output-on-failure | tail -3

lint: $(FAST)/.installed
	$(FAST)/bin/ruff check . && $(FAST)/bin/ruff format --check .
	$(FAST)/bin/mypy
	$(FAST)/bin/lint-imports
	$(FAST)/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.hpp' 'csrc/*.cu' 'csrc/*.h')
	$(FAST)/bin/python -m nanobind.stubgen -q -m kvtier._core -o build/_core.pyi && diff -u kvtier/_core.pyi build/_core.pyi

bench: $(ENGINE)/.installed
	$(ENGINE)/bin/python tests/bench/run.py $(if $(ONLY),--only $(ONLY))

$(FAST)/.installed: $(SOURCES)
	test -d $(FAST) || $(PYTHON) -m venv $(FAST)
	$(FAST)/bin/pip install -q --upgrade pip
	$(FAST)/bin/pip install -q torch==$(TORCH) scikit-build-core "nanobind>=3.1,<4" cmake ninja
	$(FAST)/bin/pip install -q --group test --group kernels --group lint
	$(FAST)/bin/pip install -q --no-build-isolation -e '.[testing,torch,ucx,s3]'
	touch $@

$(ENGINE)/.installed: $(SOURCES)
	PYTHON=$(PYTHON) VLLM=$(VLLM) TORCH=$(TORCH) sh tests/engine/install.sh $(ENGINE)
	touch $@

clean:
	rm -rf build $(FAST) $(ENGINE) .cache
