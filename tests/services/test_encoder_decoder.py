"""Models of an encoder and a decoder: each request's tokens are those of it alone, whatever is beside it or happens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from embedding_helpers import assert_nothing_is_left, said_through_a_loss, serving
from scheduler_in_process import InProcess
from tiny_encoder_decoder import START, SlowEncoderDecoder, write_adapter, write_encoder_decoder
from worker_in_process import held_until

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, EncoderPrompt, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.core import PreemptionMode
from scheduler_service.recording.replayer import Replayer
from worker_service.speculation import drafter

TEXTS = ["a", "hello there", "one two three one two three " * 3, "héllo wörld, how is it going?", "x" * 90]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 7, "n": 2},
    "beams": {"beam_width": 3, "n": 2},
    "edited": {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2, "min_tokens": 4},
}
PROMPTS = [EncoderPrompt(text) for text in TEXTS] + [EncoderPrompt(TEXTS[2], (START, 20, 30, 40, 50, 60, 70, 80, 90))]
ASKED = [(prompt, kind) for number, prompt in enumerate(PROMPTS) for kind in [*KINDS, *KINDS][number % 4 :][:2]]
"""Two kinds of each."""
NUM_TOKENS = 10

Shown = list[tuple[list[int], str, list[list[int]]]]


@pytest.fixture(scope="module", params=["t5", "bart"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_decoder(tmp_path_factory.mktemp("models") / request.param, request.param)


async def shown(client: Client, prompt: EncoderPrompt, kind: str) -> Shown:
    """Tokens, text, and which tokens were likeliest."""
    params = SamplingParams(**{"max_tokens": NUM_TOKENS} | KINDS[kind])
    completion = await collect(client, prompt, params)
    return [
        (output.token_ids, output.text, [[top.token_id for top in position.top] for position in output.logprobs])
        for output in completion.outputs
    ]


async def all_together(client: Client) -> list[Shown]:
    return await asyncio.gather(*(shown(client, *asked) for asked in ASKED))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Shown]:
    """What each of ASKED says when there is nothing beside it, and nothing cached."""

    async def run() -> list[Shown]:
        async with serving(model, {"prefix_caching": False}) as (one, _), Client(one.target) as client:
            return [await shown(client, *asked) for asked in ASKED]

    return asyncio.run(run())


def test_outputs_are_those_of_transformers(model: Path, alone: list[Shown]) -> None:
    """Greedily, of a search with beams, and drawn with a seed."""
    slow = SlowEncoderDecoder(model)
    for (prompt, kind), found in zip(ASKED, alone, strict=True):
        assert isinstance(prompt.encoder, str)
        read, decoder = slow.token_ids(prompt.encoder), prompt.decoder or (START,)
        if kind == "greedy":
            expected = slow.outputs(read, NUM_TOKENS, decoder)
        elif kind == "beams":
            expected = slow.outputs(read, NUM_TOKENS, decoder, num_beams=3, num_return_sequences=2)
        elif kind == "drawn" and not prompt.decoder:
            drawn = KINDS["drawn"]
            for index, (token_ids, _, _) in enumerate(found):
                assert slow.drawn(read, token_ids, index, drawn["seed"], drawn["temperature"]) == token_ids
            continue
        else:
            continue
        assert [[token for token in token_ids if token] for token_ids, _, _ in found] == expected


@pytest.mark.parametrize(
    ("settings", "scheduling"),
    [
        ({}, {}),
        ({"num_gpu_blocks_override": 26}, {"preemption_mode": "swap"}),
        ({"num_gpu_blocks_override": 26}, {"preemption_mode": "recompute"}),
        ({"max_num_batched_tokens": 97, "max_num_seqs": 5}, {"phase_rule": "separate"}),
        ({"speculative_config": {"method": "ngram"}}, {}),
    ],
    ids=["together", "swapped", "recomputed", "in turns", "with guesses"],
)
async def test_outputs_are_the_same_alone_and_together(
    settings: dict[str, Any],
    scheduling: dict[str, Any],
    model: Path,
    alone: list[Shown],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, so that the second round finds what encoders have read; and every decision can be replayed."""
    monkeypatch.setattr(drafter, "numbers_of_drafts", lambda _, mosts, *__, **___: list(mosts))
    recording = tmp_path / "recording"
    async with serving(model, scheduling | {"record": recording}, **settings) as (one, worker):
        async with Client(one.target) as client:
            async with held_until(worker, lambda: len(one.engine.requests.in_flight) == len(ASKED)):
                assert await all_together(client) == alone
            assert await all_together(client) == alone
        await assert_nothing_is_left(one)
    moments = list(Replayer().run(recording))
    steps = [moment.step.output for moment in moments if moment.kind == "plan" and moment.step]
    scheduled = [sequence for step in steps for sequence, _, _ in step.scheduled]
    assert any(sequence.is_encoder for sequence in scheduled)
    if "num_gpu_blocks_override" in settings:
        assert any(step.blocks_to_swap_out if "swap" in scheduling.values() else step.preempted for step in steps)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_outputs_are_the_same_where_urgent_requests_take_the_blocks_of_others(
    mode: str, model: Path, alone: list[Shown]
) -> None:
    """Each is more urgent than those before it."""

    async def tokens(client: Client, number: int) -> list[list[int]]:
        prompt, kind = ASKED[number]
        sampling = SamplingParams(**{"max_tokens": NUM_TOKENS} | KINDS[kind])
        request = pb.GenerateRequest(encoder_text=str(prompt.encoder), sampling=sampling, priority=-number)
        request.token_ids.ids.extend(prompt.decoder or (START,))
        found: dict[int, list[int]] = {}
        async for message in client._stub.Generate(request):
            found.setdefault(message.index, []).extend(message.token_ids)
        return [found[index] for index in sorted(found)]

    scheduling = {"scheduling_policy": "priority", "preemption_mode": mode}
    async with serving(model, scheduling, num_gpu_blocks_override=20) as (one, worker), Client(one.target) as client:
        async with held_until(worker, lambda: len(one.engine.requests.in_flight) == len(ASKED)):
            found = await asyncio.gather(*(tokens(client, number) for number in range(len(ASKED))))
        assert found == [[token_ids for token_ids, _, _ in outputs] for outputs in alone]
        assert_preempted(one, mode)
        await assert_nothing_is_left(one)


