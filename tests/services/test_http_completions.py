"""/v1/completions says what our own protocol says, of texts and token ids, whole and streamed."""

import asyncio
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cluster import halted, until_idle, until_requests
from http_requests import MODEL, PARAMETERS, WORDS
from tiny_model import SPECIAL_TOKENS

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import Completion, collect
from pagewire_common.calls.errors import RequestError
from pagewire_common.calls.request_limits import RequestLimits
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.limits import Held, Room
from scheduler_service.frontend.http.openai.completion_fields import CompletionFields, completion_params
from scheduler_service.frontend.http.openai.completions import complete
from scheduler_service.frontend.http.served.tokens import _in_json
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.model import ServedModel

IDS = [72, 73, 74, 75]
PROMPTS: list[Any] = ["hello", "one two", "hello"]

MORE: list[dict[str, Any]] = [
    {"n": 3},
    {"n": 2, "best_of": 4},
    {"stop": ["a", "e", "i"]},
    {"stop": ["a", "e", "i"], "include_stop_str_in_output": True},
    {"allowed_token_ids": [70, 71, 72]},
    {"bad_words": ["a", "b"]},
]


@pytest.fixture
async def url(tiny_server: LocalServer) -> AsyncIterator[str]:
    yield tiny_server.http_url
    (worker,) = (await until_idle(tiny_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def ours(tiny_server: LocalServer) -> AsyncIterator[Client]:
    async with Client(tiny_server.target) as client:
        yield client


async def create(client: openai.AsyncOpenAI, prompt: Any, **given: Any) -> Any:
    """With vLLM's parameters as OpenAI's client sends them."""
    known = ("temperature", "seed", "max_tokens", "top_p", "n", "best_of", "presence_penalty", "frequency_penalty")
    known += ("stop", "stream", "echo", "logprobs", "stream_options", "logit_bias")
    plain = {name: given.pop(name) for name in known if name in given}
    return await client.completions.create(model=MODEL, prompt=prompt, **plain, extra_body=given)


async def streamed(client: openai.AsyncOpenAI, prompt: Any, num_choices: int, **given: Any) -> list[tuple[str, str]]:
    """The text of each choice, and why it ended."""
    texts, reasons = [""] * num_choices, [""] * num_choices
    async for chunk in await create(client, prompt, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert not reasons[choice.index]
            reasons[choice.index] = choice.finish_reason or ""
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize("given", [*PARAMETERS, *MORE], ids=str)
async def test_parameters_have_the_effect_that_they_have_in_our_own_protocol(
    client: openai.AsyncOpenAI, ours: Client, given: dict[str, Any]
) -> None:
    sampling = SamplingParams(**WORDS | given)
    expected = [output.text for prompt in PROMPTS for output in (await collect(ours, prompt, sampling)).outputs]
    whole = await create(client, PROMPTS, **WORDS, **given)
    assert [choice.index for choice in whole.choices] == list(range(len(expected)))
    assert [choice.text for choice in whole.choices] == expected
    reasons = [choice.finish_reason for choice in whole.choices]
    assert await streamed(client, PROMPTS, len(expected), **WORDS, **given) == [*zip(expected, reasons, strict=True)]


async def test_prompts_are_texts_or_token_ids_or_lists_of_them(client: openai.AsyncOpenAI, ours: Client) -> None:
    sampling = SamplingParams(**WORDS)
    for given, each in (("hello", ["hello"]), (IDS, [IDS]), ([IDS, IDS[:2]], [IDS, IDS[:2]]), (["a"], ["a"])):
        expected = [(await collect(ours, prompt, sampling)).outputs[0].text for prompt in each]
        answer = await create(client, given, **WORDS)
        assert [choice.text for choice in answer.choices] == expected
        ids = [prompt if isinstance(prompt, list) else await ours.tokenize(prompt) for prompt in each]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 20
    assert (await create(client, "hello", temperature=0, ignore_eos=True)).usage.completion_tokens == 16


async def expected_logprobs(ours: Client, completion: Completion, number: int) -> dict[str, Any]:
    """Of the output of that number, token by token."""
    positions = completion.outputs[number].logprobs
    ids = {token.token_id for position in positions for token in (position.chosen, *position.top)}
    texts = {token_id: await ours.detokenize([token_id], skip_special_tokens=False) for token_id in ids}
    return {
        "tokens": [texts[position.chosen.token_id] for position in positions],
        "token_logprobs": pytest.approx([position.chosen.logprob for position in positions]),
        "top_logprobs": [
            pytest.approx({texts[top.token_id]: top.logprob for top in (position.chosen, *reversed(position.top))})
            for position in positions
        ],
    }


@pytest.mark.parametrize("num_logprobs", [0, 3])
async def test_log_probabilities_are_our_own(client: openai.AsyncOpenAI, ours: Client, num_logprobs: int) -> None:
    words = WORDS | {"n": 2, "logprobs": num_logprobs}
    completion = await collect(ours, "hello", SamplingParams(**words))
    whole = await create(client, "hello", **words)
    gathered: list[dict[str, list[Any]]] = [{}, {}]
    async for chunk in await create(client, "hello", stream=True, **words):
        for choice in chunk.choices:
            for name, values in choice.logprobs.model_dump().items():
                gathered[choice.index].setdefault(name, []).extend(values)
    for number, choice in enumerate(whole.choices):
        found = choice.logprobs.model_dump()
        assert found == gathered[number]
        offsets = found.pop("text_offset")
        assert found == await expected_logprobs(ours, completion, number)
        assert offsets == [len("".join(found["tokens"][:place])) for place in range(len(offsets))]
    assert (await create(client, "hello", **WORDS)).choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["one two", IDS], ids=["text", "token ids"])
async def test_an_echo_has_the_prompt_and_its_log_probabilities(
    client: openai.AsyncOpenAI, ours: Client, prompt: Any
) -> None:
    ids = await ours.tokenize(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else await ours.detokenize(ids)
    completion = await collect(ours, ids, SamplingParams(**WORDS, logprobs=2, prompt_logprobs=2))
    (output,) = completion.outputs
    plain = await create(client, prompt, echo=True, **WORDS)
    assert plain.choices[0].text == text + output.text
    assert await streamed(client, prompt, 1, echo=True, **WORDS) == [(text + output.text, "length")]
    for most in (20, 0):
        answer = await create(client, prompt, **WORDS | {"echo": True, "logprobs": 2, "max_tokens": most})
        (choice,) = answer.choices
        assert choice.text == text + (output.text if most else "")
        assert answer.usage.completion_tokens == most
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(ids) + most
        positions = [*completion.prompt_logprobs, *(output.logprobs if most else [])]
        assert choice.logprobs.token_logprobs == [None, *(pytest.approx(one.chosen.logprob) for one in positions)]
        assert choice.logprobs.top_logprobs[0] is None


async def test_beams_forms_and_biases(client: openai.AsyncOpenAI, ours: Client) -> None:
    beams = await collect(ours, "hello", SamplingParams(n=2, beam_width=3, max_tokens=8))
    found = await create(client, "hello", n=2, best_of=3, use_beam_search=True, max_tokens=8)
    assert [choice.text for choice in found.choices] == [output.text for output in beams.outputs]
    biased = await collect(ours, "hello", SamplingParams(**WORDS, logit_bias={80: 50.0}))
    assert (await create(client, "hello", **WORDS, logit_bias={"80": 50})).choices[0].text == biased.outputs[0].text
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}
    of_schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for form in (
        {"response_format": of_schema},
        {"structured_outputs": {"json": schema}},
        {"json_schema": json.dumps(schema)},
    ):
        answer = await create(client, "hello", seed=1, temperature=1, max_tokens=60, **form)
        assert set(json.loads(answer.choices[0].text)) <= {1, 2}
    for form in (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"ebnf": 'root ::= "yes" | "no"'},
    ):
        assert (await create(client, "hello", seed=1, max_tokens=60, **form)).choices[0].text in ("yes", "no")
    answer = await create(client, "x", max_tokens=60, seed=2, temperature=1, response_format={"type": "json_object"})
    assert answer.choices[0].text.startswith("{")


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_strict_schema_is_strict(byte_model: ServedModel, strict: bool | None) -> None:
    schema = {"name": "x", "schema": {"properties": {"a": True}}, "strict": strict}
    fields = CompletionFields.model_validate(
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": schema}}
    )
    assert completion_params(fields, byte_model).strict is (strict is True)


async def test_a_stream_has_its_usage_at_the_end(client: openai.AsyncOpenAI) -> None:
    chunks = [
        chunk
        async for chunk in await create(client, PROMPTS, stream=True, stream_options={"include_usage": True}, **WORDS)
    ]
    whole = await create(client, PROMPTS, **WORDS)
    assert not chunks[-1].choices
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert len({chunk.id for chunk in chunks}) == 1
    stopped = await create(client, "hello", stop=["e"], **WORDS | {"max_tokens": 200})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == "e"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "prompt: Field required"),
        ({"prompt": []}, 400, "prompt has 0 entries; it must have 1 to 256"),
        ({"prompt": ["x"] * 257}, 400, "prompt has 257 entries"),
        ({"prompt": ""}, 400, "the prompt needs at least one token"),
        ({"prompt": ["x", "x" * 600]}, 400, "tokens"),
        ({"prompt": [1, "x"]}, 400, "prompt does not have the form"),
        ({"prompt": [10**6]}, 400, "token_ids"),
        ({"prompt": "x", "model": "other"}, 404, "this server has tiny-llama"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "stream": True}, 400, "cannot be streamed"),
        ({"prompt": "x", "logprobs": 1, "echo": True, "stream": True}, 400, "cannot be streamed"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs is 21"),
        ({"prompt": "x", "n": 3_000_000}, 400, "n: Input should be less than or equal to 128"),
        ({"prompt": ["x"] * 256, "allowed_token_ids": [1] * 340_000}, 400, "the parameters of all prompts have"),
        ({"prompt": "x", "regex": "a", "json_schema": "{}"}, 400, "an output can have one form, and 2 are asked for"),
        ({"prompt": "x", "model": "y" * 300}, 400, "model: "),
        ({"prompt": "x", "logit_bias": {"5": 10**400}}, 400, "logit_bias has a number that is too large"),
        ({"prompt": "x", "logit_bias": {"\u0663": 1}}, 400, "logit_bias has"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": "x", "temperature": 1e300}, 400, "temperature is "),
        ({"prompt": "x", "temperature": "1"}, 400, "temperature: "),
        ({"prompt": "x", "top_k": -2}, 400, "top_k: "),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix is not supported here"),
        ({"prompt": "x", "logit_bias": {"80": 101}}, 400, "logit_bias[80] is 101"),
        ({"prompt": "x", "logit_bias": {"a": 1, "b": 2}}, 400, "logit_bias has 'a': 1, 'b': 2; it must"),
        ({"prompt": "x", "stop": ["y"] * 17}, 400, "stop has 17 strings; it may have 16"),
        ({"prompt": "x", "bad_words": ["y"] * 65}, 400, "bad_words"),
        ({"prompt": "x", "stop_token_ids": [5] * 65}, 400, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": dict.fromkeys(range(1025), 1)}, 400, "logit_bias has 1025 entries"),
        ({"prompt": "x"} | dict.fromkeys((f"x{number}" for number in range(50_000)), 1), 400, "x0 is not supported"),
        ({"x": 1}, 400, "x is not supported here"),
        ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, 400, "schema"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema is missing"),
        ({"prompt": "x", "response_format": {"type": "text", "json_schema": {}}}, 400, "and the type is text"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type: "),
        ({"prompt": "x", "regex": "("}, 400, "regex"),
        ({"prompt": "x", "stream": True, "regex": "("}, 400, "regex"),
        ({"prompt": "x", "echo": 1}, 400, "echo: "),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options needs stream: true"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_is_an_error_as_openai_has_them(
    url: str, body: dict[str, Any], status: int, words: str
) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == status
        assert words in (await response.json())["error"]["message"]


async def test_answers_have_token_ids_and_the_prompts_log_probabilities(
    client: openai.AsyncOpenAI, ours: Client
) -> None:
    ids = list(await ours.tokenize("one two"))
    words = WORDS | {"prompt_logprobs": 1, "return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    completion = await collect(ours, ids, SamplingParams(**WORDS, prompt_logprobs=1))
    (choice,) = (await create(client, "one two", **words)).model_dump()["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == list(completion.outputs[0].token_ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["prompt_logprobs"][0] is None
    chosen = [
        one[str(token_id)]["logprob"] for one, token_id in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
    ]
    assert chosen == pytest.approx([one.chosen.logprob for one in completion.prompt_logprobs])


async def test_a_stream_has_token_ids_and_its_usage_so_far(client: openai.AsyncOpenAI, ours: Client) -> None:
    options = {"continuous_usage_stats": True}
    stream = await create(client, ["one two", "x"], stream=True, return_token_ids=True, stream_options=options, **WORDS)
    *events, last = [event.model_dump() async for event in stream]
    prompts: dict[int, list[int]] = {}
    num_tokens = 0
    for event in events:
        (choice,) = event["choices"]
        if found := choice.get("prompt_token_ids"):
            assert choice["index"] not in prompts
            prompts[choice["index"]] = found
        num_tokens += len(choice["token_ids"])
        assert event["usage"]["completion_tokens"] == num_tokens
        assert event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert prompts == {0: list(await ours.tokenize("one two")), 1: list(await ours.tokenize("x"))}
    assert last["usage"]["completion_tokens"] == num_tokens == 40


async def test_a_chats_stream_has_its_prompts_token_ids_once(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2}
    more = {"return_token_ids": True}
    whole = await client.chat.completions.create(**asked, extra_body=more)
    stream = await client.chat.completions.create(**asked, stream=True, extra_body=more)
    shown = [event.model_dump().get("prompt_token_ids") async for event in stream]
    assert [one for one in shown if one] == [whole.model_dump()["prompt_token_ids"]]
    assert shown[0]


@pytest.mark.parametrize("include", [None, True, False])
@pytest.mark.parametrize("continuous", [True, False])
async def test_usage_is_in_the_events_that_ask_for_it(
    client: openai.AsyncOpenAI, include: bool | None, continuous: bool
) -> None:
    options: dict[str, Any] = {"include_usage": include, "continuous_usage_stats": continuous}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for stream in (
        await create(client, "x", stream=True, stream_options=options, max_tokens=3),
        await client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=messages, stream=True, stream_options=options, max_tokens=3
        ),
    ):
        *events, last = [event async for event in stream]
        in_events = continuous and include is not False
        assert all((event.usage is not None) is in_events for event in events)  # none, if all tokens come at once
        assert (last.usage is not None) is (in_events or include is True)


@pytest.mark.parametrize("add", [True, False])
async def test_special_tokens_are_not_added_by_a_tokenizer_that_has_none_to_add(
    url: str, ours: Client, add: bool
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with aiohttp.ClientSession() as session:
        for given, expected in (
            ({"prompt": "hi"}, await ours.tokenize("hi")),
            ({"messages": messages}, await ours.tokenize(messages)),
        ):
            async with session.post(f"{url}/tokenize", json=given | {"add_special_tokens": add}) as response:
                assert (await response.json())["tokens"] == list(expected)


async def test_tokens_are_spelled_as_in_the_vocabulary(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        for asked, expected in ((True, ["a", "Ġ", "b"]), (False, None)):
            async with session.post("/tokenize", json={"prompt": "a b", "return_token_strs": asked}) as response:
                strs = (await response.json())["token_strs"]
                assert (strs and strs[-3:]) == expected
        async with session.post("/tokenize", json={"prompt": "a b", "add_generation_prompt": True}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "add_generation_prompt")


async def test_the_json_of_many_tokens_is_made_in_turns() -> None:
    values = list(range(30_000))
    assert json.loads(await _in_json(values)) == values
    assert [await _in_json(some) for some in ([], ["a", "b"])] == ["[]", '["a", "b"]']


async def test_a_prompt_is_cut_and_its_special_tokens_are_read_where_asked(
    client: openai.AsyncOpenAI, ours: Client
) -> None:
    more = {"return_token_ids": True, "max_tokens": 2}
    for given in ("one two", list(await ours.tokenize("one two"))):
        (choice,) = (await create(client, given, truncate_prompt_tokens=2, **more)).choices
        assert choice.prompt_token_ids == list(await ours.tokenize("one two"))[-2:]
        (choice,) = (await create(client, given, truncate_prompt_tokens=2, truncation_side="right", **more)).choices
        assert choice.prompt_token_ids == list(await ours.tokenize("one two"))[:2]
    for parse in (True, False):
        text = f"a{SPECIAL_TOKENS[0]}b"
        expected = await ours.tokenize(text, parse_special_tokens=parse)
        (choice,) = (await create(client, text, parse_special_tokens=parse, **more)).choices
        assert choice.prompt_token_ids == list(expected)


async def test_a_part_that_is_null_is_not_given(client: openai.AsyncOpenAI) -> None:
    chunks = [
        chunk async for chunk in await create(client, "x", stream=True, stream_options={"include_usage": None}, **WORDS)
    ]
    assert all(chunk.choices for chunk in chunks)
    options = {"type": "json_schema", "json_schema": {"name": "any"}}
    whole = await create(client, "x", response_format=options, **WORDS | {"max_tokens": 100})
    assert whole.choices[0].text


class _FakeService:
    """Of a scheduler whose messages are large; one of its streams breaks when the other's event is half written."""

    def __init__(self, model: ServedModel, *, breaks: bool) -> None:
        self.writes = asyncio.Semaphore(0)
        self._model, self._breaks = model, breaks
        loading = SimpleNamespace(model=model)
        self.link = SimpleNamespace(request_limits=lambda: RequestLimits(1 << 20), loading=loading)

    async def model(self) -> ServedModel:
        return self._model

    @asynccontextmanager
    async def generate(self, asked: pb.GenerateRequest, *_: Any) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        yield self._messages(breaks=self._breaks and asked.text == "breaks")

    async def _messages(self, *, breaks: bool) -> AsyncIterator[pb.GenerateResponse]:
        for number in range(4):
            if breaks and number:
                await self.writes.acquire()
                raise RequestError(grpc.StatusCode.INTERNAL, "it broke")
            yield pb.GenerateResponse(text="x" * 500, token_ids=[1])


async def completed(service: Any, body: dict[str, Any]) -> str:
    """The answer to a completion by a fake scheduler."""

    async def handle(request: web.Request) -> web.StreamResponse:
        with Held(Room(1 << 20)) as held:
            return await complete(Call(request, service, (), held, 60.0, TokenTexts()))

    app = web.Application()
    app.router.add_post("/", handle)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/"), json=body) as response,
    ):
        return await response.text()


async def test_the_prompts_of_a_call_begin_in_turn(byte_model: ServedModel) -> None:
    """In one iteration of the event loop, the checks of 256 prompts would hold it for 50 ms."""
    loop, iteration, begun = asyncio.get_running_loop(), 0, Counter[int]()

    def count() -> None:
        nonlocal iteration, counting
        iteration += 1
        counting = loop.call_soon(count)

    class Counting(_FakeService):
        @asynccontextmanager
        async def generate(self, *_: Any) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
            begun[iteration] += 1
            yield self._messages(breaks=False)

    counting = loop.call_soon(count)
    await completed(Counting(byte_model, breaks=False), {"prompt": ["a"] * 30})
    counting.cancel()
    assert (begun.total(), max(begun.values())) == (30, 1)


@pytest.mark.parametrize("breaks", [False, True])
async def test_events_of_several_prompts_are_not_mixed(
    byte_model: ServedModel, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each is written in several parts, between which others are."""
    service: Any = _FakeService(byte_model, breaks=breaks)
    write = web.StreamResponse.write

    async def slow_write(response: web.StreamResponse, data: Any) -> None:
        await write(response, data)
        if response.content_length is None:
            service.writes.release()
            for _ in range(5):
                await asyncio.sleep(0)

    monkeypatch.setattr(web.StreamResponse, "write", slow_write)
    monkeypatch.setattr("scheduler_service.frontend.http.writing.PIECE_BYTES", 64)

    text = await completed(service, {"prompt": ["a", "breaks"], "stream": True})
    *said, end = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    found = [json.loads(event) for event in said]
    assert end == "[DONE]"
    assert [event["error"]["message"] for event in found if "error" in event] == (["it broke"] if breaks else [])
    if not breaks:
        assert sorted(event["choices"][0]["index"] for event in found) == [0, 0, 0, 0, 1, 1, 1, 1]


@asynccontextmanager
async def stopped_worker(server: LocalServer) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """While its worker stands still, a request ends for no other reason than that it is given up. Gives a wait until
    there are as many requests."""

    worker, _ = server.processes
    with halted(worker):
        yield functools.partial(until_requests, server.admin_target)


LONG = {"max_tokens": 400, "ignore_eos": True}


async def test_of_several_prompts_one_that_is_refused_ends_the_others(url: str, tiny_server: LocalServer) -> None:
    body = LONG | {"prompt": ["hello"] * 5 + ["x" * 600]}
    async with stopped_worker(tiny_server) as until_requests:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 400
        await until_requests(0)


async def test_a_client_that_leaves_before_an_answer_frees_what_it_held(url: str, tiny_server: LocalServer) -> None:
    async with stopped_worker(tiny_server) as until_requests, aiohttp.ClientSession() as session:
        asked = [
            asyncio.create_task(session.post(f"{url}/v1/completions", json=LONG | {"prompt": ["a", "b"], "stream": on}))
            for on in (True, False)
        ]
        await until_requests(4)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await until_requests(0)


async def test_a_client_that_leaves_amid_a_stream_frees_what_it_held(url: str, tiny_server: LocalServer) -> None:
    body = LONG | {"prompt": ["a", "b"], "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{url}/v1/completions", json=body)
        await response.content.readany()
        async with stopped_worker(tiny_server) as until_requests:
            await until_requests(2)
            response.close()
            await until_requests(0)
