"""What the scheduler costs: python -m bench.scheduler. The last line is JSON.

`us_per_seq_step` is schedule + update in steady decoding with prefix caching on, in microseconds for each running
sequence and step; the codec's figure is for one step of 256 sequences, there and back, of which one in 16 gets a block.
"""

import json
import sys
import time

from pagewire.v1 import scheduler_output_pb2 as pb
from scheduler_service.codec import decode_model_output, encode_scheduler_output
from scheduler_service.core import (
    ModelOutput,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)

SIZES = (32, 256, 1024)
PROMPT_TOKENS = 64
NUM_STEPS = 400
NUM_ROUNDS = 5


def make_scheduler(num_seqs: int, *, num_waiting: int = 0) -> Scheduler:
    """A scheduler with `num_seqs` running sequences, past their prompts, and others that have no room yet."""
    config = SchedulerConfig(
        block_size=16,
        num_device_blocks=num_seqs * 200,
        max_num_batched_tokens=max(2048, num_seqs),
        max_num_seqs=num_seqs,
        max_model_len=1 << 20,
    )
    scheduler = Scheduler(config, WaitingQueue())
    sampling = SamplingParams(max_tokens=1 << 19, eos_token_ids=frozenset({2}))
    for number in range(num_seqs + num_waiting):
        scheduler.add_request(SequenceGroup(str(number), range(number, number + PROMPT_TOKENS), sampling))
    while scheduler.get_request_counts()[0] < num_seqs or not all_decoding(scheduler):
        step(scheduler)
    return scheduler


def all_decoding(scheduler: Scheduler) -> bool:
    return all(s.num_output_tokens > 0 for group in scheduler.running for s in group.sequences)


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    answer = ModelOutput(output.step_id, [7] * sum(scheduled.samples for scheduled in output.scheduled))
    scheduler.update_from_output(output, answer)
    return output


def us_per_step(scheduler: Scheduler, num_seqs: int) -> float:
    """The fastest of several rounds: noise only ever adds."""
    best = float("inf")
    tokens = [7] * num_seqs
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            output = scheduler.schedule()
            scheduler.update_from_output(output, ModelOutput(output.step_id, tokens))
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / NUM_STEPS


def codec_cost() -> tuple[float, int]:
    """Microseconds of encoding a step and decoding its answer, serialisation included, and the step's bytes."""
    scheduler = make_scheduler(256)
    outputs = [step(scheduler) for _ in range(16)]
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        for output in outputs:
            data = encode_scheduler_output(output, 1_700_000_000_000_000_000).SerializeToString()
            answer = pb.ModelOutput(epoch=1, step_id=output.step_id, token_ids=range(1000, 1256)).SerializeToString()
            decode_model_output(pb.ModelOutput.FromString(answer))
        best = min(best, time.perf_counter() - began)
    size = max(len(encode_scheduler_output(o, 1_700_000_000_000_000_000).SerializeToString()) for o in outputs)
    return 1e6 * best / len(outputs), size if size else len(data)


def main() -> None:
    out = sys.stdout
    per_seq = {size: us_per_step(make_scheduler(size), size) / size for size in SIZES}
    waiting = {count: us_per_step(make_scheduler(256, num_waiting=count), 256) for count in (10, 1_000_000)}
    codec_us, codec_bytes = codec_cost()
    out.write("running sequences   us a sequence and step\n")
    for size, cost in per_seq.items():
        out.write(f"{size:17d} {cost:24.2f}\n")
    for count, cost in waiting.items():
        out.write(f"256 running, {count:9,d} waiting: {cost:8.1f} us a step\n")
    out.write(f"codec, 256 sequences: {codec_us:.0f} us, {codec_bytes} bytes\n")
    report = {
        "us_per_seq_step": per_seq,
        "us_per_step_by_waiting": waiting,
        "codec_us": codec_us,
        "codec_bytes": codec_bytes,
    }
    out.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
