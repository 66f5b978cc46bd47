"""A process that computes the masks of output forms (grammars) outside of the worker.

Computing a single mask can take seconds, and the library llguidance cannot be interrupted. Masks are therefore computed
in a process that the worker can kill. The arguments of the process are the tokenizer's file, the size of the
vocabulary, and the end-of-sequence tokens. The process's stdin is a socket to the worker.

The started process reads the tokenizer, which can take seconds. For each socket that the worker sends, the started
process forks a child process that computes masks. A fork takes milliseconds, and the child process shares the
tokenizer's memory. The started process has no threads, because a forked child would not have them. When the worker
ends, the started process and its children end.

An output that is new to a child process may already have thousands of tokens, which the child process has to read. The
child process reads such tokens in time slices of `SLICE_SECONDS`, one slice in each step. Masks of other outputs
therefore wait for at most one slice. Until the child process has read all tokens of an output, its answers for the
output are late. A late answer contains no mask, and the output gains no token in the step.

Each step also has one time slice for compiling grammars. A compilation may take longer than its slice. The next
compilation is delayed by the time that the last one took, so that other outputs gain tokens in between. Until the
grammar of an output is compiled, the output is late. In an earlier version, one step compiled the grammars of all its
outputs. In that version, 60 grammars of 0.2 s each stopped all streams of a worker for 24 s.

All masks of a step together take at most `MAX_SECONDS`. Masks that are not computed within this limit are late. In an
earlier version without this limit, 200 outputs of the grammar `s: "=" | s s`, with 0.1 s for each mask, stopped all
streams of a worker for 20 s.
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
"""Maximum number of compiled grammars that a child process keeps. Most grammars need less than 1 MB of memory; a few
need tens of MB.
"""
MAX_MEMORY = 4 << 30
"""Maximum bytes of the address space of a child process."""
SLICE_SECONDS = 0.01
"""Maximum CPU time of a step, in seconds, for reading the tokens of all outputs that are new to the process. A forward
pass takes about as long. In one slice a matcher reads 6,000 tokens of JSON. In a right-recursive list, reading a token
takes up to 0.25 ms before the list exceeds llguidance's limit.
"""
FEW_TOKENS = 16
"""Maximum unread tokens of an output that is not new to the process, for example after accepted drafts. Each output
that is not new has a time slice of its own.
"""
HEAD = struct.Struct("<dqI?")
"""The header of an answer, which precedes the mask, has four fields. The first field is the CPU time in seconds since
the previous answer, without compiling. The second field is the growth of the process's memory in bytes. The third field
is the number of tokens that the matcher has read. The fourth field is true if the answer is late, because the matcher
has not read all tokens.
"""
READY, FORK = b"\0", b"f"
MAX_REASON = 1000


class Work(NamedTuple):
    """The work for one output in one step: read the output's new `token_ids`. If the output `samples`, also compute a
    mask after the tokens and a mask after each draft.

    The first `Work` for an output contains its `form` and all of its tokens. If the work is `alone`, the grammar is
    compiled separately for this output. After a late answer, the next `Work` does not repeat the tokens that the
    matcher has not read yet.
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
    """The matcher of the output's grammar, or None until the grammar is compiled."""
    unread: deque[int] = field(default_factory=deque)


class _Memory:
    """Measures the memory of this process."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = resource.getpagesize()
        self._bytes = self._read()

    def growth(self) -> int:
        """Bytes by which the process's memory has grown since the last call, or since this object was created."""
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
        """Do the work of a step. Yields for each output an answer for its next token, and then an answer for each of
        its drafts.

        An answer is a `HEAD` followed by a mask. A mask has a bit for each token that may come next. The mask has no
        bytes if no token may come next: after a draft that the grammar forbids, or after a draft that ends the output.
        The mask also has no bytes if the answer is late, or if the work does not sample.
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
        """Read an output's unread tokens until its time slice is used up. Returns the number of tokens read.

        The matcher reads one token in each call. A call of llguidance cannot be interrupted, but llguidance limits the
        time that reading one token takes.
        """
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
        # A copy of the matcher reads the drafts. The target may reject drafts, and a matcher that fails on a draft
        # cannot be rolled back.
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
        """A new matcher of a grammar, which has read no tokens yet.

        If a matcher is not `alone`, it shares llguidance's cache for the grammar with other matchers of the grammar.
        The matchers share the limits of the cache, too. If one matcher exceeds a limit, all matchers of the grammar
        fail.
        """
        compiled = self._compiled.pop(form, None)
        if alone or compiled is None or compiled.is_error():
            # llguidance's log is off, because the log would contain tokens of outputs.
            compiled = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
            # The mask before the first token is computed for each compiled grammar, because otherwise a later mask may
            # take very long. For the regular expression yyyyy|z(a|aa|aaa){1,1000}…, the mask after z took 69 s instead
            # of 6 ms.
            self._mask(compiled)
        if alone:
            return compiled
        self._compiled[form] = compiled
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def serve(self, connection: Connection) -> None:
        """Answer the worker's messages. Each message is a pair: the keys of ended outputs whose matchers can be freed,
        and the list of `Work` of a step.

        Each answer is sent as soon as it is computed, so that the worker notices an answer that takes too long.
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
    # llguidance raises exceptions of its own types.
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
