"""Counts the scheduler's memory that requests take, because one request may be 1,000 times as large as another.

The input is bounded before any work, from the request's fields of variable length. The length of an output is unknown
at admission, so its bytes count from their creation until the client has read them. Beyond a limit on all unread
output, the request with the most is ended.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.sounds.families import MAX_SAMPLES, SAMPLE_BYTES, WINDOW

REQUEST_BYTES = 32 << 10
"""Bytes of a call's asyncio task, stream and `SequenceGroup`, without the parts below."""
OUTPUT_BYTES = 4 << 10
"""Bytes of a sequence, with its detokenizer and unsent deltas."""
NUMBER_BYTES = 31
"""Bytes of a token id, without those in the received message. Front end: 8 in the parsed message, 4 packed, 4 in the
message to the engine. Engine: 4 packed, 5 for keys of cached blocks. Fragmentation: 6. Measured with 200 prompts of
100,000 tokens: 26.9 in the front end (3 of the received message among them), 10.0 in the engine.
"""
CHARACTER_BYTES = 4
"""Bytes of a character, without those in the received message. A character becomes at most one token."""
LOGPROB_BYTES = 72
POSITION_BYTES = 272
"""Bytes of a position with log-probabilities, in addition to `LOGPROB_BYTES` each. Measured: 329 bytes with one
log-probability, 1,751 to 1,778 with 21.
"""
OUTPUT_TOKEN_BYTES = 42
"""Bytes of an unsent output token: an integer object, and an entry of a list with spare capacity."""
TEXT_BYTES = 4 << 10
"""Bytes of a text's asyncio task and list entries."""
SOUND_BYTES = 16 << 20
"""Bytes of 30 seconds of sound, taken after admission: 2 MB of samples, 10 MB for computing features, and three copies
of the features (1 to 1.5 MB each).
"""
ITEM_COPIES = 3
"""Copies of prompt_embeds, images and samples of sounds besides the received and the parsed message: of the front end,
on the way to the engine, and of the engine, which sends them to workers."""
WINDOW_BYTES = ITEM_COPIES * SAMPLE_BYTES * WINDOW
"""Bytes of the samples of 30 seconds of a sound in a prompt."""
STRING_BYTES = 50
"""Bytes of a token's text as a separate string."""


async def _not_counted(num_bytes: int) -> None:
    """Calls without a request."""


more_memory: ContextVar[Callable[[int], Awaitable[None]]] = ContextVar("more_memory", default=_not_counted)
"""Reserves further bytes for the current call. Raises RequestError if memory is lacking."""


def request_bytes(message: pb.GenerateRequest, num_bytes: int = 0) -> int:
    """An upper bound of a request's bytes until its stream is closed, without `sample_bytes`. `num_bytes`: bytes of the
    message, if known."""
    sampling = message.sampling
    num_numbers = len(message.token_ids.ids) + len(sampling.allowed_token_ids) + 8 * len(sampling.logit_bias)
    num_numbers += len(message.encoder_token_ids.ids)
    num_numbers += sum(len(output.token_ids) for output in message.resume.outputs)
    num_characters, num_item_bytes = _chat_size(message.chat)
    num_characters += len(message.text) + len(message.encoder_text)
    num_characters += sum(map(len, sampling.bad_words)) + sum(map(len, sampling.choice.options))
    num_characters += len(sampling.json_schema) + len(sampling.regex) + len(sampling.grammar)
    for part in message.parts.parts:
        num_numbers += len(part.token_ids.ids)
        num_characters += len(part.text)
        num_item_bytes += len(part.prompt_embeds) + len(part.image.data) + len(part.sound.data)
    num_outputs = max(1, sampling.n, sampling.best_of, sampling.beam_width)
    return (
        REQUEST_BYTES
        + OUTPUT_BYTES * num_outputs
        + NUMBER_BYTES * num_numbers
        + CHARACTER_BYTES * num_characters
        + ITEM_COPIES * num_item_bytes
        + 2 * max(num_bytes, message.ByteSize())
    )


def sample_bytes(message: pb.GenerateRequest) -> int:
    """An upper bound of the bytes of the samples that are taken after admission: the first 30 seconds of each sound in
    a prompt. Further ones are counted when they are decoded (`more_memory`)."""
    num_sounds = sum(part.HasField("sound") for part in message.parts.parts)
    num_sounds += sum(part.HasField("sound") for one in message.chat.messages for part in one.parts)
    return min(WINDOW_BYTES * num_sounds, ITEM_COPIES * SAMPLE_BYTES * MAX_SAMPLES)


def _chat_size(chat: pb.Chat) -> tuple[int, int]:
    """Characters, and bytes of images and sounds, in one pass: 4,096 messages take milliseconds."""
    num_characters, num_image_bytes = len(chat.tools) + len(chat.documents) + len(chat.template_arguments), 0
    for message in chat.messages:
        num_characters += len(message.content) + len(message.fields)
        for part in message.parts:
            num_characters += len(part.text)
            num_image_bytes += len(part.image.data) + len(part.sound.data)
    return num_characters, num_image_bytes


def sound_bytes(sound: pb.Sound, num_bytes: int = 0) -> int:
    """An upper bound of the bytes of a call with a sound, without its windows (`SOUND_BYTES`)."""
    return REQUEST_BYTES + 3 * (num_bytes or sound.ByteSize())


def texts_bytes(message: pb.EmbedRequest | pb.ScoreRequest, num_bytes: int = 0) -> int:
    """An upper bound of the bytes of a call with many texts, without those in the engine (`text_bytes`)."""
    if isinstance(message, pb.EmbedRequest):
        num_numbers = sum(len(item.token_ids.ids) for item in message.inputs)
        num_characters, num_texts = sum(len(item.text) for item in message.inputs), len(message.inputs)
    else:
        num_numbers, num_texts = 0, len(message.documents)
        num_characters = sum(map(len, message.documents)) + num_texts * (len(message.query) + len(message.pair_format))
    return (
        REQUEST_BYTES
        + TEXT_BYTES * num_texts
        + NUMBER_BYTES * num_numbers
        + CHARACTER_BYTES * num_characters
        + 2 * max(num_bytes, message.ByteSize())
    )


def text_bytes(num_tokens: int, num_vector_bytes: int) -> int:
    """Bytes of one text, from its submission to the engine until its vectors are written."""
    return REQUEST_BYTES + NUMBER_BYTES * num_tokens + num_vector_bytes


def prompt_logprob_bytes(most: int | None, num_prompt_tokens: int) -> int:
    """Bytes of the prompt's log-probabilities, of `most` tokens at each position: they may arrive faster than they are
    read.
    """
    return 0 if most is None else logprob_bytes(num_prompt_tokens, most + 1)


def logprob_bytes(num_positions: int, num_each: int) -> int:
    return num_positions * (POSITION_BYTES + num_each * LOGPROB_BYTES)


def output_bytes(num_tokens: int, num_characters: int) -> int:
    """Bytes of unsent output, without log-probabilities."""
    return OUTPUT_TOKEN_BYTES * num_tokens + CHARACTER_BYTES * num_characters


class UnreadOutput:
    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    @property
    def is_too_much(self) -> bool:
        return self.num_bytes > self.most
