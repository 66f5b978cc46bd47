"""A process that computes the masks of output forms (grammars) outside of the worker.

The worker starts this process with the tokenizer's file, the size of the vocabulary, the end-of-sequence tokens, and a
socket as stdin. A single mask can take seconds, and the library cannot be interrupted. The masks are therefore computed
in a process that the worker can kill.

At its start this process reads the tokenizer, which can take seconds. For each socket that the worker sends, this
process forks a child that computes masks. A fork takes milliseconds, and the child shares the tokenizer's memory. This
process has no threads, because a fork would lose threads. When the worker ends, this process ends.

An output that is new to the child process may have thousands of tokens to read. The child reads the tokens in slices,
one slice in each step of the output. Masks of other outputs therefore wait for at most one slice. Until all tokens are
read, the output's answers are late. A late answer contains no mask, and the output gains no token.

A form is compiled in a slice, too. If compiling takes longer than a slice, the next compilation is delayed by the same
time, so that other outputs can run. Several new forms are therefore compiled over several steps. Until a form is
compiled, its outputs are late. When one step compiled all forms, 60 forms of 0.2 s each stopped the streams of a worker
for 24 s.

The masks of a step take at most `MAX_SECONDS` in total. All masks beyond this limit are late. When one step computed
all masks, 200 outputs of `s: "=" | s s`, with 0.1 s a mask, stopped the streams of a worker for 20 s.
"""

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, process_time
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from pagewire_common.forms import MAX_SECONDS, parser_limits
from pagewire_common.processes.child_process import end_with_the_parent, leave_signals_to_the_parent
from worker_service.execution.sampling.form_tokenizer import form_tokenizer

MAX_KEPT = 32
"""Maximum number of compiled grammars in memory. Most grammars need less than 1 MB of memory; a few need tens of MB."""
MAX_MEMORY = 4 << 30
"""Maximum bytes of address space of a child process that computes masks."""
SLICE_SECONDS = 0.01
"""Maximum CPU seconds of a step for reading earlier tokens of new outputs, summed over all outputs. A forward pass
takes about 0.01 s, too. A slice reads 6,000 tokens of JSON. A token of a right-recursive list takes up to 0.25 ms
before the list reaches the library's limit.
"""
FEW_TOKENS = 16
"""Maximum unread tokens of an output that is not new, for example after accepted drafts. Outputs with few unread tokens
are read in separate slices.
"""
HEAD = struct.Struct("<dqI?")
"""The header of each mask, with four fields. The first field is the CPU seconds since the previous answer, without
compiling. The second field is the growth of the process's memory in bytes. The third field is the number of tokens
read. The last field tells whether the answer is late because tokens are unread.
"""
READY, FORK = b"\0", b"f"
MAX_REASON = 1000


class Work(NamedTuple):
    """A step's work for an output: read the output's new tokens. If the output `samples`, compute a mask after the
    tokens and a mask after each draft.

    An output's first work names its `form` and contains all of its tokens. If the work is `alone`, its form is compiled
    separately. After a late answer, the next work does not repeat the tokens.
    """

    key: int
    form: str
    token_ids: Sequence[int]
    samples: bool
    drafts: Sequence[int] = ()
    alone: bool = False


@dataclass(slots=True)
class _Output:
    form: str
    is_alone: bool
    matcher: LLMatcher | None = None
    """The matcher of the output's form, or None until the form is compiled."""
    unread: deque[int] = field(default_factory=deque)


class _Memory:
    """The memory of this process."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = resource.getpagesize()
        self._bytes = self._read()

    def growth(self) -> int:
        """Bytes by which the process's memory has grown since the last call, or since the start."""
        before, self._bytes = self._bytes, self._read()
        return self._bytes - before

    def _read(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) * self._page


