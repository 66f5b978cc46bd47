"""Each field of a request has a flag on the command line, or a reason why not, and arrives as it was said."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from pagewire_client import LLM, Image, LocalServer, SamplingParams
from pagewire_client.cli import generation
from pagewire_client.cli.generation import generate
from pagewire_client.cli.parser import parse_arguments
from pagewire_client.cli.request_options import SAMPLING, WITHOUT_FLAG
from pagewire_client.cli.texts import embed, score, transcribe
from pagewire_client.client import Client
from pagewire_client.llm import collect

OF_ALL = ["--lora-name", "a", "--tenant", "t", "--priority", "-3", "--cache-salt", "s"]
SAID = {"lora_name": "a", "tenant": "t", "priority": -3, "cache_salt": "s"}
COMMANDS = {
    "GenerateRequest": generate,
    "EmbedRequest": embed,
    "ScoreRequest": score,
    "TranscribeRequest": transcribe,
}


class Hearing(InferenceServiceServicer):
    """Keeps requests and answers next to nothing."""

    def __init__(self) -> None:
        self.requests: list[Message] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP)

    async def Embed(self, request: Any, context: Any) -> AsyncIterator[pb.EmbedResponse]:  # noqa: N802
        self.requests.append(request)
        yield pb.EmbedResponse(vectors=bytes(16), dimensions=2)

    async def Transcribe(self, request: Any, context: Any) -> AsyncIterator[pb.TranscribeResponse]:  # noqa: N802
        self.requests.append(request)
        yield pb.TranscribeResponse(end=pb.TranscriptEnd())

    async def Score(self, request: Any, context: Any) -> pb.ScoreResponse:  # noqa: N802
        self.requests.append(request)
        return pb.ScoreResponse()


async def heard(*words: str) -> Any:
    """The request that a command makes."""
    servicer, server = Hearing(), grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        arguments = parse_arguments([*words, "--target", target])
        await COMMANDS[f"{words[0].title()}Request"](arguments, target)
    finally:
        await server.stop(None)
    (request,) = servicer.requests
    if words[0] == "generate":
        request.ClearField("request_id")
    return request


async def test_a_command_sends_what_its_flags_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sound.wav").write_bytes(b"RIFF")
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    found = [
        await heard(
            "generate", "hello", "--parse-special-tokens", "--json-schema", f"@{tmp_path}/schema.json", *OF_ALL
        ),
        await heard("embed", "one", "--pooling", "all", "--no-normalize", "--dimensions", "2", "--truncate", *OF_ALL),
        await heard("embed", "one", "--truncate-prompt-tokens", "5"),
        await heard("score", "query", "one", "--top-n", "1", "--pair-format", "{query}", "--truncate", *OF_ALL),
        await heard(
            *("transcribe", f"{tmp_path}/sound.wav", "--language", "en", "--translate", "--prompt", "said before"),
            *("--temperature", "0.5", "--seed", "7", *OF_ALL),
        ),
    ]
    assert found == [
        pb.GenerateRequest(
            text="hello",
            parse_special_tokens=True,
            sampling=SamplingParams(max_tokens=512, json_schema='{"type": "object"}'),
            **SAID,
        ),
        pb.EmbedRequest(
            inputs=[pb.EmbedInput(text="one")],
            pooling=pb.POOLING_ALL,
            normalize=False,
            dimensions=2,
            truncate=True,
            **SAID,
        ),
        pb.EmbedRequest(inputs=[pb.EmbedInput(text="one")], truncate_prompt_tokens=5),
        pb.ScoreRequest(query="query", documents=["one"], top_n=1, pair_format="{query}", truncate=True, **SAID),
        pb.TranscribeRequest(
            sound=pb.Sound(data=b"RIFF"),
            language="en",
            translate=True,
            prompt="said before",
            temperature=0.5,
            seed=7,
            **SAID,
        ),
    ]
    assert "[[0.0, 0.0], [0.0, 0.0]]" in capsys.readouterr().out  # of the text's tokens


async def test_images_come_before_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    words = ("generate", "hello", "--image", f"{tmp_path}/a", "--image", f"{tmp_path}/b")
    images = [pb.Image(data=name) for name in (b"a", b"b")]
    asked = (await heard(*words, "--chat")).chat.messages[0]
    assert asked == pb.ChatMessage(
        role="user", parts=[*(pb.ContentPart(image=image) for image in images), pb.ContentPart(text="hello")]
    )
    parts = [*(pb.PromptPart(image=image) for image in images), pb.PromptPart(text="hello")]
    assert (await heard(*words)).parts == pb.PromptParts(parts=parts)
    for more, reason in (
        (["--encoder"], "--image is for decoders, and --encoder gives the prompt to an encoder"),
        (["--image", f"{tmp_path}/c"], f"cannot read {tmp_path}/c: No such file"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments([*words, *more, "--target", "t:1"])
        assert reason in capsys.readouterr().err


def test_images_of_a_conversation_are_in_its_first_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that fails keeps them for the next one."""
    (tmp_path / "a").write_bytes(b"a")
    asked: list[Any] = []

    async def stream(client: Client, conversation: Any, *_: Any, **__: Any) -> str:
        asked.append([message["content"] for message in conversation])
        if len(asked) == 1:
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "failed")
        return "yes"

    monkeypatch.setattr(generation, "stream", stream)
    monkeypatch.setattr(generation, "_lines", lambda: iter(["one", "two", "three"]))
    generation.chat(parse_arguments(["chat", "--image", f"{tmp_path}/a", "--target", "t:1"]), "t:1")
    image = Image(b"a")
    assert asked == [[[image, "one"]], [[image, "two"]], [[image, "two"], "yes", "three"]]


