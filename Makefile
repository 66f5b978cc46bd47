# All targets run in .venv. `make setup` builds .venv; every other target that needs it builds it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/pagewire/v1/*.proto)
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt
COMPOSE := $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: setup examples serving proto proto-cpp proto-go proto-java demo demo-embed demo-transcribe test test-kernels fuzz chaos soak compat model-sweep operators test-gpu breaking lint fmt docs docs-check pictures release up down bench bench-all bench-gpu
# Bytecode is compiled on first import, because most modules of transformers are never imported. PYTHONDONTWRITEBYTECODE
# must be unset, or every process would compile them again.
export PYTHONDONTWRITEBYTECODE :=

setup: serving $(VENV)/installed

# The serving packages are installed first. A demo needs only these, which take a third of the time.
serving: $(VENV)/serving $(VENV)/generated $(VENV)/kernels

$(VENV)/serving: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=…")'
	@echo "Installing what serves into $(VENV)."
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$($(BIN)/python deploy/torch_index.py) -e '.[proto]'
	@touch $@

$(VENV)/installed: $(VENV)/serving
	@echo "Installing what checks and measures into $(VENV)."
	$(PIP) $$($(BIN)/python deploy/torch_index.py) -e '.[dev]'
	@touch $@

# Without a compiler this builds nothing, and the next `make` tries again.
$(VENV)/kernels: $(VENV)/serving kernels/cpu/build.py kernels/cpu/library.py $(wildcard kernels/cpu/csrc/*)
	@$(BIN)/python -m kernels.cpu.build
	@! ls kernels/cpu/lib/*.so >/dev/null 2>&1 || touch $@

proto: $(VENV)/generated

$(VENV)/generated: $(VENV)/serving $(PROTOS)
	@echo "Generating code from protos/."
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos \
	  --grpc_python_out=protos --mypy_grpc_out=quiet:protos $(PROTOS)
	@touch $@

# Stubs of clients in other languages, in examples/LANGUAGE/build: make proto-cpp, proto-go or proto-java. protoc and its
# plugins are Debian's: see examples/README.md. Node and Rust read protos/ themselves.
STUBS_cpp := --cpp_out=examples/cpp/build/stubs --grpc_out=examples/cpp/build/stubs \
  --plugin=protoc-gen-grpc=$(shell command -v grpc_cpp_plugin)
STUBS_go := --go_out=examples/go/build/src --go-grpc_out=examples/go/build/src
STUBS_java := --java_out=examples/java/build/stubs --grpc-java_out=examples/java/build/stubs \
  --plugin=protoc-gen-grpc-java=$(shell command -v grpc_java_plugin)
proto-cpp proto-go proto-java: proto-%:
	@mkdir -p examples/$*/build/stubs examples/$*/build/src examples/$*/build/classes
	protoc -Iprotos $(STUBS_$*) protos/pagewire/v1/inference_service.proto

demo: serving
	$(BIN)/pagewire generate --chat "What is the capital of France? Answer in one sentence."
	@echo "OpenAI's HTTP API: $(BIN)/pagewire serve"

# MODELS: a folder with all-minilm-l6-v2 (makes vectors) and reranker (a cross-encoder).
DOCUMENTS := "Paris is the capital of France." "Berlin is the capital of Germany." "France has good cheese."
demo-embed: serving
	$(BIN)/pagewire score --model $(MODELS)/all-minilm-l6-v2 "What is the capital of France?" $(DOCUMENTS)
	$(BIN)/pagewire score --model $(MODELS)/reranker --pair-format "Query: {query} Sentence: {document}" \
	  "What is the capital of France?" $(DOCUMENTS)
	$(BIN)/pagewire embed --model $(MODELS)/all-minilm-l6-v2 "Paris" | cut -c 1-72

# MODELS: a folder with whisper-tiny. SOUND: a sound file.
SOUND ?= $(MODELS)/whisper-tiny/a13.wav
demo-transcribe: serving
	$(BIN)/pagewire transcribe --model $(MODELS)/whisper-tiny $(SOUND)

# One process per core: on two cores, three processes took as long as two.
test: setup
	PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical

# The CPU kernels of every instruction set of this machine. `make test` has the best and the simplest alone.
test-kernels: setup
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n logical tests/kernels --all-kernels

# Runs the property tests repeatedly with new seeds, on all cores. Failing examples are kept in .hypothesis.
MINUTES ?= 10
fuzz: setup
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

# The long version of tests/fleet: twenty minutes, half of them a storm of kills. `python -m` starts every process.
# `make test` forks most processes from a parent that has imported their modules (tests/forked.py).
chaos: setup
	PAGEWIRE_TEST_TRUE_STARTS=1 $(BIN)/python -m pytest tests/fleet --chaos -s --timeout 1800

# Sends 20,000 requests under each policy. At the end the scheduler's state must be as after the first tenth.
soak: setup
	$(BIN)/python -m pytest tests/services/test_soak.py tests/services/test_lora_soak.py tests/services/test_hostile.py tests/services/test_hostile_http.py tests/services/test_hostile_worker.py tests/services/test_hostile_sounds.py tests/services/test_hostile_images.py --soak -s -n 0

# Compares a tiny network of every causal type of transformers with transformers, and writes the table of docs/models.md.
model-sweep: setup
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos:tests:tests/worker" $(BIN)/python tests/worker/model_sweep.py --write

# Other people's clients, vLLM's own HTTP tests, and the schemas that OpenAI and Anthropic publish. CLIENT: one of them.
# They are installed into a temporary folder. PEER: a folder with vLLM for its benchmark, as for bench.
compat: setup
	PEER="$(PEER)" PYTHONPATH="$(CURDIR):$(CURDIR)/protos" $(BIN)/python tests/compat/run.py $(CLIENT:%=--only "%") $(MODEL:%=--model %) \
  $(VECTORS:%=--vectors %) $(PAIRS:%=--pairs %) $(PAGE:%=--page %)
	$(MAKE) examples

# The programs of examples/ in other languages. One whose tools are missing is skipped with the reason.
examples: setup
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos" $(BIN)/python -m pytest tests/compat/languages.py -n 0

# Checks deploy/ with kubectl, the schemas of operators, Grafana and Prometheus. They are installed into a temporary
# folder, or into FOLDER, which keeps them.
operators: setup
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos:$(CURDIR)/tests:$(CURDIR)/tests/deploy" $(BIN)/python tests/operators/run.py $(FOLDER:%=--folder "%")

# The tests of Triton's kernels and of the worker's model code, on a machine with a GPU. PYTHON must have torch, triton,
# transformers, pytest, hypothesis and peft, and this project's own packages. Without a network, PEER brings these: see
# bench-gpu. pyproject.toml's pytest options are not used, because they need plugins that may be missing.
GPU_TESTS := $(wildcard tests/kernels/test_triton_*.py) $(addprefix tests/kernels/test_,attention_by_position.py \
  invariant_products.py shared_parts.py) $(addprefix tests/worker/,execution/test_model_runner.py \
  execution/test_cache_engine.py execution/test_decode_graphs.py execution/test_decode_inputs.py execution/test_logprobs.py \
  execution/test_running_ahead.py execution/test_sampler.py execution/test_layer_groups.py execution/test_states.py \
  images/test_image_families.py images/test_image_steps.py images/test_sounds.py models/test_architectures.py \
  models/test_llama.py models/test_mixtures.py loading/test_stacked_experts.py parallel/test_ranks.py)
test-gpu:
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos$(PEER:%=:%/pagewire)" $(PYTHON) -m pytest -c /dev/null --rootdir . -p no:cacheprovider -ra $(GPU_TESTS)

# Clients and recordings of the last tag must still be understood.
breaking: setup
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null); if [ -n "$$tag" ]; \
	then echo "buf breaking against $$tag"; $(BIN)/buf breaking protos --against ".git#ref=$$tag,subdir=protos"; \
	else echo "buf breaking is skipped: this clone has no tag to compare with."; fi

