"""Vectors are those of transformers, whatever is asked of them, whatever runs beside them, and whatever happens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from embedding_helpers import (
    TEXTS,
    SlowEncoder,
    assert_close,
    assert_nothing_is_left,
    encoder_settings,
    serving,
    tensor,
)
from engines import until
from scheduler_in_process import scheduler
from tiny_adapters import write_adapter
from tiny_encoder import FAMILIES, write_encoder, write_modules
from worker_in_process import slow_down, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import POOLING_ALL, POOLING_CLS, POOLING_LAST, POOLING_MEAN, Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from scheduler_service.recording.replayer import Replayer

POOLINGS = [POOLING_CLS, POOLING_MEAN, POOLING_LAST, POOLING_ALL]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def slow(encoder: Path) -> SlowEncoder:
    return SlowEncoder(encoder)


@pytest.fixture(scope="module")
def slow_llama(tiny_model_directory: Path) -> SlowEncoder:
    return SlowEncoder(tiny_model_directory)


# ---- what is asked for


@pytest.mark.parametrize("normalize", [True, False])
async def test_an_encoder_gives_the_vectors_of_transformers(encoder: Path, slow: SlowEncoder, normalize: bool) -> None:
    async with serving(encoder, **encoder_settings()) as (one, _), Client(one.target) as client:
        model = await client.get_model()
        assert (list(model.tasks), model.embedding_size, model.context_length) == (["embed", "score"], 48, 66)
        for pooling in POOLINGS:
            for dimensions in (0, 10):
                found = await client.embed(TEXTS, pooling=pooling, dimensions=dimensions, normalize=normalize)
                expected = [slow.vectors(text, pooling, dimensions or None, normalize=normalize) for text in TEXTS]
                assert_close(found, expected)
        assert [one.usage.prompt_tokens for one in found] == [len(slow.states(text)) for text in TEXTS]
        (worker,) = one.engine.workers.all
        assert worker.scheduler is not None
        assert worker.scheduler.blocks.device.num_blocks == 0


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_served(family: str, tmp_path: Path) -> None:
    """As it was trained, where nothing else is asked for."""
    folder = write_encoder(tmp_path / family, family)
    write_modules(folder, "cls_token", max_length=44)
    slow = SlowEncoder(folder)
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        assert (await client.get_model()).context_length == 44
        found = await client.embed(TEXTS)
        assert_close(found, [slow.vectors(text, POOLING_CLS, normalize=False) for text in TEXTS])


async def test_a_model_that_generates_gives_vectors_too(tiny_model_directory: Path, slow_llama: SlowEncoder) -> None:
    """In chunks, of any pooling; where nothing is said, the last token's, 1 long."""
    settings = {"long_prefill_token_threshold": 9, "max_num_batched_tokens": 16}
    async with serving(tiny_model_directory, settings) as (one, _), Client(one.target) as client:
        assert list((await client.get_model()).tasks) == ["generate", "embed", "score"]
        assert_close(await client.embed(TEXTS), [slow_llama.vectors(text, POOLING_LAST) for text in TEXTS])
        for pooling in POOLINGS:
            found = await client.embed(TEXTS, pooling=pooling)
            assert_close(found, [slow_llama.vectors(text, pooling) for text in TEXTS])


async def test_numbers_may_have_16_bits_and_texts_may_be_token_ids(encoder: Path, slow: SlowEncoder) -> None:
    request = pb.EmbedRequest(number_type=pb.NUMBER_TYPE_FLOAT16, normalize=False)
    for number, text in enumerate(TEXTS):
        if number % 2:
            request.inputs.add(text=text)
        else:
            request.inputs.add().token_ids.ids.extend(slow.tokenizer(text)["input_ids"])
    async with serving(encoder, **encoder_settings()) as (one, _), Client(one.target) as client:
        responses = [response async for response in client._stub.Embed(request)]
    assert [response.index for response in responses] == list(range(len(TEXTS)))  # in order
    for text, response in zip(TEXTS, responses, strict=True):
        found = np.frombuffer(response.vectors, "<f2").astype(np.float32)
        np.testing.assert_allclose(found, slow.vectors(text, normalize=False)[0], rtol=2e-3, atol=2e-3)