class Follower:
    """Stores the matchers of outputs by their keys."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_tokens)
        self._num_bytes = -(-vocabulary_size // 32) * 4
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._outputs: dict[int, _Output] = {}
        self._memory = _Memory()
        self._slice = 0.0  # Seconds left of the current slice.
        self._compiles_at = 0.0  # Earliest monotonic time of the next compilation.

    def forget(self, key: int) -> None:
        self._outputs.pop(key, None)

    def do(self, all_work: Sequence[Work]) -> Iterator[bytes]:
        """Compute a step's work. Yields an answer for each output, then an answer for each of its drafts.

        An answer is a `HEAD` and a mask. A mask has a bit for each token that may come next. The mask is empty if no
        token may come next: after a forbidden draft, or after a draft that ends the output. The mask is also empty if
        the answer is late or the work does not sample.
        """
        self._slice = SLICE_SECONDS
        ends_at = process_time() + MAX_SECONDS
        left = SLICE_SECONDS if monotonic() >= self._compiles_at else 0.0  # seconds left for compiling
        for work in all_work:
            until = process_time() + SLICE_SECONDS
            if work.form:
                self._outputs[work.key] = _Output(work.form, work.alone)
            output = self._outputs[work.key]
            output.unread.extend(work.token_ids)
            began = process_time()
            if output.matcher is None and left > 0:
                output.matcher = self._matcher(output.form, output.is_alone)
                took, began = process_time() - began, process_time()
                left, self._compiles_at = left - took, max(self._compiles_at, monotonic()) + took
            matcher = output.matcher if process_time() < ends_at else None
            num_read = 0 if matcher is None else self._read(matcher, output.unread, until)
            is_late = matcher is None or bool(output.unread)
            masks = self._masks(matcher, work) if matcher is not None and work.samples and not is_late else iter(())
            for _ in range(1 + len(work.drafts)):
                mask = next(masks, b"")
                yield HEAD.pack(process_time() - began, self._memory.growth(), num_read, is_late) + mask
                began, num_read = process_time(), 0

    def _read(self, matcher: LLMatcher, unread: deque[int], until: float) -> int:
        """Read an output's tokens until the time of its slice is used up. Returns the number of tokens read.

        Tokens are read one at a time. The library cannot be interrupted, but it limits the time of one token.
        """
        num_unread = len(unread)
        is_new, began = num_unread > FEW_TOKENS, process_time()
        if is_new:
            until = min(until, began + self._slice)
        while unread and process_time() < until:
            token_id = unread.popleft()
            if token_id in self._ends and matcher.is_stopped():
                continue  # the text is complete, and the output has ended
            if not matcher.consume_token(token_id):
                unread.clear()
        if is_new:
            self._slice -= process_time() - began
        return num_unread - len(unread)

    def _masks(self, matcher: LLMatcher, work: Work) -> Iterator[bytearray]:
        mask = self._mask(matcher)
        yield mask
        # A copy of the matcher reads the drafts, because a matcher that has failed cannot be rolled back.
        ahead = matcher.deep_copy() if work.drafts and mask else matcher
        for draft in work.drafts:
            may_come = bool(mask) and mask[draft // 8] >> draft % 8 & 1 and not ahead.is_stopped()
            mask = self._mask(ahead) if may_come and ahead.consume_token(draft) else bytearray()
            yield mask

    def _mask(self, matcher: LLMatcher) -> bytearray:
        mask = bytearray(self._num_bytes)
        if not matcher.is_stopped():
            address = ctypes.addressof(ctypes.c_char.from_buffer(mask))
            matcher.unsafe_compute_mask_ptr(address, len(mask))
        if matcher.is_error():
            return bytearray()
        if matcher.is_stopped():  # the text is complete and cannot continue
            for token_id in self._ends:
                mask[token_id // 8] |= 1 << token_id % 8
        return mask

    def _matcher(self, form: str, alone: bool) -> LLMatcher:
        """A matcher that has read no tokens.

        A matcher that is not `alone` shares the library's cache for the form with other matchers. All matchers of the
        form also share the cache's limits. If a limit stops one matcher, the limit stops all matchers of the form.
        """
        compiled = self._compiled.pop(form, None)
        if alone or compiled is None or compiled.is_error():
            # The library's log is off, because the log would contain tokens of outputs.
            compiled = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
            # The mask of an empty output is computed first. Without this first mask, a mask after other tokens may take
            # very long. In the form yyyyy|z(a|aa|aaa){1,1000}…, the mask after z took 69 s instead of 6 ms.
            self._mask(compiled)
        if alone:
            return compiled
        self._compiled[form] = compiled
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def serve(self, connection: Connection) -> None:
        """Answer the worker's messages. Each message is a pair: the keys of outputs to forget, and the list of `Work`.

        Each answer is sent separately, so that the worker notices slow answers.
        """
        while True:
            try:
                gone, all_work = connection.recv()
            except (EOFError, OSError):
                return
            for key in gone:
                self.forget(key)
            for answer in self.do(all_work):
                connection.send_bytes(answer)


def main() -> None:
    end_with_the_parent()
    leave_signals_to_the_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombie children
    control = socket.socket(fileno=0)
    size, ends = int(sys.argv[2]), [int(end) for end in sys.argv[3].split(",")]
    try:
        tokenizer = form_tokenizer(Path(sys.argv[1]).read_text(), size, ends)
    # The library raises its own exceptions.
    except Exception as error:
        control.send((str(error) or type(error).__name__).encode()[:MAX_REASON])
        return
    control.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        (descriptor,) = descriptors
        if os.fork() == 0:
            end_with_the_parent()
            control.close()
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
            connection = Connection(descriptor)
            connection.send(os.getpid())
            Follower(tokenizer, size).serve(connection)
            os._exit(0)
        os.close(descriptor)


if __name__ == "__main__":
    main()