async def test_with_a_cache_in_8_bits_outputs_are_the_same_through_swaps_recomputing_and_the_loss_of_a_worker(
    model: Path,
) -> None:
    narrow: dict[str, Any] = {"kv_cache_dtype": "int8"}
    async with serving(model, {"prefix_caching": False}, **narrow) as (one, _), Client(one.target) as client:
        alone = [await shown(client, *asked) for asked in ASKED]
    for mode in ("swap", "recompute"):
        scheduling = {"preemption_mode": mode}
        async with serving(model, scheduling, num_gpu_blocks_override=20, **narrow) as (one, worker):
            async with (
                Client(one.target) as client,
                held_until(worker, lambda: len(one.engine.requests.in_flight) == len(ASKED)),
            ):
                assert await all_together(client) == alone
            assert_preempted(one, mode)
    assert await said_through_a_loss(model, all_together, **narrow) == alone


def assert_preempted(one: InProcess, mode: str) -> None:
    (worker,) = one.engine.workers.all
    assert worker.scheduler is not None
    assert worker.scheduler.num_preemptions[PreemptionMode(mode)] > 0


async def test_what_an_encoder_has_read_is_found_by_later_requests_of_the_same_salt(model: Path) -> None:
    prompt = pb.GenerateRequest(encoder_text=TEXTS[3], sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    async with serving(model) as (one, worker), Client(one.target) as client:
        encoded, usages = [], []
        encode = worker.worker.runner._model.encode
        worker.worker.runner._model.encode = lambda given, *rest: (encoded.append(len(given)), encode(given, *rest))[1]
        for salt in ("", "", "other", "other"):
            request = pb.GenerateRequest()
            request.CopyFrom(prompt)
            request.cache_salt = salt
            usages += [message.usage async for message in client._stub.Generate(request) if message.finish_reason]
        assert len(encoded) == 2
        num_tokens = len(TEXTS[3].encode()) + 2
        assert [usage.prompt_tokens for usage in usages] == [num_tokens + 1] * 4
        assert [usage.cached_tokens for usage in usages] == [0, num_tokens] * 2


async def test_outputs_go_on_on_another_worker_when_theirs_is_lost(model: Path, alone: list[Shown]) -> None:
    assert await said_through_a_loss(model, all_together) == alone


async def test_adapters_apply_to_both_parts_and_each_has_its_own_reading_of_an_input(
    model: Path, tmp_path: Path
) -> None:
    """Alone they say what transformers says with the adapter in its weights; and together the same, swapped as well."""
    names, prompts = ("", "one", "two", "three"), PROMPTS[1:3]
    for number, name in enumerate(names[1:]):
        write_adapter(tmp_path / name, model, number, rank=2 + number)
    asked = [(prompt, name) for prompt in prompts for name in names]

    async def said(client: Client, prompt: EncoderPrompt, name: str) -> list[int]:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        return (await collect(client, prompt, params, lora_name=name)).outputs[0].token_ids

    scheduling = {"lora_dir": tmp_path, "preemption_mode": "swap"}
    async with serving(model, scheduling, max_loras=2, num_gpu_blocks_override=26) as (one, _):
        async with Client(one.target) as client:
            alone = [await said(client, *item) for item in asked]
            assert await asyncio.gather(*(said(client, *item) for item in asked)) == alone
        await assert_nothing_is_left(one)
    for name in names:
        slow = SlowEncoderDecoder(model, tmp_path / name if name else None)
        for (prompt, other), found in zip(asked, alone, strict=True):
            if other == name:
                (expected,) = slow.outputs(slow.token_ids(str(prompt.encoder)), NUM_TOKENS)
                assert [token for token in found if token] == expected


async def test_a_decoder_begins_with_the_token_of_any_text_if_no_other_is_named_and_with_none_is_refused(
    tmp_path: Path,
) -> None:
    model = write_encoder_decoder(tmp_path / "t5", "t5")
    config = json.loads((model / "config.json").read_text())
    (model / "generation_config.json").unlink()
    del config["decoder_start_token_id"]
    said = []
    for bos_token_id in (1, None):
        (model / "config.json").write_text(json.dumps(config | {"bos_token_id": bos_token_id}))
        async with serving(model) as (one, _), Client(one.target) as client:
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            given = await collect(client, EncoderPrompt(TEXTS[1], (1,)), params)
            said.append(given.outputs[0].token_ids)
            if bos_token_id is None:
                with pytest.raises(
                    grpc.aio.AioRpcError,
                    match="token_ids is missing: the model's files name no start token of its decoder",
                ):
                    await collect(client, EncoderPrompt(TEXTS[1]), params)
            else:
                found = await collect(client, EncoderPrompt(TEXTS[1]), params)
                said.append(found.outputs[0].token_ids)
    assert said[0] == said[1] == said[2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without": ({"text": "hello"}, "encoder_text or encoder_token_ids is missing: "),
    "text for the decoder": ({"encoder_text": "a", "text": "b"}, "text cannot be the prompt of this decoder"),
    "empty": ({"encoder_token_ids": pb.TokenIds()}, "encoder_token_ids is empty; the encoder needs at least one token"),
    "too long": ({"encoder_text": "x" * 95}, "encoder_text has 97 tokens; the encoder reads up to 96"),
    "far too long": ({"encoder_text": "x" * 200_000}, "encoder_text has 200000 characters"),
    "too many": ({"encoder_token_ids": pb.TokenIds(ids=[5] * 97)}, "encoder_token_ids has 97 tokens"),
    "unknown": (
        {"encoder_token_ids": pb.TokenIds(ids=[261])},
        "encoder_token_ids contains 261; the vocabulary has 261",
    ),
}


async def test_what_makes_no_sense_is_refused_in_a_sentence(model: Path) -> None:
    async with serving(model) as (one, _), Client(one.target) as client:
        for case, (fields, words) in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in client._stub.Generate(pb.GenerateRequest(**fields)):
                    pass
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, case
            assert words in str(error.value.details()), case


async def test_a_model_without_an_encoder_refuses_a_prompt_for_one(tiny_model_directory: Path) -> None:
    async with serving(tiny_model_directory) as (one, _), Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="encoder_text is for models with encoder and decoder"):
            await collect(client, EncoderPrompt("hello"))