async def test_a_text_that_is_too_long_is_refused_or_cut(encoder: Path, slow: SlowEncoder) -> None:
    """Cut where the tokenizer would cut it: what the model expects at the end stays there."""
    async with serving(encoder, **encoder_settings()) as (one, _), Client(one.target) as client:
        for long in ("a" * 65, "b" * 10_000):
            with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[1\] has more tokens than the 66") as error:
                await client.embed(["short", long])
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            short, cut = await client.embed(["short", long], truncate=True)
            assert_close([short, cut], [slow.vectors("short"), slow.vectors(long[:64])])
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[0\]\.token_ids has 67 tokens"):
            await client.embed([[5] * 67])
        (cut,) = await client.embed([[5] * 67], truncate=True)
        assert torch.equal(tensor(cut), tensor((await client.embed([[5] * 66]))[0]))


async def test_vectors_of_tokens_come_in_messages_that_any_client_takes(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, max_position_embeddings=1200, hidden_size=960, num_hidden_layers=1)
    settings = encoder_settings() | {"max_num_batched_tokens": 1200}
    async with serving(folder, **settings) as (one, _), Client(one.target) as client:
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a" * 1100)], pooling=POOLING_ALL)
        sizes = [len(response.vectors) async for response in client._stub.Embed(request)]
    assert sum(sizes) == 1102 * 960 * 4
    assert max(sizes) <= 1 << 20


# ---- beside others


async def outputs(client: Client, prompts: list[str]) -> list[list[int]]:
    found = await asyncio.gather(*(collect(client, prompt, GREEDY) for prompt in prompts))
    return [completion.outputs[0].token_ids for completion in found]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_vectors_and_streams_do_not_change_each_other(
    mode: str, tiny_model_directory: Path, slow_llama: SlowEncoder, tmp_path: Path
) -> None:
    """Through preemption and swapping, and every decision can be replayed."""
    prompts = [f"{text} {number}" for text in TEXTS for number in range(4)]
    recording = tmp_path / "recording"
    settings: dict[str, Any] = {"preemption_mode": mode, "record": recording, "long_prefill_token_threshold": 8}
    async with serving(tiny_model_directory, num_gpu_blocks_override=512) as (one, _), Client(one.target) as client:
        expected = await outputs(client, prompts)
    async with (
        serving(tiny_model_directory, settings, num_gpu_blocks_override=24) as (one, _),
        Client(one.target) as client,
    ):
        embeds = [client.embed(TEXTS * 6, pooling=pooling) for pooling in POOLINGS]
        tokens, *found = await asyncio.gather(outputs(client, prompts), *embeds)
        (worker,) = one.engine.workers.all
        assert worker.scheduler is not None
        assert sum(worker.scheduler.num_preemptions.values()) > 0
        assert tokens == expected
        for pooling, embeddings in zip(POOLINGS, found, strict=True):
            assert_close(embeddings, [slow_llama.vectors(text, pooling) for text in TEXTS] * 6)
    assert sum(1 for _ in Replayer().run(recording)) > 100


async def test_vectors_share_prefixes_where_the_last_state_is_enough(tiny_model_directory: Path) -> None:
    """And what they computed is found by others, whatever they are."""
    text = "one two three " * 4
    async with serving(tiny_model_directory) as (one, _), Client(one.target) as client:
        (first,) = await client.embed([text], pooling=POOLING_MEAN)
        (mean,) = await client.embed([text], pooling=POOLING_MEAN)
        (last,) = await client.embed([text + "?"], pooling=POOLING_LAST)
        completion = await collect(client, text, GREEDY)
    assert (first.usage.cached_tokens, mean.usage.cached_tokens) == (0, 0)
    assert (last.usage.cached_tokens, completion.cached_tokens) == (56, 48)
    assert torch.equal(tensor(first), tensor(mean))


