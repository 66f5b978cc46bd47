"""Follows forms outside of the worker, which starts it with the tokenizer's file, the size of the vocabulary, the ends
of sequence, and a socket as stdin.

A form can be made to take seconds for a single mask, and the library cannot be told to stop. So it is followed by a
process that can be killed: this one reads the tokenizer, which takes up to seconds, and forks one that follows forms
whenever it is sent a socket, which takes milliseconds. Forks share what was read. It has no threads that a fork would
lose, and ends with the worker.

An output that is new to the process may have thousands of tokens to read. They are read in slices, one in each step
that the output is in, so that masks of other outputs wait for a slice at most. Until all are read its answers are late.

A form is compiled in a slice too, which may be longer than others, and then as much time is left to others. Forms that
come together are so compiled in several steps, and their outputs are late until then. When all were compiled in one
step, 60 forms of 0.2 s each held the streams of a worker for 24 s.

Masks of a step take `MOST_SECONDS` together, and those that are left then are late. When all were found in one step,
200 outputs of `s: "=" | s s`, of which a mask takes 0.1 s, held the streams of a worker for 20 s.
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

from pagewire_common.forms import MOST_SECONDS, parser_limits
from pagewire_common.processes.child_process import end_with_the_parent, leave_signals_to_the_parent
from worker_service.execution.sampling.form_tokenizer import form_tokenizer

MOST_KEPT = 32
"""Grammars that are kept compiled. One takes up to some tens of MB, most take less than one."""
MOST_MEMORY = 4 << 30
"""Bytes of addresses of a process that follows forms."""
SLICE_SECONDS = 0.01
"""Of a processor's time, for reading what outputs have written before, in one step, all of them together. A forward
pass takes about as long. In it, 6,000 tokens of JSON are read; 0.25 ms are the most that one of a right-recursive
list takes before the list reaches the library's limit."""
FEW_TOKENS = 16
"""An output with no more tokens to read is not new: it has accepted drafts. It has a slice of its own."""
HEAD = struct.Struct("<dqI?")
"""Before each mask: seconds of a processor since the answer before, except to compile the form; by how many bytes the
process has grown since; how many tokens were read; and whether the answer is late because there are more of them."""
READY, FORK = b"\0", b"f"
MOST_REASON = 1000


class Work(NamedTuple):
    """What is to be done for an output: read these tokens, and then, if it `samples`, say what may follow, and what
    after each of some drafts.

    An output's first work names its `form` and has all of its tokens; if it is `alone`, its form is compiled for it.
    Work after an answer that is late has none of them again.
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
    """Once the form is compiled."""
    unread: deque[int] = field(default_factory=deque)


class _Memory:
    """Of this process."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = resource.getpagesize()
        self._bytes = self._read()

    def growth(self) -> int:
        """Bytes of memory that were taken since the last call, or since the beginning."""
        before, self._bytes = self._bytes, self._read()
        return self._bytes - before

    def _read(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[1]) * self._page


class Follower:
    """Keeps the matchers of outputs, by keys."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_tokens)
        self._num_bytes = -(-vocabulary_size // 32) * 4
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the one that was used last is last
        self._outputs: dict[int, _Output] = {}
        self._memory = _Memory()
        self._slice = 0.0  # seconds that are left of it
        self._compiles_at = 0.0  # not before, of a monotonic clock

    def forget(self, key: int) -> None:
        self._outputs.pop(key, None)

    def do(self, all_work: Sequence[Work]) -> Iterator[bytes]:
        """A step's work: for each, an answer, and then one for each of its drafts. Each is a `HEAD` and a mask.

        A mask has a bit for each token that may come next. It is empty where no token may, as beyond a draft that may
        not come, or that ends the output; where the answer is late; and if the work does not sample.
        """
        self._slice = SLICE_SECONDS
        ends_at = process_time() + MOST_SECONDS
        left = SLICE_SECONDS if monotonic() >= self._compiles_at else 0.0  # to compile
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
        """Read what an output has written, until its slice is over; returns how many tokens were read.

        Token by token: the library cannot be told to stop, and what it takes for one has a limit.
        """
        num_unread = len(unread)
        is_new, began = num_unread > FEW_TOKENS, process_time()
        if is_new:
            until = min(until, began + self._slice)
        while unread and process_time() < until:
            token_id = unread.popleft()
            if token_id in self._ends and matcher.is_stopped():
                continue  # the text is whole, and has been ended
            if not matcher.consume_token(token_id):
                unread.clear()
        if is_new:
            self._slice -= process_time() - began
        return num_unread - len(unread)

    def _masks(self, matcher: LLMatcher, work: Work) -> Iterator[bytearray]:
        mask = self._mask(matcher)
        yield mask
        ahead = matcher.deep_copy() if work.drafts and mask else matcher  # one that has failed would not go back
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
        if matcher.is_stopped():  # the text is whole and cannot go on
            for token_id in self._ends:
                mask[token_id // 8] |= 1 << token_id % 8
        return mask

    def _matcher(self, form: str, alone: bool) -> LLMatcher:
        """One that has read nothing. Unless it is `alone`, it shares what the library finds out of the form with
        others, and the limits on that: where these end one of them, they end all."""
        compiled = self._compiled.pop(form, None)
        if alone or compiled is None or compiled.is_error():
            # What it would log names tokens of outputs.
            compiled = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
            # An output finds this mask first. Without it, the first one that is found behind tokens may take forever:
            # 69 s in place of 6 ms behind the z of yyyyy|z(a|aa|aaa){1,1000}…
            self._mask(compiled)
        if alone:
            return compiled
        self._compiled[form] = compiled
        if len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def serve(self, connection: Connection) -> None:
        """Messages are (keys to forget, work). Each answer is sent by itself: so it is known which takes long."""
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
    control = socket.socket(fileno=0)
    size, ends = int(sys.argv[2]), [int(end) for end in sys.argv[3].split(",")]
    try:
        tokenizer = form_tokenizer(Path(sys.argv[1]).read_text(), size, ends)
    except Exception as error:  # of the library's own kinds
        control.send((str(error) or type(error).__name__).encode()[:MOST_REASON])
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
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            connection = Connection(descriptor)
            connection.send(os.getpid())
            Follower(tokenizer, size).serve(connection)
            os._exit(0)
        os.close(descriptor)


if __name__ == "__main__":
    main()
