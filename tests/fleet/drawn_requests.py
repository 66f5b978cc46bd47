"""Random requests of every kind that a model accepts, compared with the same requests alone on a roomy server.

Only `priority` depends on the server, because one policy alone accepts it.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from image_files import image_file
from load import SCHEMA
from sampler_numbers import drawn

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.sampling import NUMBERS

TENANTS, SALTS = ("", "gold", "iron"), ("", "", "salt")
IMAGE_SIZES = ((20, 10), (28, 28), (40, 61), (90, 30), (8, 200))
LORA_NAMES = ("one", "two", "three")
WORDS = ("one two three ", "abcabcabc", "a long beginning that many have, ", "x" * 40, "{'role': 'é'} ")
BEGINNINGS = ("", *(word * number for number, word in enumerate(WORDS, 1)))
LETTERS = tuple("aeinorst ")
MAX_PROMPT_TOKENS, MAX_TOKENS, MAX_OUTPUTS = 180, 60, 4
IMAGE_TOKENS = 70
"""Tokens of an image in any model of the draws, at most."""
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "([a-z]{1,9} ){1,20}"},
    {"regex": "abX|c{40}", "bad_words": ["X"], "stop": ["ab"]},
    {"json_schema": SCHEMA, "bad_words": [" ", "\n", "\r", "\t"]},
    {"json_schema": '{"type": "object"}'},
    {"choice": pb.Choice(options=["a long answer", "another one of which the same is true", "é"])},
    {"grammar": 'start: l\nl: i | i "," l\ni: /[0-9]/'},
    {"grammar": 'root ::= sum\nsum ::= num ("+" num){2}\nnum ::= [0-9]{9,15}'},
)


@dataclass(frozen=True)
class Kind:
    """The kinds of requests that a model accepts."""

    has_forms: bool = True
    has_encoder: bool = False
    has_vectors: bool = True
    has_adapters: bool = True
    has_images: bool = False
    """Whether the model reads images. Its prompts are then token ids and images."""


@dataclass(frozen=True)
class Asked:
    """One call: its message, and its client's breaks and leaves."""

    message: pb.GenerateRequest | pb.EmbedRequest
    breaks_after: tuple[int, ...] = ()
    """Messages after which the stream breaks and is resumed, counted anew each time."""
    leaves_after: int = 0
    """Messages after which the client leaves; 0: never."""

    def num_blocks(self, block_size: int, lookahead: int) -> int:
        """Blocks that the request may need at once, or a few more."""
        if isinstance(self.message, pb.EmbedRequest):
            return max(len(item.text.encode()) + 2 for item in self.message.inputs) // block_size + 2
        sampling, message = self.message.sampling, self.message
        width = max(1, sampling.n, sampling.best_of, sampling.beam_width)
        in_parts = sum(len(part.token_ids.ids) or IMAGE_TOKENS for part in message.parts.parts)
        prompt = max(len(message.text.encode()), len(message.token_ids.ids), in_parts, 1)
        each = (prompt % block_size + sampling.max_tokens + lookahead) // block_size + 3
        return prompt // block_size + width * each


def draw_asked(draw: Random, kind: Kind) -> Asked:
    """A request of about one second at most, in a pool of any size that has room for it."""
    if kind.has_vectors and draw.random() < 0.12:
        return Asked(_vectors(draw))
    message = pb.GenerateRequest(
        sampling=_sampling(draw, kind),
        tenant=draw.choice(TENANTS),
        cache_salt=draw.choice(SALTS),
        priority=draw.randint(-3, 3),
        lora_name=draw.choice(LORA_NAMES) if kind.has_adapters and draw.random() < 0.3 else "",
    )
    text = _text(draw)
    if kind.has_images:
        _add_parts(draw, message)
    elif kind.has_encoder:
        message.encoder_text = text[:80]
        if draw.random() < 0.5:
            message.token_ids.ids.extend([0, *(draw.randrange(5, 250) for _ in range(draw.randrange(8)))])
    elif draw.random() < 0.2:
        message.token_ids.ids.extend(draw.randrange(3, 259) for _ in range(draw.randint(1, 60)))
    else:
        message.text = text
    if draw.random() < 0.03:
        _spoil(draw, message)
    roll = draw.random()
    breaks = tuple(draw.randint(1, 12) for _ in range(draw.randint(1, 3))) if roll < 0.25 else ()
    return Asked(message, breaks, draw.randint(1, 10) if roll > 0.92 else 0)


