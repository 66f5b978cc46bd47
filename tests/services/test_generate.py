"""Both services with a tiny model, seen by a client: outputs, bad input, and calls that end in every possible way."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from cluster import cluster_state, until_idle

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect


async def assert_nothing_is_held(target: str) -> None:
    (worker,) = (await until_idle(target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks == 64


async def test_every_index_ends_with_exactly_one_message_that_has_reason_and_usage(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        sampling = SamplingParams(n=3, max_tokens=5, temperature=1.0, seed=7, ignore_eos=True)
        messages = [message async for message in client.generate("hello", sampling)]
    last = {message.index: message for message in messages if message.finish_reason}
    assert sum(message.finish_reason != 0 for message in messages) == len(last) == 3
    for index, message in last.items():
        assert message.finish_reason == pb.FINISH_REASON_LENGTH
        assert (message.usage.prompt_tokens, message.usage.output_tokens) == (5, 5)
        mine = [m for m in messages if m.index == index]
        assert mine[-1] is message
        assert sum(len(m.token_ids) for m in mine) == 5
        assert [m.seed for m in mine if m.HasField("seed")] == [7]
    assert len({tuple(t for m in messages if m.index == i for t in m.token_ids) for i in range(3)}) == 3
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_text_token_ids_and_chat_are_the_same_prompt_when_their_tokens_are(tiny_server: LocalServer) -> None:
    sampling = SamplingParams(max_tokens=8)
    async with Client(tiny_server.target) as client:
        text = await collect(client, "naïve 🌍", sampling)
        token_ids = await client.tokenize("naïve 🌍")
        ids = await collect(client, token_ids, sampling)
        messages = [{"role": "user", "content": "hi"}]
        chat = await collect(client, messages, sampling)
        chat_ids = await collect(client, await client.tokenize(messages), sampling)
    assert text.outputs == ids.outputs
    assert chat.outputs == chat_ids.outputs


async def test_a_stop_string_ends_the_text_before_it_and_is_named(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, allowed_token_ids=range(67, 71))
        whole = (await collect(client, "hello", sampling)).outputs[0].text
        stop = whole[10:13]
        sampling.stop.append(stop)
        stopped = (await collect(client, "hello", sampling)).outputs[0]
        sampling.include_stop_str_in_output = True
        included = (await collect(client, "hello", sampling)).outputs[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert included.text == stopped.text + stop
    assert (stopped.finish_reason, stopped.stop_reason) == (pb.FINISH_REASON_STOP, stop)
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_a_stop_token_ends_the_output_and_is_named(tiny_server: LocalServer) -> None:
    sampling = SamplingParams(max_tokens=9, allowed_token_ids=[70], stop_token_ids=[70], min_tokens=0)
    async with Client(tiny_server.target) as client:
        (output,) = (await collect(client, "hello", sampling)).outputs
    assert output.token_ids == [70]
    assert output.text == ""
    assert (output.finish_reason, output.stop_reason) == (pb.FINISH_REASON_STOP, 70)


async def test_log_probabilities_come_with_every_token_and_prompt_token(tiny_server: LocalServer) -> None:
    sampling = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    async with Client(tiny_server.target) as client:
        completion = await collect(client, "hello", sampling)
        token_ids = await client.tokenize("hello")
    (output,) = completion.outputs
    assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:  # greedy: the chosen token is the likeliest
        assert entry.chosen.rank == 1
        assert entry.top[0].token_id == entry.chosen.token_id
        assert entry.top[0].logprob >= entry.top[1].logprob
    assert [entry.chosen.token_id for entry in completion.prompt_logprobs] == token_ids[1:]


async def test_abort_closes_the_stream_with_what_it_has(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        for _ in range(20):
            messages = []
            async for message in client.generate(
                "hello", SamplingParams(max_tokens=500, ignore_eos=True), request_id="mine"
            ):
                messages.append(message)
                if len(messages) == 1:
                    assert await client.abort("mine")
            assert not await client.abort("mine")
            if (
                messages[-1].finish_reason != pb.FINISH_REASON_LENGTH
            ):  # the last token, half a millisecond each, had come
                break
        assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert messages[-1].usage.output_tokens == sum(len(m.token_ids) for m in messages) < 500
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_a_request_that_allows_no_token_after_its_output_ends_with_its_parameters(
    tiny_server: LocalServer,
) -> None:
    """No check of the request can find it: the bad word is forbidden only where its beginning was generated."""
    async with Client(tiny_server.target) as client:
        letter = (await client.tokenize("g"))[-1]
        given: dict[str, Any] = {"allowed_token_ids": [letter], "bad_words": ["ggg"]}
        assert (await collect(client, "a", SamplingParams(max_tokens=2, **given))).outputs[0].text == "gg"
        with pytest.raises(grpc.aio.AioRpcError, match=r"allowed_token_ids, sampling.bad_words") as error:
            await collect(client, "a", SamplingParams(max_tokens=9, **given))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_the_likeliest_of_several_outputs_are_returned(tiny_server: LocalServer) -> None:
    given: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
    async with Client(tiny_server.target) as client:
        every = await collect(client, "hello", SamplingParams(n=6, logprobs=0, **given))
        best = await collect(client, "hello", SamplingParams(n=2, best_of=6, **given))
    ranked = sorted(
        every.outputs, key=lambda output: -sum(p.chosen.logprob for p in output.logprobs) / len(output.token_ids)
    )
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.text for output in best.outputs] == [output.text for output in ranked[:2]]
    assert not any(output.logprobs for output in best.outputs)


@pytest.mark.parametrize("sampling", [{"beam_width": 4, "n": 2}, {"best_of": 4, "n": 2, "temperature": 1.0}])
async def test_abort_ends_every_output_of_requests_that_give_theirs_at_the_end(
    tiny_server: LocalServer, sampling: dict[str, Any]
) -> None:
    async with Client(tiny_server.target) as client:
        request = SamplingParams(max_tokens=100, ignore_eos=True, **sampling)

        async def read() -> list[pb.GenerateResponse]:
            return [message async for message in client.generate("hello", request, request_id="long")]

        reading = asyncio.create_task(read())
        while not await client.abort("long"):
            assert not reading.done()
        messages = await reading
    assert [(m.index, m.finish_reason) for m in messages] == [(i, pb.FINISH_REASON_ABORT) for i in range(2)]
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_a_beam_search_gives_its_best_outputs_with_text_and_usage(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        greedy = await collect(client, "hello", SamplingParams(max_tokens=6, temperature=0))
        alone = await collect(client, "hello", SamplingParams(max_tokens=6, beam_width=1))
        found = await collect(client, "hello", SamplingParams(max_tokens=6, beam_width=5, n=3))
    assert alone.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert alone.outputs[0].text == greedy.outputs[0].text
    assert len({tuple(output.token_ids) for output in found.outputs}) == 3
    assert found.prompt_tokens == greedy.prompt_tokens
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_a_request_id_in_flight_cannot_be_used_twice(tiny_server: LocalServer) -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    async with Client(tiny_server.target) as client:
        first = client.generate("hello", sampling, request_id="same")
        await anext(first)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(client.generate("hello", sampling, request_id="same"))
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert (await anext(first)).token_ids  # undisturbed
        await first.aclose()
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_a_deadline_frees_everything(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in client.generate("hello", SamplingParams(max_tokens=500, ignore_eos=True), timeout=0.05):
                pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await assert_nothing_is_held(tiny_server.admin_target)


BAD = {
    "empty prompt": pb.GenerateRequest(text=""),
    "no prompt": pb.GenerateRequest(),
    "past the context": pb.GenerateRequest(text="x" * 600),
    "outside the vocabulary": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**9])),
    "a million outputs": pb.GenerateRequest(text="x", sampling=SamplingParams(n=10**6)),
    "not a number": pb.GenerateRequest(text="x", sampling=SamplingParams(temperature=float("nan"))),
    "infinite": pb.GenerateRequest(text="x", sampling=SamplingParams(top_p=float("inf"))),
    "negative": pb.GenerateRequest(text="x", sampling=SamplingParams(temperature=-1)),
    "stop strings": pb.GenerateRequest(text="x", sampling=SamplingParams(stop=["x"] * 10_000)),
    "5 MB": pb.GenerateRequest(text="x" * 5_000_000),
    "unknown role": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="wizard", content="x")])),
    "prompt and output past the context": pb.GenerateRequest(text="x", sampling=SamplingParams(max_tokens=512)),
}


async def test_bad_input_gets_a_sentence_and_leaves_the_neighbour_undisturbed(tiny_server: LocalServer) -> None:
    sampling = SamplingParams(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
    async with Client(tiny_server.target) as client, grpc.aio.insecure_channel(tiny_server.target) as channel:
        alone = await collect(client, "neighbour", sampling)
        neighbour = asyncio.create_task(collect(client, "neighbour", sampling))
        for name, request in BAD.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await InferenceServiceStub(channel).Generate(request, timeout=5).read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            details = error.value.details() or ""
            assert details
            assert "Traceback" not in details
        assert (await neighbour).outputs == alone.outputs
    await assert_nothing_is_held(tiny_server.admin_target)


async def test_an_adapter_that_is_not_there_is_not_found(tiny_server: LocalServer) -> None:
    async with grpc.aio.insecure_channel(tiny_server.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x", lora_name="one")).read()
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert error.value.details() == "lora_name: there is no adapter 'one'"


async def test_requests_that_end_in_every_way_leave_no_block_in_use(tiny_server: LocalServer) -> None:
    """Some finish, some are cancelled before or while they stream, some are aborted, some connections are cut."""
    fate = random.Random(0)
    (before,) = (await cluster_state(tiny_server.admin_target)).workers

    async def one(number: int, client: Client) -> str:
        sampling = SamplingParams(
            n=fate.choice((1, 1, 1, 2, 3)), max_tokens=fate.randint(1, 40), temperature=1.0, seed=number
        )
        prompt = "".join(fate.choices("abcdefgh", k=fate.randint(1, 120)))
        end = fate.choice(("finish", "finish", "cancel", "leave", "abort", "cut"))
        request_id = f"request-{number}"
        if end == "cut":
            own = Client(tiny_server.target)
            stream = own.generate(prompt, sampling)
            await anext(stream)
            await own.close()
            await stream.aclose()
            return end
        task = asyncio.create_task(collect(client, prompt, sampling))
        if end == "finish":
            await task
        elif end == "cancel":
            for _ in range(fate.randint(0, 20)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
        else:
            await task
            async for _ in client.generate(prompt, sampling, request_id=request_id):
                if end == "leave":
                    break
                await client.abort(request_id)
        return end

    slots = asyncio.Semaphore(48)

    async def limited(number: int) -> str:
        async with slots:
            return await one(number, client)

    async with Client(tiny_server.target) as client:
        ends = await asyncio.gather(*(limited(number) for number in range(250)))
    assert set(ends) == {"finish", "cancel", "leave", "abort", "cut"}
    await assert_nothing_is_held(tiny_server.admin_target)
    (after,) = (await cluster_state(tiny_server.admin_target)).workers
    assert after.num_preemptions > before.num_preemptions
    # The block tables are verified after every step (--check-invariants); a violation would have cost the session.
    assert after.epoch == before.epoch


async def test_tenants_and_salts_have_prefix_caches_of_their_own(tiny_server: LocalServer) -> None:
    """What is cached for one must not be found by another: the time to the first token would tell what it asked."""

    async def cached(tenant: str, salt: str) -> int:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[*range(100, 141)]),
            tenant=tenant,
            cache_salt=salt,
            sampling=SamplingParams(max_tokens=1, temperature=0),
        )
        async with grpc.aio.insecure_channel(tiny_server.target) as channel:
            messages = [message async for message in InferenceServiceStub(channel).Generate(request)]
        return messages[-1].usage.cached_tokens

    owners = [("a", ""), ("b", ""), ("", "a"), ("", "b"), ("a", "a")]
    assert [await cached(*owner) for owner in owners] == [0] * len(owners)
    assert [await cached(*owner) for owner in owners] == [40] * len(owners)