async def test_adapters_apply_to_vectors(tiny_model_directory: Path, adapters: Path) -> None:
    names = ["", "one", "two", "three"]
    settings = {"lora_dir": adapters}
    async with serving(tiny_model_directory, settings, max_loras=2) as (one, _), Client(one.target) as client:
        alone = [await client.embed(TEXTS, lora_name=name) for name in names]
        together = await asyncio.gather(*(client.embed(TEXTS, lora_name=name) for name in names * 2))
    for found, expected in zip(together, alone * 2, strict=True):
        assert_close(found, [tensor(one) for one in expected])
    vectors = [tensor(found[0]) for found in alone]
    assert all(not torch.allclose(vectors[0], other, atol=1e-3) for other in vectors[1:])
    assert len({found[0].model_fingerprint for found in alone}) == 4


async def test_a_call_keeps_the_adapter_that_it_named(tiny_model_directory: Path, tmp_path: Path) -> None:
    """Though its name comes to mean another one in the meantime."""
    folder = tmp_path / "adapters"
    write_adapter(folder / "same", 1)
    async with (
        serving(tiny_model_directory, {"lora_dir": folder}, max_loras=2) as (one, worker),
        Client(one.target) as client,
    ):
        slow_down(worker, 0.005)
        call = asyncio.create_task(client.embed(["abc"] * 600, lora_name="same"))
        await until(lambda: len(one.engine.requests.in_flight) > 0)
        (folder / "same").rename(tmp_path / "old")
        write_adapter(folder / "same", 2)
        async with Admin(one.admin_target) as admin:
            await admin.load_adapter("same")
        assert not call.done()
        (new,) = await client.embed(["abc"], lora_name="same")
        first, *others = await call
    assert {found.model_fingerprint for found in others} == {first.model_fingerprint} != {new.model_fingerprint}
    assert_close(others, [tensor(first)] * 599)
    assert not torch.allclose(tensor(first), tensor(new), atol=1e-3)


@pytest.mark.parametrize("kind", ["encoder", "model that generates"])
async def test_a_lost_worker_is_not_seen(
    kind: str, encoder: Path, slow: SlowEncoder, tiny_model_directory: Path, slow_llama: SlowEncoder
) -> None:
    """Though it had computed parts of texts, vectors of their tokens had been sent, and it had streams beside them."""
    model, oracle = (encoder, slow) if kind == "encoder" else (tiny_model_directory, slow_llama)
    settings = encoder_settings() if kind == "encoder" else {}
    number, chunks = (20, {}) if kind == "encoder" else (6, {"max_num_batched_tokens": 16})
    async with (
        worker_in_process(model, **settings) as first,
        worker_in_process(model, **settings) as second,
        scheduler(first.address, second.address, model=str(model), **chunks) as one,
    ):
        await one.engine.model()
        await until(lambda: len(one.engine.workers.serving) == 2)
        (lost,) = [worker for worker in one.engine.workers.all if worker.client.address == first.address]
        for worker in (first, second):
            slow_down(worker, 0.005)
        async with Client(one.target) as client:
            calls = [asyncio.create_task(client.embed(TEXTS * number, pooling=pooling)) for pooling in POOLINGS]
            streams = asyncio.create_task(outputs(client, [] if kind == "encoder" else TEXTS))
            await until(lambda: lost.num_steps > 3)
            await first.server.server.stop(None)
            for pooling, call in zip(POOLINGS, calls, strict=True):
                assert_close(await call, [oracle.vectors(text, pooling) for text in TEXTS] * number)
            assert await streams == await outputs(client, [] if kind == "encoder" else TEXTS)
        assert lost.num_losses == 1


async def test_a_worker_that_was_trained_to_be_pooled_otherwise_is_another_model(tmp_path: Path) -> None:
    one_way = write_modules(write_encoder(tmp_path / "a" / "model"), "cls_token")
    another = write_modules(write_encoder(tmp_path / "b" / "model"), "mean_tokens")
    async with (
        worker_in_process(one_way, **encoder_settings()) as first,
        worker_in_process(another, **encoder_settings()) as second,
    ):
        first_info, second_info = first.worker.info, second.worker.info
    assert first_info.model_fingerprint != second_info.model_fingerprint