def without_priority(asked: Asked) -> Asked:
    """For servers without the policy "priority"."""
    message = type(asked.message)()
    message.CopyFrom(asked.message)  # type: ignore[arg-type]
    message.priority = 0
    return replace(asked, message=message)


def _text(draw: Random) -> str:
    tail = "".join(draw.choices("abcde fé", k=draw.randint(1, 25)))
    return (draw.choice(BEGINNINGS) + tail).encode()[:MAX_PROMPT_TOKENS].decode(errors="ignore")


def _add_parts(draw: Random, message: pb.GenerateRequest) -> None:
    """Token ids, and up to three of the few images that many requests have."""
    message.sampling.ClearField("prompt_logprobs")
    for _ in range(draw.randint(1, 3)):
        message.parts.parts.add().token_ids.ids.extend(draw.randrange(4, 90) for _ in range(draw.randint(1, 12)))
        if draw.random() < 0.7:
            message.parts.parts.add().image.data = image_file(*draw.choice(IMAGE_SIZES))
    message.parts.parts.add().token_ids.ids.extend(draw.randrange(4, 90) for _ in range(draw.randint(1, 12)))


def _vectors(draw: Random) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        inputs=[pb.EmbedInput(text=_text(draw)) for _ in range(draw.randint(1, 6))],
        pooling=draw.choice([pb.POOLING_CLS, pb.POOLING_MEAN, pb.POOLING_LAST, pb.POOLING_ALL]),
        normalize=draw.random() < 0.5,
        dimensions=draw.choice([0, 0, 7]),
        tenant=draw.choice(TENANTS),
        cache_salt=draw.choice(SALTS),
        priority=draw.randint(-3, 3),
    )


def _sampling(draw: Random, kind: Kind) -> pb.SamplingParams:
    """Compatible fields; each sampled output has a seed, because others could not be compared."""
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, MAX_TOKENS)}
    if draw.random() < 0.12:
        width = draw.randint(2, MAX_OUTPUTS)
        fields |= {"beam_width": width, "n": draw.randint(1, width), "length_penalty": draw.choice([0.0, 1.0, -1.5])}
        return pb.SamplingParams(**fields, early_stopping=draw.random() < 0.5, logprobs=_maybe(draw, 0.3, 2))
    fields |= {"temperature": draw.choice([0.0, 0.3, 0.8, 1.3]), "seed": draw.getrandbits(40)}
    others: dict[str, Any] = {
        "top_k": draw.choice([1, 3, 40]),
        "top_p": draw.choice([0.3, 0.9]),
        "min_p": draw.choice([0.01, 0.2]),
        "presence_penalty": draw.uniform(-1, 1),
        "frequency_penalty": draw.uniform(-1, 1),
        "repetition_penalty": draw.choice([0.8, 1.05, 1.5]),
        "min_tokens": draw.randint(0, fields["max_tokens"]),
        "logprobs": draw.randint(0, 5),
        "prompt_logprobs": draw.randint(0, 3),
        "stop": [*draw.sample(LETTERS, 2), "".join(draw.choices(LETTERS, k=2))],
        "stop_token_ids": [draw.randrange(3, 259) for _ in range(8)],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": {draw.randrange(259): draw.uniform(-5, 5) for _ in range(20)},
        "bad_words": [*draw.sample(LETTERS, 3), "ab"],
        "allowed_token_ids": sorted(draw.sample(range(259), draw.choice([3, 30, 150]))),
        "n": draw.randint(2, MAX_OUTPUTS),
    }
    others |= {name: drawn(name, draw) for name in NUMBERS if name not in fields | others}
    fields |= {name: value for name, value in others.items() if draw.random() < 0.15}
    if draw.random() < 0.1:
        fields |= {"best_of": draw.randint(fields.get("n", 1), MAX_OUTPUTS)}
    if kind.has_forms and draw.random() < 0.25:
        fields.pop("allowed_token_ids", None)
        return pb.SamplingParams(**fields | draw.choice(FORMS))
    return pb.SamplingParams(**fields, ignore_eos=draw.random() < 0.7)


def _maybe(draw: Random, chance: float, value: int) -> int | None:
    return value if draw.random() < chance else None


def _spoil(draw: Random, message: pb.GenerateRequest) -> None:
    """Make the message one that is refused."""
    match draw.randrange(4):
        case 0:
            message.lora_name = "none of that name"
        case 1:
            message.sampling.temperature = float("nan")
        case 2:
            message.sampling.stop_token_ids.append(100_000)
        case 3:
            message.tenant = "x" * 300
