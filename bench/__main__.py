"""Runs one benchmark: python -m bench NAME [options]. Without a name, prints all names.

Only the standard library is imported here, because some benchmarks run without this project's packages.
"""

import sys
from importlib import import_module

BENCHES = {
    "serving": (
        "bench.serving.serving",
        "token rates, latencies and memory under seven loads, compared with vLLM or transformers",
    ),
    "http": (
        "bench.serving.http",
        "token rates and CPU time of completions and chats over HTTP, compared with gRPC and with vLLM's server",
    ),
    "kinds": (
        "bench.serving.kinds",
        "token rates of models with windows, states and latents, compared with vLLM's CPU build and transformers",
    ),
    "images": (
        "bench.serving.images",
        "images per second, first tokens and pauses beside images, compared with vLLM's CPU build and transformers",
    ),
    "load": (
        "bench.serving.load",
        "rates and percentiles of a load, from a trace or a distribution, on a running server over gRPC or HTTP",
    ),
    "forms": ("bench.serving.forms", "the cost of sampling by a JSON schema, compared with vLLM"),
    "embeddings": (
        "bench.serving.embeddings",
        "embedded texts per second of the Embed call, compared with sentence-transformers",
    ),
    "transcribe": (
        "bench.serving.transcribe",
        "seconds of transcription for a second of sound, compared with faster-whisper and transformers",
    ),
    "fidelity": (
        "bench.model.fidelity",
        "the error of log-probabilities against float32, compared with transformers in bfloat16 and vLLM",
    ),
    "long_context": (
        "bench.model.long_context",
        "the perplexity of a long text, compared with transformers, and its KV cache with and without groups of layers",
    ),
    "packed": (
        "bench.model.packed",
        "token rates of a GGUF file with its stored weights, in 4 bits and in bfloat16, compared with llama.cpp",
    ),
    "states": (
        "bench.model.states",
        "the time of operations on states, such as linear attention's, compared with transformers' functions",
    ),
    "adapters": (
        "bench.model.adapters",
        "token rates with 1, 4 and 16 adapters, compared with the base model and with adapters in vLLM",
    ),
    "trained_adapter": (
        "bench.model.trained_adapter",
        "whether an adapter that was trained with PEFT gives the trained answers",
    ),
    "trained_images": (
        "bench.model.trained_images",
        "whether a model that was trained here to read images answers right about new images",
    ),
    "speculation": (
        "bench.model.speculation",
        "tokens per second with and without drafts, compared with n-gram drafts in vLLM",
    ),
    "acceptance": (
        "bench.model.acceptance",
        "the acceptance rate of a draft model's drafts, under three acceptance rules",
    ),
    "trained_head": (
        "bench.model.trained_head",
        "trains an EAGLE-3 draft head, and measures the acceptance rate of its drafts",
    ),
    "scheduler": (
        "bench.planning.scheduler",
        "the CPU time of pagewire's scheduler for each step, compared with vLLM's scheduler",
    ),
    "simulate": (
        "bench.planning.simulate",
        "scheduling policies and placement, by simulating whole traces on a virtual clock",
    ),
    "fleet": (
        "bench.fleet.__main__",
        "pauses after a killed worker, the workers that one scheduler keeps busy, and the cost of one scheduler",
    ),
    "kernels_gpu": (
        "bench.kernels_gpu",
        "the speed of attention on a GPU, compared with torch's and FlashInfer's attention",
    ),
    "steps_gpu": (
        "bench.steps_gpu",
        "the time of decode steps on a GPU, compared with the limit of the GPU's memory bandwidth",
    ),
    "serve_gpu": ("bench.gpu.serve_gpu", "token rates and latencies of serving on a GPU, compared with vLLM"),
    "pack": ("bench.gpu.pack", "nothing: it packs vLLM for a GPU machine without a network"),
}
"""Each benchmark's module, whose main() is called, and what it measures. bench/README.md has more details."""


def main(program: str = "python -m bench") -> None:
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {name:16}{measures}" for name, (_, measures) in BENCHES.items())
        sys.stdout.write(f"{program} NAME [options]; NAME --help has the options.\n\n{rows}\n")
        return
    if name not in BENCHES:
        sys.exit(f"{program}: {name!r} is no benchmark; there are {', '.join(BENCHES)}")
    sys.argv = [f"{program} {name}", *options]
    import_module(BENCHES[name][0]).main()


if __name__ == "__main__":
    main()
