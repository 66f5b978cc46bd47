# Everything runs in .venv, which `make setup` builds from nothing; every other target sets it up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/pagewire/v1/*.proto)
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt
COMPOSE := $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: setup serving proto demo demo-embed demo-transcribe test fuzz chaos soak test-gpu lint fmt up down bench bench-all bench-gpu
# Modules are compiled to bytecode when a process first imports them, since most of transformers' never are. No process
# would keep the bytecode if the environment said so, and each would compile them anew.
export PYTHONDONTWRITEBYTECODE :=

setup: serving $(VENV)/installed

# What serves is installed first, which is all that a demo needs: it takes a third of the time.
serving: $(VENV)/serving $(VENV)/generated $(VENV)/kernels

$(VENV)/serving: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=…")'
	@echo "Installing what serves into $(VENV)."
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$($(BIN)/python deploy/torch_index.py) -e '.[scheduler,worker,client,openai,proto]'
	@touch $@

$(VENV)/installed: $(VENV)/serving
	@echo "Installing what checks and measures into $(VENV)."
	$(PIP) $$($(BIN)/python deploy/torch_index.py) -e '.[dev]'
	@touch $@

# Without a compiler nothing is built, and the next `make` tries again.
$(VENV)/kernels: $(VENV)/serving kernels/cpu/build.py kernels/cpu/library.py $(wildcard kernels/cpu/csrc/*)
	@$(BIN)/python -m kernels.cpu.build
	@! ls kernels/cpu/lib/*.so >/dev/null 2>&1 || touch $@

proto: $(VENV)/generated

$(VENV)/generated: $(VENV)/serving $(PROTOS)
	@echo "Generating code from protos/."
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos \
	  --grpc_python_out=protos --mypy_grpc_out=quiet:protos $(PROTOS)
	@touch $@

demo: serving
	$(BIN)/python -m pagewire_client generate --chat "What is the capital of France? Answer in one sentence."
	@echo "OpenAI's HTTP API: $(BIN)/python -m pagewire_client serve"

# MODELS: a folder with all-minilm-l6-v2, which makes vectors, and reranker, which reads both texts as one.
DOCUMENTS := "Paris is the capital of France." "Berlin is the capital of Germany." "France has good cheese."
demo-embed: serving
	$(BIN)/python -m pagewire_client score --model $(MODELS)/all-minilm-l6-v2 "What is the capital of France?" $(DOCUMENTS)
	$(BIN)/python -m pagewire_client score --model $(MODELS)/reranker --pair-format "Query: {query} Sentence: {document}" \
	  "What is the capital of France?" $(DOCUMENTS)
	$(BIN)/python -m pagewire_client embed --model $(MODELS)/all-minilm-l6-v2 "Paris" | cut -c 1-72

# MODELS: a folder with whisper-tiny, which writes down what is said. SOUND: a file.
SOUND ?= $(MODELS)/whisper-tiny/a13.wav
demo-transcribe: serving
	$(BIN)/python -m pagewire_client transcribe --model $(MODELS)/whisper-tiny $(SOUND)

# A process for each core: three for two cores took as long.
test: setup
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n logical

# The tests of properties, again and again with new seeds, on all cores. What is found is kept in .hypothesis.
MINUTES ?= 10
fuzz: setup
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

# The long version of tests/fleet, with every number in full: twenty minutes, half of them a storm of kills. Every process
# is started as `python -m` does it; `make test` forks most from one that has imported their modules (tests/forked.py).
chaos: setup
	PAGEWIRE_TEST_TRUE_STARTS=1 $(BIN)/python -m pytest tests/fleet --chaos -s --timeout 1800

# 20,000 requests under each policy, after which the scheduler must be as it was after the first tenth.
soak: setup
	$(BIN)/python -m pytest tests/services/test_soak.py tests/services/test_lora_soak.py tests/services/test_hostile.py tests/services/test_hostile_http.py tests/services/test_hostile_worker.py tests/services/test_hostile_sounds.py --soak -s -n 0

# The tests of kernels/ and of the worker's model code, on a machine with a GPU, whose PYTHON has torch, triton, pytest
# and, for the models, transformers: it takes no setup, no gRPC and no network. Options and warnings of pyproject.toml are
# for plugins that may not be there.
GPU_TESTS := tests/kernels $(addprefix tests/worker/,execution/test_batch.py execution/test_cache_engine.py \
  execution/test_decode_graphs.py execution/test_decode_inputs.py execution/test_logprobs.py \
  execution/test_running_ahead.py execution/test_sampler.py models/test_architectures.py models/test_llama.py \
  parallel/test_ranks.py)
test-gpu:
	$(PYTHON) -m pytest -c /dev/null --rootdir . -p no:cacheprovider -ra $(GPU_TESTS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint protos

fmt: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

up:
	$(COMPOSE) up --build --detach

down:
	$(COMPOSE) down

# PEER, for vLLM: a folder with venv/, a virtual environment that can run it, and model/, the weights as a Hugging Face
# directory. TRACE: a CSV file, replayed SPEEDUP times as fast. LOADS: names, separated by commas. CHART: a file. FLAGS:
# further ones of our worker. MODEL: what it serves instead, such as the same weights in a GGUF file. All are optional.
bench: setup
	$(BIN)/python -m bench serving $(PEER:%=--peer %) $(TRACE:%=--trace %) $(SPEEDUP:%=--speedup %) $(LOADS:%=--loads %) \
	  $(MODEL:%=--model %) $(if $(FLAGS),--flags="$(FLAGS)") $(ROUNDS:%=--rounds %) $(CHART:%=--chart %)

# Every benchmark that needs no files but those of PEER, which is optional. `python -m bench` lists all others.
BENCHES := serving gateway forms fidelity adapters speculation
bench-all: setup
	for name in $(BENCHES); do $(BIN)/python -m bench $$name $(PEER:%=--peer %) || exit; done
	$(BIN)/python -m bench scheduler $(PEER:%=%/venv/bin/python)
	$(BIN)/python -m bench fleet

# On a machine with a GPU, whose PYTHON has torch, triton and transformers: it takes no setup and no network. PEER: where
# `python -m bench.gpu.pack join` has unpacked vLLM and what this project needs. MODELS, LOADS: names, separated by
# commas. OUTPUT: a file to which figures are appended after each load.
bench-gpu:
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos$(PEER:%=:%/pagewire)" $(PYTHON) -m bench serve_gpu $(PEER:%=--peer %) \
	  $(MODELS:%=--models %) $(LOADS:%=--loads %) $(ROUNDS:%=--rounds %) $(OUTPUT:%=--output %)
