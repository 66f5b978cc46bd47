"""How large a step is on the wire, bounded from above by arithmetic: nothing is encoded to find out.

Most of a step is small: of a sequence that the worker knows, a few numbers. What can be large is telling the worker of
a sequence for the first time, of what its encoder reads, or of a block table that is another one after a swap. So
these are counted in bytes, as chunks are counted in tokens: a step may tell of sequences until
`SchedulerConfig.max_step_bytes` are spent. The last one may go beyond that, so the first always fits, however large it
is; the others are told of in later steps.

Why no step comes near the 64 MiB that a message may have: besides `max_step_bytes`, 8 MiB, it holds one sequence, of
at most 5 bytes for each token of the context and what a request of 16 MiB can say of its sampling; at most 16 MiB of
blocks to swap (4,194,304 blocks a worker, in pairs of device and host); and 64 bytes or less for each sequence in the
step. Answers need no budget of their own, because they are counted in tokens: a prompt's position has at most 20
log-probabilities besides its own, which makes 194 bytes, and a beam less than 2 KB. 131,072 tokens and 8,192 sequences
in a step, the most that the settings allow, make 42 MB.
"""

from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence

NUMBER_BYTES = 5
"""The most that a number of 32 bits takes in a column."""
FIELDS_BYTES = 256
"""The most that everything of a fixed size takes: ids, counts, parameters, and the heads of the columns."""
CHARACTER_BYTES = 4
"""The most that a character takes."""
ENTRY_BYTES = 16
"""The most that the head of an entry takes: of a word, or of a biased token with its bias."""


def bytes_to_tell(sequence: Sequence, num_blocks: int) -> int:
    """The most bytes that it takes to tell the worker of a sequence whose block table has `num_blocks` entries.

    A worker that knows the sequence gets its table, one that knows its parent the tokens that are not the parent's as
    well, any other everything.
    """
    parent = sequence.forked_from
    num_numbers = num_blocks
    num_bytes = FIELDS_BYTES
    if sequence.is_known:
        pass
    elif isinstance(sequence, EncoderSequence):
        num_bytes += CHARACTER_BYTES * len(sequence.group.lora_name)
        if not sequence.is_computed:
            num_numbers += len(sequence.input.token_ids)
            num_bytes += sequence.input.num_feature_bytes
    elif parent is not None and parent.is_known:
        num_numbers += sequence.num_tokens - sequence.num_forked_tokens
    else:
        num_numbers += sequence.num_tokens
        num_bytes += sampling_bytes(sequence.sampling) + CHARACTER_BYTES * len(sequence.group.lora_name)
    return num_bytes + NUMBER_BYTES * num_numbers


def sampling_bytes(sampling: SamplingParams) -> int:
    """The most bytes that the lists and texts of the sampling parameters take."""
    num_numbers = len(sampling.eos_token_ids) + len(sampling.stop_token_ids) + len(sampling.allowed_token_ids)
    num_numbers += sum(map(len, sampling.bad_words))
    if sampling.transcript is not None:
        num_numbers += len(sampling.transcript.suppressed) + len(sampling.transcript.begin_suppressed)
    num_entries = len(sampling.logit_bias) + len(sampling.bad_words)
    return NUMBER_BYTES * num_numbers + ENTRY_BYTES * num_entries + CHARACTER_BYTES * len(sampling.form)


def swap_bytes(num_pairs: int) -> int:
    """The most bytes that it takes to have so many blocks copied."""
    return 2 * NUMBER_BYTES * num_pairs
