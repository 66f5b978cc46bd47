"""Serve the default model, put loads on it, and print its figures beside transformers': python -m bench.

The last line is JSON; `ratios` are our output tokens a second over the peer's.
"""

import asyncio
import json
import sys
from dataclasses import asdict

from bench.load import Load, drive
from bench.peer_transformers import Transformers
from pagewire_client import LocalServer
from pagewire_common.settings import load_settings
from worker_service.model_store import find_model
from worker_service.settings import WorkerSettings

LOADS = (Load(128, 128, 1), Load(128, 128, 8), Load(128, 128, 32))


def main() -> None:
    out = sys.stdout
    with LocalServer() as server:
        ours = {load: asyncio.run(drive(server.target, load)) for load in LOADS}
    peer = Transformers(find_model("default", load_settings(WorkerSettings, "bench", []).cache.expanduser()).path)
    theirs = {load: peer.output_tokens_per_second(load) for load in LOADS}
    out.write("load (prompt/output x streams)   output tok/s   TTFT ms   TPOT ms   transformers tok/s   ratio\n")
    for load, figures in ours.items():
        ratio = figures.output_tokens_per_second / theirs[load]
        out.write(
            f"{load!s:31} {figures.output_tokens_per_second:13.1f} {figures.ttft_ms:9.0f} {figures.tpot_ms:9.1f} "
            f"{theirs[load]:20.1f} {ratio:7.2f}\n"
        )
    report = {
        "pagewire": {str(load): asdict(figures) for load, figures in ours.items()},
        "transformers": {str(load): rate for load, rate in theirs.items()},
        "ratios": {str(load): ours[load].output_tokens_per_second / theirs[load] for load in LOADS},
    }
    out.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
