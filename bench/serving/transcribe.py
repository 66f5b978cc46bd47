"""Compares the speed of the Transcribe call with faster-whisper and transformers, in turn.

python -m bench transcribe MODEL SOUND [--rounds 3] [--streams 1,4] [--dtype float32] [--peers FOLDER]

MODEL is the folder of a Whisper model. Prints real-time factors: seconds of computing for a second of sound. All decode
greedily, with timestamps, in English. Several streams are simultaneous Transcribe calls of sounds that differ in their
first samples; the others transcribe one after the other. If faster-whisper and ctranslate2 are not installed, install
them for `--peers`: `pip install --target FOLDER faster-whisper`. The model is converted once, into the subfolder `ct2`
of MODEL.
"""

import argparse
import asyncio
import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from pagewire_client import Client, LocalServer, Sound

Samples = Any


def variants(samples: Samples, count: int) -> list[Samples]:
    """Copies of the sound that begin slightly later each, so that no cache contains them."""
    return [np.roll(samples, 160 * number) for number in range(count)]


def wav(samples: Samples) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16_000, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def ours(target: str, sounds: Sequence[Samples]) -> list[str]:
    async def one(client: Client, samples: Samples) -> str:
        events = client.transcribe(Sound(wav(samples), "audio/wav"), language="en")
        return "".join([event.segment.text async for event in events])

    async def run() -> list[str]:
        async with Client(target) as client:
            return await asyncio.gather(*(one(client, samples) for samples in sounds))

    return asyncio.run(run())


def transformers_peer(model: str, dtype: str) -> Callable[[Samples], str]:
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    processor: Any = AutoProcessor.from_pretrained(model)
    network: Any = WhisperForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def transcribe(samples: Samples) -> str:
        with torch.inference_mode():
            features = processor(samples, sampling_rate=16_000, return_tensors="pt").input_features.to(network.dtype)
            found = network.generate(features, language="en", task="transcribe", return_timestamps=True)
        return str(processor.batch_decode(found, skip_special_tokens=True)[0])

    return transcribe


def faster_whisper_peer(model: str, dtype: str, folder: Path | None) -> Callable[[Samples], str]:
    if folder is not None:
        sys.path.append(str(folder))  # appended, so that packages which are already installed take precedence
    import ctranslate2
    from faster_whisper import WhisperModel

    converted = Path(model) / "ct2"
    if not converted.is_dir():
        converter = ctranslate2.converters.TransformersConverter(model, copy_files=["tokenizer.json"])
        converter.convert(str(converted), quantization=dtype)
    network = WhisperModel(str(converted), device="cpu", compute_type=dtype, cpu_threads=torch.get_num_threads())

    def transcribe(samples: Samples) -> str:
        segments, _ = network.transcribe(
            samples, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        return "".join(segment.text for segment in segments)

    return transcribe


def measure(arguments: argparse.Namespace, target: str) -> None:
    samples, rate = soundfile.read(arguments.sound, dtype="float32")
    assert rate == 16_000, "a file of 16,000 samples a second is needed"
    seconds = len(samples) / rate
    write = sys.stdout.write
    peers = {
        "faster-whisper": faster_whisper_peer(arguments.model, arguments.dtype, arguments.peers),
        "transformers": transformers_peer(arguments.model, arguments.dtype),
    }
    write(f"{seconds:.1f} s of sound, {torch.get_num_threads()} threads, {arguments.dtype}; real-time factors\n")
    for count in arguments.streams:
        systems: dict[str, Callable[[list[Samples]], list[str]]] = {
            "Transcribe": lambda sounds: ours(target, sounds),
            **{name: lambda sounds, peer=peer: list(map(peer, sounds)) for name, peer in peers.items()},  # type: ignore[misc]
        }
        found: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(arguments.rounds + 1):
            sounds = variants(np.roll(samples, 16 * (number + 1)), count)
            for name, transcribe in systems.items():
                began = time.perf_counter()
                texts = transcribe(sounds)
                if number:  # the first round is a warm-up and does not count
                    found[name].append((time.perf_counter() - began) / (seconds * count))
                elif count == 1:
                    write(f"{name}: {texts[0].strip()}\n")
        own = statistics.median(found["Transcribe"])
        for name, factors in found.items():
            median = statistics.median(factors)
            low, high = min(factors), max(factors)
            share = f"{median / own:.2f} of Transcribe's"
            write(f"{count} at once  {name:14}  {median:.4f} ({low:.4f} to {high:.4f})  {share}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("sound", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peers", type=Path, help="a folder that contains faster-whisper")
    arguments = parser.parse_args()
    with LocalServer(arguments.model, worker_arguments=["--dtype", arguments.dtype, "--no-forms"]) as server:
        measure(arguments, server.target)


if __name__ == "__main__":
    main()
