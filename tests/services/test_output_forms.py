"""Output in a form, asked for by a client: valid, the same wherever it is computed, or refused with a reason."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from cluster import cluster_state, until_idle
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import Completion, collect
from scheduler_service.frontend.forms.forms import MAX_CHOICES, MAX_FORM_BYTES, FormError, Forms

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
        "size": {"type": "integer", "minimum": 10, "maximum": 9999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "[a-z]{20,30}(-[0-9]{4}){3}"},
    {"choice": pb.Choice(options=["a long answer of many tokens", "another one", "né"])},
    {"grammar": 'root ::= num ("+" num)?\nnum ::= [0-9]{15,20}'},
    {"grammar": 'start: "(" start ")" | /[a-f]{10}/'},
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "n": 2, "logprobs": 2, "top_p": 0.9},
    {"temperature": 1.2, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.2, "min_p": 0.01},
    {"temperature": 1.0, "seed": 4, "best_of": 3, "n": 2},
]
REQUESTS = [SamplingParams(max_tokens=120, **form, **kind) for form in FORMS for kind in KINDS]
PROMPT = "What all of these requests begin with is long enough for blocks, and for chunks. "


@pytest.fixture(scope="module")
def small_server(tiny_model_directory: Path) -> Iterator[LocalServer]:
    """Room for a few requests at a time, in steps that a prompt takes several of; preempted ones are swapped or not."""
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            *(
                "--num-gpu-blocks-override",
                "70",
                "--block-size",
                "8",
                "--threads",
                "1",
                "--swap-space",
                "0.001",
                "--forms",
            ),
        ],
        scheduler_arguments=["--check-invariants", "--max-num-batched-tokens", "32", "--max-num-seqs", "24"],
    ) as server:
        yield server


async def complete(client: Client, number: int) -> Completion:
    return await collect(client, PROMPT + str(number), REQUESTS[number])


def check(number: int, completion: Completion) -> None:
    """Every output that ended by itself has the form that was asked for."""
    asked = REQUESTS[number]
    for output in completion.outputs:
        if output.finish_reason == pb.FINISH_REASON_LENGTH:
            continue
        match asked.WhichOneof("constraint"):
            case "json_schema":
                jsonschema.validate(json.loads(output.text), SCHEMA)
            case "regex":
                assert re.fullmatch(asked.regex, output.text)
            case "choice":
                assert output.text in asked.choice.options
            case _:
                assert re.fullmatch(r"\d{15,20}(\+\d{15,20})?|\(*[a-f]{10}\)*", output.text)


def contents(completion: Completion) -> list[tuple[list[int], str, int]]:
    return [(output.token_ids, output.text, output.finish_reason) for output in completion.outputs]


async def test_outputs_have_their_form_and_are_the_same_alone_together_and_after_preemption(
    tiny_server: LocalServer, small_server: LocalServer
) -> None:
    async with Client(tiny_server.target) as client:
        alone = [await complete(client, number) for number in range(len(REQUESTS))]
    for number, completion in enumerate(alone):
        check(number, completion)
    ended = [output.finish_reason == pb.FINISH_REASON_STOP for one in alone for output in one.outputs]
    assert sum(ended) >= 0.8 * len(ended)
    async with Client(small_server.target) as client:
        together = await asyncio.gather(*(complete(client, number) for number in range(len(REQUESTS))))
    assert list(map(contents, together)) == list(map(contents, alone))
    state = await until_idle(small_server.admin_target)
    assert state.num_preemptions > 0
    assert all(worker.num_free_device_blocks == worker.num_device_blocks for worker in state.workers)


@pytest.mark.parametrize("number", [1, 6, 11, 16, 21])
async def test_a_stream_that_is_resumed_goes_on_in_its_form(tiny_server: LocalServer, number: int) -> None:
    async with Client(tiny_server.target) as client:
        whole = (await complete(client, number)).outputs[0]
        for cut in (1, 3, len(whole.token_ids) - 1):
            resume = pb.ResumeState(outputs=[pb.ResumedOutput(index=0, token_ids=whole.token_ids[:cut])])
            resume.seed = REQUESTS[number].seed
            request = pb.GenerateRequest(text=PROMPT + str(number), sampling=REQUESTS[number], resume=resume)
            async with grpc.aio.insecure_channel(tiny_server.target) as channel:
                call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")(request.SerializeToString())
                rest = [token async for data in call for token in pb.GenerateResponse.FromString(data).token_ids]
            assert rest == whole.token_ids[cut:]


async def test_an_output_that_is_cut_off_says_so(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        sampling = SamplingParams(max_tokens=5, regex="[a-z]{9}")
        (output,) = (await collect(client, "x", sampling)).outputs
    assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert re.fullmatch("[a-z]{5}", output.text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, r"sampling.json_schema cannot be followed: it is not JSON: .* line 1 column 2"),
    ({"json_schema": '{"type": "thing"}'}, "sampling.json_schema cannot be followed: Invalid type: thing"),
    ({"json_schema": '{"if": {}}'}, r'Unimplemented keys: \["if"\]'),
    ({"json_schema": '{"x-guidance": {"lenient": true}, "if": {}}'}, "x-guidance is not supported"),
    (
        {"json_schema": '{"properties": {"a/b": {"multipleOf": 0.57}}}'},
        "#/properties/a~1b/multipleOf is 0.57,",
    ),
    ({"regex": "a", "strict": True}, "sampling.strict is for JSON; it needs sampling.json_schema"),
    ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "does not fetch"),
    ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion limit"),
    ({"json_schema": '"' * (MAX_FORM_BYTES + 1)}, f"has {MAX_FORM_BYTES + 1} bytes; at most {MAX_FORM_BYTES}"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": ""}, "sampling.regex is empty"),
    ({"choice": pb.Choice()}, f"options has 0 entries; it must have between 1 and {MAX_CHOICES}"),
    ({"choice": pb.Choice(options=["a", ""])}, r"options\[1\] is empty"),
    ({"choice": pb.Choice(options=["a"] * (MAX_CHOICES + 1))}, f"options has {MAX_CHOICES + 1} entries"),
    ({"json_schema": '{"type": "integer", "multipleOf": 999999937}'}, "cannot be followed: fuel exhausted"),
    ({"grammar": "start: x"}, 'unknown name: "x"'),
    ({"grammar": "root ::= " + "(" * 5000}, "nested too deeply"),
    ({"grammar": "start: " + "(" * 500}, "nested"),
    ({"regex": "a", "beam_width": 2}, "sampling.regex cannot be combined with sampling.beam_width"),
    ({"regex": "a", "ignore_eos": True}, "sampling.regex cannot be combined with sampling.ignore_eos"),
    ({"regex": "ab", "min_tokens": 10, "max_tokens": 20}, "no token could follow: the requested form"),
    ({"regex": "ab", "bad_words": ["b"]}, "no token could follow: the requested form"),
]


@pytest.mark.parametrize(("sampling", "words"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_be_followed_is_refused_with_the_reason(
    tiny_server: LocalServer, sampling: dict[str, Any], words: str
) -> None:
    before = await cluster_state(tiny_server.admin_target)
    async with Client(tiny_server.target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as error:
            await collect(client, "x", SamplingParams(**sampling))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await cluster_state(tiny_server.admin_target)).num_losses == before.num_losses


async def test_an_output_that_fails_ends_alone_with_its_reason(tiny_server: LocalServer) -> None:
    """Those that begin with a letter of the first half can have no X, and the others are whole."""
    sampling = SamplingParams(max_tokens=50, n=8, seed=3, temperature=1.0, regex="[a-m]X|[n-z]{9}", bad_words=["X"])
    async with Client(tiny_server.target) as client:
        outputs = (await collect(client, "x", sampling)).outputs
        sampling.n, sampling.best_of = 6, 8
        best = (await collect(client, "x", sampling)).outputs
    for output in outputs:
        if re.fullmatch("[n-z]{9}", output.text):
            assert (output.finish_reason, output.error) == (pb.FINISH_REASON_STOP, "")
        else:
            assert re.fullmatch("[a-m]", output.text)
            assert output.finish_reason == pb.FINISH_REASON_ERROR
            assert "no token could follow" in output.error
    failed = [bool(output.error) for output in outputs]
    assert set(failed) == {True, False}
    assert [bool(output.error) for output in best] == sorted(failed)[:6]


ANY_FORMS = Forms()


@given(st.sampled_from(["json_schema", "regex", "grammar"]), st.text() | st.text('"\\(){}[]|*+?:=root /start\n,'))
def test_any_text_is_a_form_or_has_a_reason(kind: str, text: str) -> None:
    async def read() -> None:
        try:
            grammar = await ANY_FORMS.read(pb.SamplingParams(**{kind: text}))  # type: ignore[arg-type]
        except FormError as error:
            assert str(error).startswith(f"sampling.{kind}")  # noqa: PT017
        else:
            assert grammar

    asyncio.run(read())


async def test_keys_without_a_name_are_written_only_where_the_setting_and_the_request_let_them() -> None:
    schema = pb.SamplingParams(json_schema='{"type": "object", "properties": {"a": {"type": "null"}}}')
    strict = pb.SamplingParams(json_schema=schema.json_schema, strict=True)
    closed = await ANY_FORMS.read(strict)
    assert await ANY_FORMS.read(strict, undeclared_keys=False) == closed
    assert await ANY_FORMS.read(schema, undeclared_keys=False) == closed
    assert await ANY_FORMS.read(schema, undeclared_keys=True) != closed


async def test_a_server_writes_no_keys_without_a_name_unless_told_to(tiny_server: LocalServer) -> None:
    """The model would: a comma is likelier than anything."""
    schema = '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}'
    async with Client(tiny_server.target) as client:
        (comma,) = await client.tokenize(",")
        sampling = SamplingParams(json_schema=schema, max_tokens=300, logit_bias={comma: 100.0})
        (output,) = (await collect(client, "x", sampling)).outputs
    assert output.finish_reason == pb.FINISH_REASON_STOP
    assert json.loads(output.text) == {"a": None}


async def test_an_expression_is_followed_whose_first_mask_behind_tokens_would_take_15_s(
    tiny_server: LocalServer,
) -> None:
    """The library limits what it takes for a mask only behind another one."""
    async with Client(tiny_server.target, retry_for=0) as client:
        asked = SamplingParams(max_tokens=8, regex="[0-9]" + "(a|aa|aaa){1,1000}" * 300)
        (output,) = (await collect(client, "a prompt", asked)).outputs
        assert re.fullmatch("[0-9]a{7}", output.text)
