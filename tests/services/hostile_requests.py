"""Requests that are made to do harm, and the allowed statuses of each.

They follow known attacks on such servers. Each may also be sent with its bytes changed at random.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from sampler_numbers import FLOATS

from pagewire.v1 import admin_service_pb2 as admin
from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import SamplingParams

Code = grpc.StatusCode
INSIDE = re.compile(r"Traceback|\.py\b|/work|/tmp|/home|site-packages|object at 0x|\bself\b|Error:|Exception")
"""Internals that no client may see."""


def texts_in(answer: bytes) -> str:
    """The readable parts of a message's bytes; eight bytes of a number seldom look like text."""
    return "\n".join(text.decode() for text in re.findall(rb"[ -~]{9,}", answer))


NAN, INFINITY = float("nan"), float("inf")
Draw = random.Random
REFUSED = frozenset({Code.INVALID_ARGUMENT})
FINE = REFUSED | {Code.OK, Code.RESOURCE_EXHAUSTED}


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=SamplingParams(**{"max_tokens": 3} | fields))


def floats(draw: Draw) -> pb.GenerateRequest:
    return sampling(**{draw.choice(FLOATS): draw.choice([NAN, INFINITY, -INFINITY, -1e30, 1e30])})


def crowds(draw: Draw) -> pb.GenerateRequest:
    return sampling(**{draw.choice(["n", "best_of", "beam_width"]): draw.choice([129, 10**6, 2**32 - 1])})


def lists(draw: Draw) -> pb.GenerateRequest:
    many = draw.choice([2000, 5000])
    return draw.choice(
        [
            lambda: sampling(stop=["x"] * many),
            lambda: sampling(bad_words=["x"] * many),
            lambda: sampling(stop_token_ids=range(many)),
            lambda: sampling(logit_bias=dict.fromkeys(range(many), 1.0)),
            lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * many)),
        ]
    )()


def prompts(draw: Draw) -> pb.GenerateRequest:
    return draw.choice(
        [
            lambda: pb.GenerateRequest(),
            lambda: pb.GenerateRequest(text=""),
            lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
            lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 100_000)),
            lambda: pb.GenerateRequest(text="x" * 900_000),
            lambda: pb.GenerateRequest(text="a", priority=draw.choice([-(2**31), 2**31 - 1])),
            lambda: pb.GenerateRequest(text="a", lora_name="../../etc/passwd"),
            lambda: pb.GenerateRequest(text="a", cache_salt="x" * 100_000),
            lambda: pb.GenerateRequest(text="a", request_id="x" * 10_000),
        ]
    )()


def texts(draw: Draw) -> pb.GenerateRequest:
    """Texts of any look."""
    text = draw.choice(["<|im_end|>" * 500, "\0" * 100, "\u202e" * 200, "{{ ''.__class__ }}", "' OR 1=1", "é" * 400])
    if draw.random() < 0.5:
        return sampling() if not text else pb.GenerateRequest(text=text[:400], sampling=SamplingParams(max_tokens=2))
    chat = pb.Chat(messages=[pb.ChatMessage(role=draw.choice(["user", text[:50]]), content=text[:200])])
    return pb.GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=2))


def forms(draw: Draw) -> pb.GenerateRequest:
    return draw.choice(
        [
            lambda: sampling(json_schema='{"items":' * draw.randrange(200, 2000)),
            lambda: sampling(json_schema=json.dumps({"enum": ["x" * 70_000]})),
            lambda: sampling(json_schema='{"$ref": "http://169.254.169.254/"}'),
            lambda: sampling(regex="(" * draw.randrange(1, 5000)),
            lambda: sampling(regex="(a{1,1000}){1,1000}{1,1000}{1,1000}"),
            lambda: sampling(grammar="start: " + "(" * draw.randrange(1, 2000)),
            lambda: sampling(choice=pb.Choice(options=["a"] * 5000)),
        ]
    )()


def resumptions(draw: Draw) -> pb.GenerateRequest:
    request = sampling()
    request.resume.SetInParent()
    for _ in range(draw.randrange(3)):
        request.resume.outputs.add(index=draw.choice([0, 1, 2**32 - 1]), token_ids=[draw.randrange(2**32)])
    request.resume.num_prompt_logprobs = draw.choice([0, 1, 2**32 - 1])
    return request


def spoofs(draw: Draw) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", tenant=draw.choice(["iron", "", "gold/../iron", "x" * 500]))


def names(draw: Draw) -> dict[str, Any]:
    """Fields of texts' calls that name another caller's things, or missing ones."""
    return draw.choice([{"lora_name": "../../etc/passwd"}, {"tenant": "iron"}, {"tenant": "x" * 500}])


def embeds(draw: Draw) -> pb.EmbedRequest:
    one = [pb.EmbedInput(text="a")]
    return draw.choice(
        [
            lambda: pb.EmbedRequest(),
            lambda: pb.EmbedRequest(inputs=one * 5000),
            lambda: pb.EmbedRequest(inputs=[pb.EmbedInput()]),
            lambda: pb.EmbedRequest(inputs=[pb.EmbedInput(text="x" * 900_000)]),
            lambda: pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[2**32 - 1]))]),
            lambda: pb.EmbedRequest(inputs=one, dimensions=2**32 - 1),
            lambda: pb.EmbedRequest(inputs=one, pooling=99),  # type: ignore[arg-type]
        ]
    )()


def named_embeds(draw: Draw) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], **names(draw))


def scores(draw: Draw) -> pb.ScoreRequest:
    return draw.choice(
        [
            lambda: pb.ScoreRequest(),
            lambda: pb.ScoreRequest(query="a", documents=["b"] * 5000),
            lambda: pb.ScoreRequest(query="x" * 900_000, documents=["b"]),
            lambda: pb.ScoreRequest(query="a", documents=["b"], pair_format="{query.__class__}"),
        ]
    )()


