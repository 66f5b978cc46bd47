"""How much of the scheduler's memory requests take: counted when a request comes, and for its output as it grows.

The number of requests bounds no memory: one may be a thousand times as large as another. So requests are admitted by
bytes as well. Before any work is done for a request, an upper bound is counted from what its client can make large. As
long as a call is open gRPC holds the message as it came and as it was parsed; we hold its numbers once more, packed.

The length of an output is not known then, and little of it waits while its client reads. So output counts from the
moment at which it is made until the client has read it. All unread output together may take a share of the memory
besides; when it takes more, the request with the most unread output ends.
"""

from pagewire.v1 import inference_service_pb2 as pb

REQUEST_BYTES = 32 << 10
"""Bytes of a call, its task, its stream and its group, without the parts below."""
OUTPUT_BYTES = 4 << 10
"""Bytes of a sequence, its detokenizer and its deltas that wait to be written."""
NUMBER_BYTES = 31
"""Bytes of a token id besides its bytes in the message. In the front end it takes 8 in the parsed column and 4 packed,
and 4 on the way to the engine. In the engine it takes 4 packed and 5 as keys of blocks. The rest is lost between
requests. Measured with 200 prompts of 100,000 tokens: 26.9 bytes a token in the front end, of which 3 came, 10.0 in the
engine.
"""
CHARACTER_BYTES = 4
"""Bytes of a character besides its bytes in the message: it becomes a token at most."""
LOGPROB_BYTES = 72
POSITION_BYTES = 272
"""Bytes of a log-probability until it is written, and of a position with log-probabilities. Measured: 329 bytes a
position with one, 1,751 to 1,778 with 21.
"""
OUTPUT_TOKEN_BYTES = 42
"""Bytes of an output's token until it is written: the number, and its place in a list that has grown."""
TEXT_BYTES = 4 << 10
"""Bytes of one text of a call of many, for its task and its place in lists."""
SOUND_BYTES = 16 << 20
"""Bytes of 30 seconds of sound: 2 MB of samples, 10 MB while they become features, and three copies of the features (1
to 1.5 MB each) on their way to the engine. A call takes them once it is admitted."""
STRING_BYTES = 50
"""Bytes of a token's text, if it is kept as a string of its own."""


def request_bytes(message: pb.GenerateRequest, num_bytes: int = 0) -> int:
    """An upper bound of the bytes that a request takes from its arrival until its stream is closed.

    `num_bytes` is how many it had when it came.
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
    """The same for a call with a sound, without what its windows take."""
    return REQUEST_BYTES + 3 * (num_bytes or sound.ByteSize())


def texts_bytes(message: pb.EmbedRequest | pb.ScoreRequest, num_bytes: int = 0) -> int:
    """The same for a call of many texts, without what each takes while it is computed."""
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
    """The bytes that one text of a call takes while its vectors are computed and until they are written."""
    return REQUEST_BYTES + NUMBER_BYTES * num_tokens + num_vector_bytes


def prompt_logprob_bytes(most: int | None, num_prompt_tokens: int) -> int:
    """The bytes of the prompt's log-probabilities until they are written; they may come faster than they are read.

    They are counted last, because the number of tokens may be known only after tokenization. `most`: the number of
    likeliest tokens at each position, None for no log-probabilities.
    """
    return 0 if most is None else logprob_bytes(num_prompt_tokens, most + 1)


def logprob_bytes(num_positions: int, num_each: int) -> int:
    return num_positions * (POSITION_BYTES + num_each * LOGPROB_BYTES)


def output_bytes(num_tokens: int, num_characters: int) -> int:
    """Bytes of output until it is written, without its log-probabilities."""
    return OUTPUT_TOKEN_BYTES * num_tokens + CHARACTER_BYTES * num_characters


class UnreadOutput:
    """The bytes of output that no client has read, of all streams of a front end together."""

    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    @property
    def is_too_much(self) -> bool:
        return self.num_bytes > self.most
