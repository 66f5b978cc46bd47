"""Counts the scheduler's memory that requests take: input when a request arrives, and output while it grows.

Admission limits the bytes of requests, not only their number, because one request may be 1,000 times as large as
another. Before any work on a request, an upper bound of its bytes is computed from its fields of variable length. While
a call is open, gRPC holds the received message and the parsed message. The front end also holds the message's token
ids, packed.

At admission, the length of an output is unknown. While its client reads, only a small part of an output is in memory.
The bytes of an output are therefore counted only from their creation until the client has read them. The unread output
of all requests together has a limit of its own. If unread output exceeds this limit, the request with the most unread
output is ended.
"""

from pagewire.v1 import inference_service_pb2 as pb

REQUEST_BYTES = 32 << 10
"""Bytes of a call with its asyncio task, stream and `SequenceGroup`, without the parts that the following constants
count.
"""
OUTPUT_BYTES = 4 << 10
"""Bytes of a sequence, with its detokenizer and the deltas that are not yet written to the client."""
NUMBER_BYTES = 31
"""Bytes of a token id, without the bytes in the received message. In the front end, a token id takes 8 bytes in the
parsed gRPC message, 4 bytes in a packed array, and 4 bytes in the message to the engine. In the engine, a token id
takes 4 bytes in a packed array and 5 bytes for the keys of cached blocks. Memory fragmentation takes the other 6 of the
31 bytes. Measured with 200 prompts of 100,000 tokens: a token takes 26.9 bytes in the front end and 10.0 bytes in the
engine. The measured 26.9 bytes include 3 bytes of the received message.
"""
CHARACTER_BYTES = 4
"""Bytes of a character, without the bytes in the received message. A character becomes at most one token."""
LOGPROB_BYTES = 72
POSITION_BYTES = 272
"""Bytes of a token position that has log-probabilities, in addition to `LOGPROB_BYTES` for each log-probability. A
position took 329 bytes with one log-probability, and 1,751 to 1,778 bytes with 21 log-probabilities.
"""
OUTPUT_TOKEN_BYTES = 42
"""Bytes of an output token that is not yet written to the client: an integer object, and an entry of a list with spare
capacity.
"""
TEXT_BYTES = 4 << 10
"""Bytes of memory of each text of a call with many texts: the text's asyncio task and list entries."""
SOUND_BYTES = 16 << 20
"""Bytes of memory of 30 seconds of sound: 2 MB of samples, 10 MB during the computation of features, and three copies
of the features (1 to 1.5 MB each). A call takes this memory after the engine has admitted the call.
"""
STRING_BYTES = 50
"""Bytes of a token's text that is stored as a separate string."""


def request_bytes(message: pb.GenerateRequest, num_bytes: int = 0) -> int:
    """An upper bound of the bytes that a request takes from its arrival until its stream is closed.

    `num_bytes`: bytes of the received message, if known.
    """
    sampling = message.sampling
    num_numbers = len(message.token_ids.ids) + len(sampling.allowed_token_ids) + 8 * len(sampling.logit_bias)
    num_numbers += len(message.encoder_token_ids.ids)
    num_numbers += sum(len(output.token_ids) for output in message.resume.outputs)
    num_characters = (
        len(message.text) + len(message.encoder_text) + sum(len(part.content) for part in message.chat.messages)
    )
    num_characters += sum(map(len, sampling.bad_words)) + sum(map(len, sampling.choice.options))
    num_characters += len(sampling.json_schema) + len(sampling.regex) + len(sampling.grammar)
    num_outputs = max(1, sampling.n, sampling.best_of, sampling.beam_width)
    return (
        REQUEST_BYTES
        + OUTPUT_BYTES * num_outputs
        + NUMBER_BYTES * num_numbers
        + CHARACTER_BYTES * num_characters
        + 2 * max(num_bytes, message.ByteSize())
    )


def sound_bytes(sound: pb.Sound, num_bytes: int = 0) -> int:
    """An upper bound of the bytes of a call with a sound, without the memory of the sound's windows (`SOUND_BYTES`)."""
    return REQUEST_BYTES + 3 * (num_bytes or sound.ByteSize())


def texts_bytes(message: pb.EmbedRequest | pb.ScoreRequest, num_bytes: int = 0) -> int:
    """An upper bound of the bytes of a call with many texts.

    For texts that are in the engine, `text_bytes` counts more bytes.
    """
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
    """Bytes of one text of a call, from its submission to the engine until its vectors are written."""
    return REQUEST_BYTES + NUMBER_BYTES * num_tokens + num_vector_bytes


def prompt_logprob_bytes(most: int | None, num_prompt_tokens: int) -> int:
    """Bytes of the prompt's log-probabilities that are not yet written: they may arrive faster than the client reads.

    Call this function after tokenization, which determines the number of prompt tokens. `most`: number of likeliest
    tokens at each position; None if the request has no log-probabilities.
    """
    return 0 if most is None else logprob_bytes(num_prompt_tokens, most + 1)


def logprob_bytes(num_positions: int, num_each: int) -> int:
    return num_positions * (POSITION_BYTES + num_each * LOGPROB_BYTES)


def output_bytes(num_tokens: int, num_characters: int) -> int:
    """Bytes of output that is not yet written to the client, without log-probabilities."""
    return OUTPUT_TOKEN_BYTES * num_tokens + CHARACTER_BYTES * num_characters


class UnreadOutput:
    """The bytes of output that clients have not read yet, summed over all streams of a front end."""

    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    @property
    def is_too_much(self) -> bool:
        return self.num_bytes > self.most
