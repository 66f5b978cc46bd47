"""Images on their way through the engine: their data is sent once, and one that cannot be decoded ends its request."""

import asyncio
from pathlib import Path

import grpc
import pytest
from engines import running, submit, text_of
from fake_worker_service import FakeWorkerService, serving

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import ImagePart, PromptItem
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.wire.sampling import RequestSampling


def prompt_with(digest: bytes, **options: object) -> GenerationRequest:
    """Two parts of an image, of five tokens each."""
    data = b"image " + digest
    items = tuple(PromptItem(digest, 2 + 5 * n, 5, len(data), data, ImagePart(8, 6, n)) for n in range(2))
    sampling = RequestSampling(max_tokens=5, **options)  # type: ignore[arg-type]
    return GenerationRequest(request_id=digest.decode(), prompt_token_ids=[5] * 13, sampling=sampling, items=items)


async def test_the_data_of_an_image_is_sent_once_and_an_image_that_cannot_be_decoded_ends_its_request(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.encoder_cache_size = 20
    worker.undecodable = {b"bad"}
    async with serving(worker) as address, running(address) as engine:
        assert (await engine.model()).encoder_cache_size == 20
        state = await submit(engine, "other", [5], max_tokens=50)
        other = asyncio.create_task(text_of(engine, state))
        assert await text_of(engine, await engine.submit(prompt_with(b"good"))) == "ggggg"
        assert [(item.data, item.image.part) for item in worker.received] == [(b"image good", 0), (b"", 1)]
        for sampling in ({}, {"n": 2}):
            with pytest.raises(RequestError, match="the model could not read an image of the prompt") as error:
                await text_of(engine, await engine.submit(prompt_with(b"bad", **sampling)))
            assert error.value.code is grpc.StatusCode.INTERNAL
        assert await other == "g" * 50
        assert worker.num_sessions == 1
