"""A real worker with a fault in its model runner: python -m faulty_worker, with a worker's own flags.

- SIGUSR1: the next step runs out of memory, with torch's error.
- PAGEWIRE_TEST_POISON: a step with a prompt that contains this token ends the process with the status POISONED.
- PAGEWIRE_TEST_STEP_SECONDS: the shortest step, until SIGUSR2.
- PAGEWIRE_TEST_GUESSES_ALWAYS: the room for drafts is always used, faster or not.
"""

import os
import signal
import time
from typing import Any

import torch

from pagewire_common.serving.server import run
from pagewire_common.settings import load_settings
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.serving.server import serve
from worker_service.settings import WorkerSettings
from worker_service.speculation import drafter

POISONED = 66
_poison = int(os.environ.get("PAGEWIRE_TEST_POISON", "-1"))
_step_seconds = float(os.environ.get("PAGEWIRE_TEST_STEP_SECONDS", "0"))
_out_of_memory = False
_launch = ModelRunner.launch


def _run_out_of_memory(*_: object) -> None:
    global _out_of_memory
    _out_of_memory = True


def _take_no_longer(*_: object) -> None:
    global _step_seconds
    _step_seconds = 0.0


def _faulty(self: ModelRunner, output: Any, chunks: Any, before: Any = None) -> Any:
    global _out_of_memory
    began = time.monotonic()
    if _out_of_memory:
        _out_of_memory = False
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if any(_poison in new.token_ids[: new.num_prompt_tokens] for new in output.new_sequences):
        os._exit(POISONED)
    step = _launch(self, output, chunks, before)
    time.sleep(max(0.0, began + _step_seconds - time.monotonic()))
    return step


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _run_out_of_memory)
    signal.signal(signal.SIGUSR2, _take_no_longer)
    ModelRunner.launch = _faulty  # type: ignore[method-assign]
    if "PAGEWIRE_TEST_GUESSES_ALWAYS" in os.environ:
        drafter.numbers_of_drafts = lambda _, mosts, *__, **___: list(mosts)
    settings = load_settings(WorkerSettings, "worker_service")
    run("worker_service", lambda: serve(settings))