# ---- what is refused, and what is left


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no texts": ({"inputs": []}, "inputs is empty"),
    "too many texts": ({"inputs": [pb.EmbedInput(text="a")] * 2049}, "inputs has 2049 entries; at most 2048"),
    "an input of nothing": ({"inputs": [pb.EmbedInput()]}, r"inputs\[0\] is missing"),
    "no tokens": ({"inputs": [pb.EmbedInput(token_ids=pb.TokenIds())]}, r"inputs\[0\]\.token_ids is empty"),
    "an unknown token": ({"inputs": [pb.EmbedInput(token_ids=pb.TokenIds(ids=[261]))]}, "the vocabulary has 261"),
    "too many dimensions": ({"dimensions": 49}, "dimensions is 49; this model's vectors have 48"),
    "an unknown pooling": ({"pooling": 9}, "pooling is 9, which is none of"),
    "an unknown type": ({"number_type": 9}, "number_type is 9, which is none of"),
    "a priority": ({"priority": 1}, "does not run with --scheduling-policy priority"),
    "a long tenant": ({"tenant": "t" * 257}, "tenant has 257 characters"),
    "a long salt": ({"cache_salt": "t" * 257}, "cache_salt has 257 characters"),
    "an adapter": ({"lora_name": "one"}, "there is no adapter 'one'"),
}


async def test_what_cannot_be_done_is_refused_in_a_sentence(encoder: Path) -> None:
    async with serving(encoder, **encoder_settings()) as (one, _), Client(one.target, retry_for=0) as client:
        for change, sentence in REFUSED.values():
            request = pb.EmbedRequest(**{"inputs": [pb.EmbedInput(text="a")]} | change)
            with pytest.raises(grpc.aio.AioRpcError, match=sentence) as error:
                await client._stub.Embed(request).read()
            assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        with pytest.raises(grpc.aio.AioRpcError, match="this model generates no text") as error:
            await collect(client, "a", GREEDY)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="fields") as error:
            await client._stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 100_000)).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await assert_nothing_is_left(one)


async def test_vectors_that_would_not_fit_a_message_are_refused(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path, hidden_size=80)
    largest = encoder_settings() | {"max_num_batched_tokens": 1 << 17}
    async with serving(encoder, **largest) as (one, _), Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="a step of 131072 vectors of 80 numbers has 40 MiB, and 16 are"):
            await client.embed(["a"], pooling=POOLING_ALL)
        assert await client.embed(["a"], pooling=POOLING_ALL, dimensions=32)
        assert await client.embed(["a"])


async def test_an_encoder_that_cannot_be_served_says_why(encoder: Path) -> None:
    from pagewire_common.start_error import StartError

    for change, sentence in (
        ({"max_num_batched_tokens": 65}, "an encoder computes a text whole, and .* reads up to 66 tokens"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config is for models that generate text"),
        ({"max_loras": 1}, "--max-loras is for models that generate text"),
        ({"num_gpu_blocks_override": 8}, "--num-gpu-blocks-override is for models that generate text"),
        ({"quantization": "int8"}, "--quantization int8 is for the families that run natively"),
        ({"max_model_len": 67}, "--max-model-len is 67; the model's limit is 66"),
    ):
        with pytest.raises(StartError, match=sentence):
            async with worker_in_process(encoder, **encoder_settings() | change):
                pass
    settings = {"max_num_batched_tokens": 65}
    async with (
        worker_in_process(encoder, **encoder_settings()) as worker,
        scheduler(worker.address, model=str(encoder), **settings) as one,
    ):
        await until(lambda: "an encoder computes a text whole" in str(one.engine.workers.all[0].last_error))


async def test_an_encoder_of_long_texts_needs_no_flag(tmp_path: Path) -> None:
    longest = write_encoder(tmp_path, max_position_embeddings=2100)
    settings = encoder_settings()
    del settings["max_num_batched_tokens"]
    async with serving(longest, **settings) as (one, _), Client(one.target) as client:
        assert len((await client.embed(["a" * 2090]))[0].vector) == 48


async def test_a_model_without_a_tokenizer_takes_token_ids(encoder: Path, slow: SlowEncoder, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    config = json.loads((encoder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    settings = encoder_settings() | {"load_format": "dummy"}
    async with serving(folder, **settings) as (one, _), Client(one.target) as client:
        assert len((await client.embed([[5, 6, 7]]))[0].vector) == 48
        with pytest.raises(grpc.aio.AioRpcError, match="it has no tokenizer; use token ids"):
            await client.embed(["a"])