def test_every_field_of_a_request_has_a_flag_or_a_reason_to_have_none() -> None:
    renamed = {"inputs": "texts", "sound": "file", "text": "prompt", "chat": "chat", "encoder_text": "encoder"}
    for name, reasons in WITHOUT_FLAG.items():
        command = "generate" if name == "SamplingParams" else name.removesuffix("Request").lower()
        texts = {"score": ["x", "x"], "transcribe": [__file__]}.get(command, ["x"])
        known = set(vars(parse_arguments([command, "--target", "t:1", *texts])))
        for field in pb.DESCRIPTOR.message_types_by_name[name].fields:
            has_flag = field.name == "sampling" or renamed.get(field.name, field.name) in known
            assert has_flag != (field.name in reasons), f"{name}.{field.name}"
        assert set(reasons) <= set(pb.DESCRIPTOR.message_types_by_name[name].fields_by_name)
    assert {*COMMANDS, "SamplingParams"} == set(WITHOUT_FLAG)


@pytest.mark.parametrize("field", list(pb.SamplingParams.DESCRIPTOR.fields), ids=lambda field: field.name)
def test_every_sampling_parameter_can_be_said(field: Any) -> None:
    words = {"logit_bias": ["7=-1.5", "8=2"], "choice": ["yes", "no"], "stop": ["a", "b"], "bad_words": ["a", "b"]}
    values: dict[str, Any] = {"logit_bias": {7: -1.5, 8: 2.0}, "choice": pb.Choice(options=["yes", "no"])}
    if field.name not in SAMPLING:
        assert field.name in WITHOUT_FLAG["SamplingParams"]
        return
    flag = f"--{field.name.replace('_', '-')}"
    if field.cpp_type == field.CPPTYPE_BOOL:
        said, expected = [flag], True
    else:
        said = [word for text in words.get(field.name, ["3"]) for word in (flag, text)]
        single: Any = "3" if field.cpp_type == field.CPPTYPE_STRING else 3
        expected = values.get(field.name, words.get(field.name, [3] if field.is_repeated else single))
    sampling = parse_arguments(["generate", "--target", "t:1", "hello", *said]).sampling
    assert sampling == SamplingParams(**({"max_tokens": 512} | {field.name: expected}))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--logit-bias", "4294967296=1"], "--logit-bias is [(4294967296, 1.0)], which its field cannot hold"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice: an output has one form at most"),
        (["--logit-bias", "7"], "'7' is not TOKEN_ID=BIAS"),
        (["--grammar", "@/nowhere/at.all"], "cannot read /nowhere/at.all"),
        (["--chat", "--encoder"], "not allowed with argument"),
        (["--model", "m"], "--model is for a server that the command starts"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused_before_anything_starts(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["generate", "--target", "t:1", "hello", *words])
    assert sentence in capsys.readouterr().err


def test_each_prompt_of_a_batch_may_have_its_own_salt_priority_and_adapter(tiny_server: LocalServer) -> None:
    llm, sampling = LLM(target=tiny_server.target), SamplingParams(max_tokens=1)
    text = "shared by salts " * 4
    llm.generate([text], sampling, cache_salt="a", progress=False)
    found = llm.generate([text, text], sampling, cache_salt=["a", "b"], progress=False)
    assert [completion.cached_tokens > 0 for completion in found] == [True, False]
    with pytest.raises(grpc.aio.AioRpcError, match="priority"):
        llm.generate(["a", "b"], sampling, priority=[0, 1], progress=False)
    with pytest.raises(grpc.aio.AioRpcError, match="there is no adapter 'second'"):
        llm.generate(["a", "b"], sampling, lora_name=["", "second"], progress=False)
    for column, what in (("lora_name", "adapters"), ("priority", "priorities"), ("cache_salt", "salts")):
        with pytest.raises(ValueError, match=f"there are 2 prompts and 1 {what}"):
            llm.generate(["a", "b"], sampling, progress=False, **{column: [1]})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"target": "t:1", "model": "m"}, "model is for a server that the LLM starts"),
        (
            {"target": "t:1", "scheduler_arguments": ["--scheduling-policy", "fair"]},
            "scheduler_arguments is for a server",
        ),
        ({"target": "t:1", "worker_arguments": ["--threads", "1"]}, "worker_arguments is for a server"),
        ({"api_key": "k"}, "api_key needs a target"),
    ],
)
def test_what_an_llm_could_not_obey_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM(**said)


async def test_special_tokens_are_parsed_in_texts_and_chats(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        assert await client.tokenize("<|im_end|>", parse_special_tokens=True) != await client.tokenize("<|im_end|>")
        with pytest.raises(grpc.aio.AioRpcError, match="is for text and chats, and the prompt is token_ids"):
            await collect(client, [5], parse_special_tokens=True)
        asked = pb.DetokenizeRequest(token_ids=[5], separately=True, skip_special_tokens=True)
        with pytest.raises(grpc.aio.AioRpcError, match="skip_special_tokens is true"):
            await client._stub.Detokenize(asked)