def named_scores(draw: Draw) -> pb.ScoreRequest:
    return pb.ScoreRequest(query="a", documents=["b"], **names(draw))


def sounds(draw: Draw) -> pb.TranscribeRequest:
    """Sounds for a model without audio input."""
    header = b"RIFF\xff\xff\xff\xffWAVEfmt "
    data = draw.choice([b"", header, header + draw.randbytes(500), draw.randbytes(5000)])
    temperature = draw.choice([0.0, NAN, INFINITY, -1.0])
    return pb.TranscribeRequest(
        sound=pb.Sound(data=data, content_type=draw.choice(["", "audio/wav", "x" * 500])),
        language=draw.choice(["", "en", "../..", "x" * 10_000]),
        temperature=temperature,
    )


def probes(draw: Draw) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=draw.choice(["x", "../..", "x" * 300, "x" * 10_000]))


def reflections(draw: Draw) -> reflection_pb2.ServerReflectionRequest:
    text = draw.choice(["../../etc/passwd", "x" * 10_000, "\0", "pagewire.v1.Nothing", ""])
    return draw.choice(
        [
            lambda: reflection_pb2.ServerReflectionRequest(file_by_filename=text),
            lambda: reflection_pb2.ServerReflectionRequest(file_containing_symbol=text),
            lambda: reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type=text),
            lambda: reflection_pb2.ServerReflectionRequest(),
        ]
    )()


def watches(draw: Draw) -> admin.WatchClusterStateRequest:
    return admin.WatchClusterStateRequest(interval_ms=draw.choice([0, 1, 2**32 - 1]))


def finished(draw: Draw) -> admin.ListFinishedRequestsRequest:
    return admin.ListFinishedRequestsRequest(limit=draw.choice([0, 1001, 2**32 - 1]))


def drains(draw: Draw) -> admin.DrainWorkerRequest:
    return admin.DrainWorkerRequest(address=draw.choice(["", "../..", "x" * 10_000, "127.0.0.1:1"]))


def adapters(draw: Draw) -> admin.LoadAdapterRequest:
    return admin.LoadAdapterRequest(name=draw.choice(["", "../../etc/passwd", "/etc", "x" * 10_000, "\0"]))


INFERENCE, OPERATORS = "/pagewire.v1.InferenceService/", "/pagewire.v1.AdminService/"
HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@dataclass(frozen=True)
class Kind:
    """Requests of a method, and the right statuses."""

    method: str
    make: Callable[[Draw], Message]
    right: frozenset[grpc.StatusCode]

    @property
    def is_operators(self) -> bool:
        return self.method.startswith(OPERATORS)

    @property
    def is_open(self) -> bool:
        """Whether callers without a key may use it."""
        return self.method.startswith(HEALTH)


NAMED = frozenset({Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT})
GENERATE = f"{INFERENCE}Generate"
KINDS = [
    Kind(GENERATE, floats, REFUSED),
    Kind(GENERATE, crowds, REFUSED),
    Kind(GENERATE, lists, REFUSED),
    Kind(GENERATE, prompts, REFUSED | {Code.NOT_FOUND}),
    Kind(GENERATE, texts, FINE),
    Kind(GENERATE, forms, FINE),
    Kind(GENERATE, resumptions, FINE | {Code.FAILED_PRECONDITION}),
    Kind(GENERATE, spoofs, frozenset({Code.OK, Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT})),
    Kind(f"{INFERENCE}Embed", embeds, REFUSED),
    Kind(f"{INFERENCE}Embed", named_embeds, NAMED),
    Kind(f"{INFERENCE}Score", scores, REFUSED),
    Kind(f"{INFERENCE}Score", named_scores, NAMED),
    Kind(f"{INFERENCE}Transcribe", sounds, REFUSED | {Code.UNIMPLEMENTED}),
    Kind(f"{HEALTH}Check", probes, REFUSED | {Code.NOT_FOUND}),
    Kind(f"{HEALTH}Watch", probes, REFUSED | {Code.OK}),
    Kind(REFLECTION, reflections, frozenset({Code.OK, Code.INVALID_ARGUMENT})),
    Kind(f"{OPERATORS}WatchClusterState", watches, REFUSED),
    Kind(f"{OPERATORS}ListFinishedRequests", finished, REFUSED),
    Kind(f"{OPERATORS}DrainWorker", drains, REFUSED | {Code.NOT_FOUND}),
    Kind(f"{OPERATORS}UndrainWorker", drains, REFUSED | {Code.NOT_FOUND}),
    Kind(f"{OPERATORS}LoadAdapter", adapters, REFUSED | {Code.NOT_FOUND, Code.FAILED_PRECONDITION}),
    Kind(f"{OPERATORS}UnloadAdapter", adapters, REFUSED | {Code.NOT_FOUND}),
]
OTHERS = tuple(f"{INFERENCE}{name}" for name in ("Abort", "GetModel", "Tokenize", "Detokenize"))
"""Methods that receive changed bytes of other methods' requests."""


def changed(draw: Draw, data: bytes) -> bytes:
    """Bytes that are cut, doubled or changed."""
    array = bytearray(data)
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(array) + 1)
        match draw.randrange(4):
            case 0:
                array[place:place] = draw.randbytes(draw.randrange(1, 20))
            case 1:
                del array[place : place + draw.randrange(1, 10)]
            case 2 if place < len(array):
                array[place] ^= 1 << draw.randrange(8)
            case _:
                array += array[:place]
    return bytes(array[: 64 << 10])
