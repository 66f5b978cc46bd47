"""Follows forms outside of the worker, which starts it with the tokenizer's file, the size of the vocabulary, the ends
of sequence, and a socket as stdin.

A form can be made to take seconds for a single mask, and the library cannot be told to stop. So it is followed by a
process that can be killed: this one reads the tokenizer, which takes up to seconds, and forks one that follows forms
whenever it is sent a socket, which takes milliseconds. Forks share what was read. It has no threads that a fork would
lose, and ends with the worker.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from pagewire_common.child_process import end_with_the_parent, leave_signals_to_the_parent
from pagewire_common.forms import parser_limits
from worker_service.execution.form_tokenizer import form_tokenizer

MOST_KEPT = 32
"""Grammars that are kept compiled. One takes up to some tens of MB, most take less than one."""
MOST_MEMORY = 4 << 30
"""Bytes of addresses of a process that follows forms."""
READY, FORK = b"\0", b"f"
MOST_REASON = 1000


class Work(NamedTuple):
    """What is to be done for an output: read these tokens, and then, if it `samples`, say what may follow, and what
    after each of some guesses.

    An output's first work names its `form` and has all of its tokens; if it is `alone`, its form is compiled for it.
    """

    key: int
    form: str
    token_ids: Sequence[int]
    samples: bool
    guesses: Sequence[int] = ()
    alone: bool = False


class Follower:
    """Keeps the matchers of outputs, by keys."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._num_bytes = -(-vocabulary_size // 32) * 4
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the one that was used last is last
        self._matchers: dict[int, LLMatcher] = {}

    def forget(self, key: int) -> None:
        self._matchers.pop(key, None)

    def do(self, work: Work) -> Iterator[bytearray]:
        """A bit for each token that may come next, then the same after each guess.

        Empty where no token may, as beyond a guess that may not come, or that ends the output; and once, if it does not
        sample.
        """
        if work.form:
            self._matchers[work.key] = self._matcher(work.form, work.alone)
        matcher = self._matchers[work.key]
        if not matcher.is_stopped():
            matcher.consume_tokens(list(work.token_ids))
        mask = self._mask(matcher) if work.samples else bytearray()
        yield mask
        guessing = matcher.deep_copy() if work.guesses and mask else matcher  # one that has failed would not go back
        for guess in work.guesses:
            may_come = bool(mask) and mask[guess // 8] >> guess % 8 & 1 and not guessing.is_stopped()
            mask = self._mask(guessing) if may_come and guessing.consume_token(guess) else bytearray()
            yield mask

    def _mask(self, matcher: LLMatcher) -> bytearray:
        mask = bytearray(self._num_bytes)
        if not matcher.is_stopped():
            address = ctypes.addressof(ctypes.c_char.from_buffer(mask))
            matcher.unsafe_compute_mask_ptr(address, len(mask))
        if matcher.is_error():
            return bytearray()
        if matcher.is_stopped():  # the text is whole and cannot go on
            for token_id in self._tokenizer.eos_tokens:
                mask[token_id // 8] |= 1 << token_id % 8
        return mask

    def _matcher(self, form: str, alone: bool) -> LLMatcher:
        """One that has read nothing. Unless it is `alone`, it shares what the library finds out of the form with
        others, and the limits on that: where these end one of them, they end all."""
        compiled = self._compiled.pop(form, None)
        if alone or compiled is None or compiled.is_error():
            # What it would log names tokens of outputs.
            compiled = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
        if alone:
            return compiled
        self._compiled[form] = compiled
        if len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def serve(self, connection: Connection) -> None:
        """Messages are (keys to forget, work). Each mask is sent by itself: so it is known which takes long."""
        while True:
            try:
                gone, all_work = connection.recv()
            except (EOFError, OSError):
                return
            for key in gone:
                self.forget(key)
            for work in all_work:
                for mask in self.do(work):
                    connection.send_bytes(mask)


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
