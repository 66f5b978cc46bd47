"""Whatever the core plans with images, the worker's session accepts, also if outputs are late in their forms."""

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

from fake_worker import FakeWorker
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import (
    IMAGE_TOKEN,
    IMAGES,
    random_config,
    random_request,
    sharing,
    with_encoder_cache,
    with_images,
    with_shared_prefixes,
)

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from scheduler_service.core import ModelOutput, Scheduler, SchedulerConfig, SchedulerOutput, WaitingQueue
from scheduler_service.wire.codec import encode_scheduler_output
from worker_service.serving.codec.steps import decode_scheduler_output
from worker_service.session.session import Session
from worker_service.session.step import Limits


def layout(width: int, _: int) -> ImageLayout:
    """The width stands for the image."""
    sizes = [*IMAGES.values()][width - 1]
    parts = [ImagePart(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
    return ImageLayout((IMAGE_TOKEN,) * sum(sizes), tuple(parts), None)


def limits_of(config: SchedulerConfig) -> Limits:
    return Limits(
        block_size=config.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        vocabulary_size=100_000,
        images=ImageLayouts("qwen2_vl", IMAGE_TOKEN, IMAGE_TOKEN, layout),
        encoder_cache_size=config.encoder_cache_size,
        encoder_budget=config.encoder_budget,
    )


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_a_session_accepts_every_step(seed: int, num_requests: int, most_in_flight: int, share: bool) -> None:
    rng = Random(seed)
    config = with_encoder_cache(random_config(rng, (5, 8, 10, 14, 20, 30)), seed)
    config = replace(config, num_lookahead_slots=0, max_model_len=60)
    config = with_shared_prefixes(config, seed) if share else config
    scheduler, worker = Scheduler(config, WaitingQueue()), FakeWorker(config, reading=rng)
    limits = limits_of(config)
    session = Session(1, limits)
    for number in range(num_requests):
        request = replace(random_request(rng, number), adapter_id="")
        form = rng.choice(["", "", "a form"])
        request = replace(request, sampling=replace(request.sampling, beam_width=0, form=form))
        request = sharing(request) if share else request
        request = with_images(Random(number % 3) if share else rng, request)
        scheduler.add_request(request.group())
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    while scheduler.has_work or in_flight:
        output = scheduler.schedule()
        if not output.is_empty:
            step = decode_scheduler_output(encode_scheduler_output(output, epoch=1), limits)
            chunks = session.apply(step)
            session.with_images(step, chunks)
            answer = worker.execute(output)
            session.advance(chunks)
            session.fill_in(chunks, answer.token_ids, answer.num_tokens)
            in_flight.append((output, answer))
        if in_flight and (output.is_empty or len(in_flight) == most_in_flight):
            scheduler.update_from_output(*in_flight.pop(0))
    assert not session.sequences
