"""Embeddings in place of a prompt's tokens: the tokens' own give their outputs, whatever happens; others give
transformers'."""

import asyncio
from pathlib import Path

import grpc
import pytest
import torch
from embeds_helpers import ASKED, answers, embeddings_of, expected, serving_embeds, with_embeds
from engines import until
from scheduler_in_process import scheduler
from slow_heads import write_head
from speculating import Plain, num_preemptions
from test_resumption import Caller, Stream
from torch import Tensor
from worker_in_process import worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, PromptEmbeds, SamplingParams
from pagewire_client.llm import collect
from pagewire_client.prompts import set_prompt
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.recording.format import read_events
from scheduler_service.recording.replayer import Replayer

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def table(tiny_model_directory: Path) -> Tensor:
    return embeddings_of(tiny_model_directory)


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
async def test_embeddings_of_tokens_give_the_outputs_of_the_tokens(
    preemption_mode: str, plain: Plain, table: Tensor, tiny_model_directory: Path, tmp_path: Path
) -> None:
    """Also with drafts of both kinds. And every decision can be replayed from a recording without embeddings."""
    recording, speculation = tmp_path / "recording", {"method": "ngram"}
    if preemption_mode == "swap":
        speculation = {"method": "draft_model", "model": str(tiny_model_directory)}
    settings = {"num_gpu_blocks_override": 40, "forms": True, "speculative_config": speculation}
    async with serving_embeds(
        tiny_model_directory, settings=settings, preemption_mode=preemption_mode, record=recording
    ) as (one, _):
        async with Client(one.target) as client:
            found = await answers(client, table, ASKED)
        assert found == [expected(plain, asked) for asked in ASKED]
        assert num_preemptions(one)
        assert one.engine.workers.all[0].drafts.verified.num_tokens
    assert sum(1 for _ in Replayer().run(recording)) > 100
    arrivals = [read.event.arrival for read in read_events(recording) if read.event.HasField("arrival")]
    items = [item for arrival in arrivals for item in arrival.items]
    assert len(items) == len(ASKED)
    assert all(len(item.digest) == 32 and item.num_bytes and not item.data for item in items)


async def test_they_do_when_their_worker_is_lost(plain: Plain, table: Tensor, tiny_model_directory: Path) -> None:
    asked = [one for one in ASKED if one[1] != "beams"]
    async with (
        worker_in_process(tiny_model_directory, forms=True) as first,
        worker_in_process(tiny_model_directory, forms=True) as second,
        scheduler(first.address, second.address, model=str(tiny_model_directory), enable_prompt_embeds=True) as one,
    ):
        await one.engine.model()
        await until(lambda: len(one.engine.workers.serving) == 2)
        lost = one.engine.workers.all[0]
        async with Client(one.target) as client:
            together = asyncio.create_task(answers(client, table, asked))
            await until(lambda: lost.num_steps > 20)
            await first.server.server.stop(None)
            assert await together == [expected(plain, one) for one in asked]
        assert lost.num_losses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
