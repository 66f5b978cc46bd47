"""A process that computes the masks of output forms (grammars), and that the worker can kill.

A mask can take seconds, and llguidance cannot be interrupted. Arguments: the tokenizer's file, the vocabulary's size,
and the end-of-sequence tokens. Stdin is a socket to the worker.

The process reads the tokenizer, which can take seconds, and forks a child for each socket that the worker sends. A fork
takes milliseconds and shares the tokenizer's memory. The process has no threads, because a forked child would lack
them.

A child reads the tokens of new outputs in slices of `SLICE_SECONDS`, one slice a step. Until all tokens are read, an
output is late: the answer has no mask, and the output gains no token.

Compiling grammars also has one slice a step. After a compilation, the next waits as long as the last took. Without this
pause, 60 grammars of 0.2 s each stopped all streams of a worker for 24 s.

All masks of a step together take at most `MAX_SECONDS`. The remaining masks are late. Without this limit, 200 outputs
of the grammar `s: "=" | s s`, at 0.1 s a mask, stopped all streams for 20 s."""

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
"""Compiled grammars that a child keeps. Most need less than 1 MB, a few tens of MB."""
MAX_MEMORY = 4 << 30
"""Bytes of a child's address space."""
SLICE_SECONDS = 0.01
"""CPU seconds of a step for reading tokens of new outputs, about one forward pass. A slice reads 6,000 tokens of JSON.
In a right-recursive list, a token takes up to 0.25 ms before llguidance's limit ends the list."""
FEW_TOKENS = 16
"""Maximum unread tokens of an output that is not new, such as accepted drafts. Each of these outputs has its own
slice."""
HEAD = struct.Struct("<dqI?")
"""The header before a mask: CPU seconds since the last answer without compiling, growth of memory in bytes, number of
tokens read, and whether the answer is late."""
READY, FORK = b"\0", b"f"
MAX_REASON = 1000


class Work(NamedTuple):
    """The work for one output in one step: read `token_ids` and, if the output `samples`, compute a mask after them and
    after each draft.

    The first `Work` of an output has its `form` and all tokens. `alone`: the grammar is compiled for this output only.
    Unread tokens of a late output are not sent again."""

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
    """None until the grammar is compiled."""
    unread: deque[int] = field(default_factory=deque)


class _Memory:
    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = resource.getpagesize()
        self._bytes = self._read()

    def growth(self) -> int:
        """Bytes by which the process has grown since the last call."""
        before, self._bytes = self._bytes, self._read()
        return self._bytes - before

    def _read(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) * self._page


class Follower:
    """Reads outputs and computes masks in a child process, with one matcher for each output."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_tokens)
        self._num_bytes = -(-vocabulary_size // 32) * 4
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._outputs: dict[int, _Output] = {}
        self._memory = _Memory()
        self._slice = 0.0  # CPU seconds left for new outputs in this step.
        self._compiles_at = 0.0  # Monotonic time before which no grammar is compiled.

    def forget(self, key: int) -> None:
        self._outputs.pop(key, None)

    def do(self, all_work: Sequence[Work]) -> Iterator[bytes]:
        """Do a step's work. Yields for each output an answer for its next token, and one for each draft.

        An answer is a `HEAD` and a mask with a bit for each allowed token. The mask is empty if no token may follow (a
        draft is forbidden or ends the output), if the answer is late, or if the work does not sample."""
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
        """Read unread tokens until the time slice is used up. Returns the number of tokens read.

        One call reads one token, because llguidance cannot be interrupted but limits the time of a token."""
        num_unread = len(unread)
        is_new, began = num_unread > FEW_TOKENS, process_time()
        if is_new:
            until = min(until, began + self._slice)
        while unread and process_time() < until:
            token_id = unread.popleft()
            if token_id in self._ends and matcher.is_stopped():
                continue  # an end-of-sequence token after a complete text
            if not matcher.consume_token(token_id):
                unread.clear()
        if is_new:
            self._slice -= process_time() - began
        return num_unread - len(unread)

    def _masks(self, matcher: LLMatcher, work: Work) -> Iterator[bytearray]:
        mask = self._mask(matcher)
        yield mask
        # A copy reads the drafts, because a matcher that fails on a draft cannot be rolled back.
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
        if matcher.is_stopped():  # only the end of sequence may follow
            for token_id in self._ends:
                mask[token_id // 8] |= 1 << token_id % 8
        return mask

    def _matcher(self, form: str, alone: bool) -> LLMatcher:
        """A new matcher of a grammar.

        Matchers that are not `alone` share llguidance's cache and its limits: if one exceeds a limit, all matchers of
        the grammar fail."""
        compiled = self._compiled.pop(form, None)
        if alone or compiled is None or compiled.is_error():
            # llguidance's log would contain tokens of outputs.
            compiled = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
            # Without a first mask, a later mask may take very long. For yyyyy|z(a|aa|aaa){1,1000}…, the mask after z
            # took 69 s instead of 6 ms.
            self._mask(compiled)
        if alone:
            return compiled
        self._compiled[form] = compiled
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def serve(self, connection: Connection) -> None:
        """Answer messages of the worker: keys of ended outputs, and a step's `Work`. Each answer is sent at once, so
        that the worker notices a slow answer."""
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
    # llguidance raises its own exception types.
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
