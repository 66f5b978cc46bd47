"""What a request takes of the scheduler's memory, known from its message, before any work is done for it.

The number of requests bounds nothing: one may be a thousand times as large as another. So requests are admitted by
bytes as well, counted as an upper bound from what a client can make large. As long as a call is open gRPC holds the
message as it came and as it was parsed; we hold its numbers once more, packed.
"""

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.request import GenerationRequest

REQUEST_BYTES = 32 << 10
"""Of a call, its task, its stream and its group, without what follows."""
OUTPUT_BYTES = 4 << 10
"""Of a sequence, its detokenizer and what waits to be written of it."""
NUMBER_BYTES = 16
"""Of a token id besides its bytes in the message: 8 where it was parsed, in a column that has grown, 4 packed, and 4
lost between requests. Measured with a full queue of prompts of 100,000 tokens: 19.4 bytes a token, of which 3 came.
"""
CHARACTER_BYTES = 4
"""Of a character besides its bytes in the message: it becomes a token at most."""
LOGPROB_BYTES = 84
"""Of a log-probability until it is written. Measured with 21 of each position of a prompt: 1,751 bytes a position."""


def request_bytes(message: pb.GenerateRequest) -> int:
    """An upper bound of the bytes that a request takes from its arrival until its stream is closed."""
    sampling = message.sampling
    num_numbers = len(message.token_ids.ids) + len(sampling.allowed_token_ids) + 8 * len(sampling.logit_bias)
    num_numbers += sum(len(output.token_ids) for output in message.resume.outputs)
    num_characters = len(message.text) + sum(len(part.content) for part in message.chat.messages)
    num_characters += sum(map(len, sampling.bad_words))
    num_outputs = max(1, sampling.n, sampling.best_of, sampling.beam_width)
    return (
        REQUEST_BYTES
        + OUTPUT_BYTES * num_outputs
        + NUMBER_BYTES * num_numbers
        + CHARACTER_BYTES * num_characters
        + 2 * message.ByteSize()
    )


def prompt_logprob_bytes(request: GenerationRequest) -> int:
    """What the log-probabilities of the prompt take until they are written; they may come faster than they are read.

    They are counted last, because the number of the prompt's tokens may be known only when the prompt is.
    """
    most = request.sampling.prompt_logprobs
    return 0 if most is None else LOGPROB_BYTES * (most + 1) * len(request.prompt_token_ids)