async def test_other_embeddings_give_the_outputs_of_transformers(
    dtype: torch.dtype, tiny_model_directory: Path
) -> None:
    """Through chunks, and again from the prefix cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_directory, dtype=torch.float32)
    embeddings = (0.2 * torch.randn(60, 64)).to(dtype)
    asked = {"inputs_embeds": embeddings[None].float(), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    (wanted,) = model.generate(**asked).tolist()
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with serving_embeds(tiny_model_directory, settings=settings) as (one, _), Client(one.target) as client:
        for num_cached in (0, 56):
            completion = await collect(client, PromptEmbeds.of(embeddings), GREEDY)
            assert completion.outputs[0].token_ids == wanted
            assert (completion.prompt_tokens, completion.cached_tokens) == (60, num_cached)
        other = PromptEmbeds.of(embeddings.roll(1, 0))
        assert (await collect(client, other, GREEDY)).cached_tokens == 0
        assert (await collect(client, [0] * 60, GREEDY)).cached_tokens == 0


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return [*range(70, 110)]


@pytest.mark.usefixtures("all_verified")
async def test_embeddings_go_with_adapters_and_with_a_head_that_drafts(
    tiny_model_directory: Path, adapters: Path, table: Tensor, token_ids: list[int], tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", hidden=64, vocabulary=259, eagle_aux_hidden_state_layer_ids=[2, 1, 0])
    settings = {"max_loras": 2, "speculative_config": {"method": "eagle3", "model": str(head)}}
    served = serving_embeds(tiny_model_directory, settings=settings, lora_dir=adapters)
    async with served as (one, _), Client(one.target) as client:
        found = []
        for name in ("", "one", "two"):
            for prompt in (token_ids, with_embeds(token_ids, table, 5), with_embeds(token_ids, table, 5)):
                completion = await collect(client, prompt, GREEDY, lora_name=name)
                found.append((completion.outputs[0].token_ids, completion.cached_tokens))
        outputs = [output for output, _ in found[::3]]
        assert outputs[0] != outputs[1] != outputs[2] != outputs[0]
        assert found == [(output, cached) for output in outputs for cached in (0, 0, 32)]
        assert one.engine.workers.all[0].drafts.verified.num_tokens


async def test_a_stream_of_embeddings_is_resumed_with_the_same_embeddings_alone(
    tiny_model_directory: Path, table: Tensor, token_ids: list[int]
) -> None:
    async with serving_embeds(tiny_model_directory) as (one, _):
        caller, whole, broken = Caller(one.target), Stream(), Stream()
        message = pb.GenerateRequest(request_id="a", sampling=SamplingParams(n=2, max_tokens=30, temperature=1, seed=3))
        set_prompt(message, with_embeds(token_ids, table, 5, 30))
        for response in (await caller.generate(message, whole))[:20]:
            broken.put(response)
        message.resume.CopyFrom(broken.resume)
        await caller.generate(message, broken)
        broken.assert_like(whole)
        await caller.channel.close()


async def test_embeddings_that_are_too_many_or_too_large_disturb_no_request_beside_them(
    tiny_model_directory: Path, table: Tensor, token_ids: list[int]
) -> None:
    async with serving_embeds(tiny_model_directory) as (one, _), Client(one.target) as client:
        (wanted,) = (await collect(client, token_ids, GREEDY)).outputs
        given = [torch.full((4, 64), 3e38), torch.zeros(60_000, 64), torch.zeros(70_000, 64), torch.zeros(90_000, 64)]
        beside, _, *refused = await asyncio.gather(
            collect(client, with_embeds(token_ids, table), GREEDY),
            *(collect(client, PromptEmbeds.of(tensor), GREEDY) for tensor in given),
            return_exceptions=True,
        )
        assert not isinstance(beside, BaseException)
        assert beside.outputs[0].token_ids == wanted.token_ids
        for error, reason in zip(
            refused, ("parts has 60000 tokens; the context", "bytes; at most", "larger"), strict=True
        ):
            assert isinstance(error, grpc.aio.AioRpcError)
            assert reason in str(error.details())


KEYS = [
    ApiKey(id="may", digest=digest_of("may"), tenant="t", prompt_embeds=True),
    ApiKey(id="not", digest=digest_of("not"), tenant="t"),
]


async def test_a_key_needs_a_permission_and_a_server_the_flag(
    tiny_model_directory: Path, table: Tensor, token_ids: list[int]
) -> None:
    prompt = with_embeds(token_ids, table)
    async with serving_embeds(tiny_model_directory, keyring=Keyring(KEYS)) as (one, _):
        async with Client(one.target, api_key="may") as client:
            assert (await client.get_model()).prompt_embeds_size == 64
            assert (await collect(client, prompt, GREEDY)).outputs
        async with Client(one.target, api_key="not") as client:
            with pytest.raises(grpc.aio.AioRpcError, match="this API key may not send prompt_embeds") as error:
                await collect(client, prompt, GREEDY)
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert (await collect(client, ["a", token_ids], GREEDY)).prompt_tokens == 41
    plain = serving_embeds(tiny_model_directory, enable_prompt_embeds=False)
    async with plain as (one, _), Client(one.target) as client:
        assert (await client.get_model()).prompt_embeds_size == 0
        with pytest.raises(grpc.aio.AioRpcError, match="runs without --enable-prompt-embeds") as error:
            await collect(client, prompt, GREEDY)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