lint: setup breaking
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/python tests/prose.py

fmt: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The site, in build/site. Warnings are errors, and so is a page that loads a file of another host.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(VENV)/docs: $(VENV)/serving
	$(PIP) -e '.[docs]'
	@touch $@

# Runs the commands of the pages in docs/start and docs/operate with the default model, and prints those that it leaves out.
docs-check: serving
	$(BIN)/python tests/doc_commands.py

# Records the scenes of docs/how again with the default model, and draws them. NAMES: some of them.
pictures: setup
	$(BIN)/python -m bench.pictures.record $(NAMES)
	$(BIN)/python -m bench.pictures.draw

# Checks, builds and tags a release in this checkout. Nothing is pushed. docs: CONTRIBUTING.md, "Release".
release: setup docs
	$(BIN)/python .ci/release.py $(VERSION)

up:
	$(COMPOSE) up --build --detach

down:
	$(COMPOSE) down

# All variables are optional.
# PEER: a folder for vLLM, with venv/ (a virtual environment with vLLM) and model/ (a Hugging Face directory).
# TRACE: a CSV file, replayed SPEEDUP times as fast.
# LOADS: names, separated by commas.
# CHART: a file for the chart.
# FLAGS: further flags of our worker.
# MODEL: a model for our worker instead of PEER's, such as the same weights in a GGUF file.
bench: setup
	$(BIN)/python -m bench serving $(PEER:%=--peer %) $(TRACE:%=--trace %) $(SPEEDUP:%=--speedup %) $(LOADS:%=--loads %) \
	  $(MODEL:%=--model %) $(if $(FLAGS),--flags="$(FLAGS)") $(ROUNDS:%=--rounds %) $(CHART:%=--chart %)

# Runs every benchmark that needs no files. PEER is optional. `python -m bench` lists all benchmarks.
BENCHES := serving http forms fidelity adapters speculation
bench-all: setup
	for name in $(BENCHES); do $(BIN)/python -m bench $$name $(PEER:%=--peer %) || exit; done
	$(BIN)/python -m bench scheduler $(PEER:%=%/venv/bin/python)
	$(BIN)/python -m bench fleet

# Runs on a machine with a GPU. PYTHON must have torch, triton and transformers. No setup or network is needed.
# PEER: the folder where `python -m bench.gpu.pack join` has unpacked vLLM and this project's dependencies.
# MODELS, LOADS: names, separated by commas.
# OUTPUT: a file; figures are appended after each load.
bench-gpu:
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos$(PEER:%=:%/pagewire)" $(PYTHON) -m bench serve_gpu $(PEER:%=--peer %) \
	  $(MODELS:%=--models %) $(LOADS:%=--loads %) $(ROUNDS:%=--rounds %) $(OUTPUT:%=--output %)
