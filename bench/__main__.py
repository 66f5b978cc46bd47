"""Runs one benchmark: python -m bench NAME [options]. Without a name, prints the names of all benchmarks.

This file imports only the standard library before it imports the benchmark's module, because some benchmarks run on
machines without this project's packages.
"""

import sys
from importlib import import_module

BENCHES = {
    "serving": ("bench.serving.serving", "rates, latencies and memory under seven loads, beside vLLM or transformers"),
    "gateway": ("bench.serving.gateway", "the cost of HTTP, for completions and chats, beside gRPC and vLLM's server"),
    "forms": ("bench.serving.forms", "the cost of a JSON schema, beside vLLM"),
    "embeddings": ("bench.serving.embeddings", "texts per second of Embed, beside sentence-transformers"),
    "transcribe": ("bench.serving.transcribe", "work per second of sound, beside faster-whisper and transformers"),
    "fidelity": ("bench.model.fidelity", "difference of log-probabilities from float32, beside transformers and vLLM"),
    "packed": ("bench.model.packed", "a GGUF file as stored, in 4 bits and in bfloat16, beside llama.cpp"),
    "adapters": ("bench.model.adapters", "streams of 1, 4 and 16 adapters, beside the base model and vLLM's adapters"),
    "trained_adapter": ("bench.model.trained_adapter", "whether adapters trained with PEFT give the trained answers"),
    "speculation": ("bench.model.speculation", "tokens per second with and without drafts, beside vLLM's n-grams"),
    "acceptance": ("bench.model.acceptance", "the acceptance rate of a draft model, by three rules"),
    "trained_head": ("bench.model.trained_head", "trains an EAGLE-3 head, and measures its acceptance rate"),
    "scheduler": ("bench.planning.scheduler", "the scheduler alone, beside vLLM's scheduler"),
    "simulate": ("bench.planning.simulate", "policies and placement on whole traces, on a virtual clock"),
    "fleet": ("bench.fleet.__main__", "failover, the workers that one scheduler feeds, and the cost of a fleet"),
    "kernels_gpu": ("bench.kernels_gpu", "attention on a GPU, beside torch's and FlashInfer's"),
    "steps_gpu": ("bench.steps_gpu", "decode steps on a GPU, beside the limit of its memory bandwidth"),
    "serve_gpu": ("bench.gpu.serve_gpu", "serving on a GPU, beside vLLM"),
    "pack": ("bench.gpu.pack", "measures nothing: packs vLLM for a GPU machine without a network"),
}
"""The benchmarks by name: the module whose main() is called, and what the benchmark measures. bench/README.md has a
table with more details.
"""


def main() -> None:
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {name:16}{measures}" for name, (_, measures) in BENCHES.items())
        sys.stdout.write(f"python -m bench NAME [options]; NAME --help has the options.\n\n{rows}\n")
        return
    if name not in BENCHES:
        sys.exit(f"bench: {name!r} is no benchmark; there are {', '.join(BENCHES)}")
    sys.argv = [f"bench {name}", *options]
    import_module(BENCHES[name][0]).main()


if __name__ == "__main__":
    main()
