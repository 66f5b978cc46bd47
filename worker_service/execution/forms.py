"""Holds outputs to their forms: which tokens may come next, found while the forward pass runs.

A form is a grammar, which llguidance reads: an Earley parser above a lexer, walked along a trie of all tokens. A
matcher has read an output's tokens so far, and knows which may follow. It is a function of these tokens, so it is made
again wherever the sequence is: after a preemption, on another worker, in a resumed stream. Matchers are in a process of
their own, form_process.py; a thread here speaks with it, and the device thread waits for that where it samples. The
scheduler has checked the form.

A form for which the process computes too long ends its own output: the process is killed, another one goes on with the
others, and the form is not tried again. So a form keeps other outputs waiting for at most three times `MOST_SECONDS` in
a step: for its mask, for the masks after guesses, and once more where it fails and is read anew, without guesses.
"""

import contextlib
import itertools
import socket
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import structlog

from pagewire_common.child_process import start_child
from pagewire_common.eos_tokens import eos_token_ids
from pagewire_common.forms import MOST_SECONDS
from pagewire_common.generation_config import FILE, GenerationConfig
from worker_service.execution.form_process import FORK, MOST_REASON, READY, Work
from worker_service.loading.json_file import read_json
from worker_service.loading.tokenizer_files import eos_token_id
from worker_service.session.session import NO_DRAFTS, ScheduledChunk, SequenceState

log = structlog.get_logger()

LOOK_SECONDS = 0.05
DEAF_SECONDS = 10.0
"""A process that neither computes nor answers for so long is stuck."""
START_SECONDS = 60.0
MOST_REFUSED = 1024


class FormMasks:
    """The tokens that may come next in a step, of the sequences that have a form and sample, and after guesses."""

    def __init__(self, rows: dict[tuple[int, int], int], masks: "Future[npt.NDArray[np.uint8]]") -> None:
        self._rows = rows  # by sequence id and number of tokens
        self._masks = masks  # [rows, bytes]

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        """[sequences, bytes], a bit a token, the lowest of a byte first, once they are known.

        A sequence whose form cannot go on has none.
        """
        return self._masks.result()[[self._rows[one.sequence_id, len(one.token_ids)] for one in sequences]]


@dataclass(slots=True, eq=False)
class _Progress:
    """How far an output has been read, and by which process. When it goes, its key is among those to forget."""

    key: int
    gone: deque[int]
    reader: Connection | None = None
    num_tokens: int = 0
    is_alone: bool = False
    """Whether its form is compiled for it, and nothing guessed: outputs of one form, and guesses, share limits of the
    library, and some have ended a reading of it."""
    is_fresh: bool = False
    """Whether it was so for all of its tokens, by a matcher that has found no masks but this one."""

    def __del__(self) -> None:
        self.gone.append(self.key)


class _Item(NamedTuple):
    form: str
    progress: _Progress
    token_ids: "array[int]"  # all of the output
    samples: bool
    guesses: "array[int]"


class Forms:
    """Speaks with the process that follows forms, for one model."""

    def __init__(self, tokenizer: Path, vocabulary_size: int, ends: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocabulary_size), ",".join(map(str, ends))]
        self._vocabulary_size = vocabulary_size
        self._keys = itertools.count()
        self._gone: deque[int] = deque()
        self._refused: OrderedDict[int, None] = OrderedDict()  # by hashes, see `_refuse`: a form may have 64 KiB
        self._thread = ThreadPoolExecutor(1, "forms")
        self._reader: Connection | None = None
        self._process: psutil.Process  # which knows if its id is another process's by now
        self._start()

    @classmethod
    def load(cls, files: Sequence[Path], vocabulary_size: int) -> "Forms | None":
        """None for a model without tokenizer or end of sequence. The process may still be starting: see `is_ready`."""
        by_name = {file.name: file for file in files}
        if "tokenizer.json" not in by_name:
            return None
        config, said = (read_json(by_name[name]) if name in by_name else None for name in ("config.json", FILE))
        generation = GenerationConfig.read(config or {}, said, vocabulary_size)
        ends = eos_token_ids(config or {}, generation, eos_token_id(list(files)))
        return cls(by_name["tokenizer.json"].resolve(), vocabulary_size, ends) if ends else None

    def is_ready(self) -> bool:
        """Wait for the process. False if it cannot follow forms: of a tokenizer whose tokens are not bytes, say."""
        try:
            self._fork()
        except OSError as error:
            log.warning("outputs cannot be held to a form", reason=str(error))
            return False
        return True

    def close(self) -> None:
        """End the process; it ends with the worker anyway."""
        self._thread.shutdown()
        self._end()
        self._control.close()
        self._template.wait()

    def begin(self, chunks: Sequence[ScheduledChunk]) -> FormMasks | None:
        """Begin to find what may follow the tokens of those chunks that have a form; None if there are none.

        It also reads the tokens of a sequence that samples later. All tokens must be known.
        """
        formed = [chunk for chunk in chunks if chunk.sequence.sampling.form]
        if not formed:
            return None
        sampled = [
            (sequence.sequence_id, len(sequence.token_ids) + number)
            for sequence, *_, samples, drafts in formed
            for number in range(samples + len(drafts))
        ]
        rows = {key: row for row, key in enumerate(sampled)}
        items = [self._item(chunk) for chunk in formed]
        return FormMasks(rows, self._thread.submit(self._find, items, len(rows)))

    def _item(self, chunk: ScheduledChunk) -> _Item:
        sequence = chunk.sequence
        progress = sequence.form_progress
        if not isinstance(progress, _Progress):
            progress = sequence.form_progress = _Progress(next(self._keys), self._gone)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        return _Item(sequence.sampling.form, progress, output, chunk.samples, chunk.drafts)

    # ---- on the thread

    def _find(self, items: Sequence[_Item], num_rows: int) -> npt.NDArray[np.uint8]:
        """What `FormMasks` has."""
        masks = np.zeros((num_rows, -(-self._vocabulary_size // 32) * 4), np.uint8)
        ends = itertools.accumulate(item.samples + len(item.guesses) for item in items)
        left = deque(
            (item, masks[end - item.samples - len(item.guesses) : end]) for item, end in zip(items, ends, strict=True)
        )
        died: set[int] = set()  # what processes were at that have died
        while left := deque(self._not_refused(left)):
            again: list[tuple[_Item, npt.NDArray[np.uint8]]] = []
            try:
                reader = self._living_reader()
            except OSError as error:
                log.error("forms cannot be followed now", reason=str(error))
                break
            number = 0
            try:
                self._send(reader, [item for item, _ in left])
                while left:
                    item, rows = left[0]
                    used, began = _processor_seconds(self._process) if item.guesses else 0.0, time.monotonic()
                    has_failed = False
                    for number in range(1 + len(item.guesses)):
                        if number and time.monotonic() - began > MOST_SECONDS:
                            self._check_used(used)
                        answer = self._receive(reader)
                        if item.samples and answer:
                            rows[number] = np.frombuffer(answer, np.uint8)
                        elif item.samples and number == 0:
                            has_failed = True
                    left.popleft()  # from here on it is asked for again only if it is among those
                    if has_failed and not item.progress.is_fresh:
                        item.progress.reader, item.progress.is_alone = None, True
                        again.append((item, rows))
            except (OSError, EOFError) as error:  # it takes too long, or has died: of too much memory, perhaps
                self._end()
                item = left[0][0]
                if isinstance(error, TimeoutError) or item.progress.key in died:
                    self._refuse(item.form, number > 0, error)
                died.add(item.progress.key)
            left.extend(again)
        return masks

    def _not_refused(
        self, items: Iterable[tuple[_Item, npt.NDArray[np.uint8]]]
    ) -> Iterator[tuple[_Item, npt.NDArray[np.uint8]]]:
        """Those whose forms are followed, without guesses where what would follow these is not looked for."""
        for item, rows in items:
            if hash((item.form, False)) not in self._refused:
                without = item.progress.is_alone or hash((item.form, True)) in self._refused
                yield item._replace(guesses=NO_DRAFTS) if without else item, rows

    def _send(self, reader: Connection, items: Sequence[_Item]) -> None:
        work = []
        for form, progress, token_ids, samples, guesses in items:
            if progress.reader is not reader:
                progress.reader, progress.num_tokens = reader, 0
            progress.is_fresh = progress.is_alone and not progress.num_tokens
            unread = token_ids[progress.num_tokens :]
            work.append(
                Work(progress.key, "" if progress.num_tokens else form, unread, samples, guesses, progress.is_alone)
            )
            progress.num_tokens = len(token_ids)
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        reader.send((gone, work))

    def _receive(self, reader: Connection) -> bytes:
        """The next answer. Raises TimeoutError when the process computes too long for it."""
        if not reader.poll(LOOK_SECONDS):
            used, began = _processor_seconds(self._process), time.monotonic()
            while not reader.poll(LOOK_SECONDS):
                self._check_used(used - LOOK_SECONDS)
                if time.monotonic() - began > DEAF_SECONDS:
                    raise TimeoutError(f"nothing was heard for {DEAF_SECONDS:g} s")
        return reader.recv_bytes()

    def _check_used(self, seconds: float) -> None:
        """Raises TimeoutError when the process has used more than its share since it had used so many seconds."""
        if _processor_seconds(self._process) - seconds > MOST_SECONDS:
            raise TimeoutError(f"it takes more than {MOST_SECONDS:g} s")

    def _refuse(self, form: str, is_guess: bool, error: Exception) -> None:
        """Not follow a form any more; if it `is_guess`, what was not chosen, only not beyond what is."""
        what = "guesses within a form are" if is_guess else "a form is"
        log.warning(f"{what} not followed any more", reason=str(error) or type(error).__name__)
        self._refused[hash((form, is_guess))] = None
        if len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)

    # ---- the processes

    def _living_reader(self) -> Connection:
        """The process that follows forms, or a new one where there is none any more. Raises OSError."""
        if self._reader is not None and self._reader.poll(0):  # nothing was asked: it is its end
            self._end()
        return self._reader or self._fork()

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            with contextlib.suppress(psutil.Error):
                self._process.kill()

    def _start(self) -> None:
        self._template, self._control = start_child("worker_service.execution.form_process", self._arguments)
        self._control.settimeout(START_SECONDS)
        self._has_started = False

    def _fork(self) -> Connection:
        """A new process that follows forms. Raises OSError."""
        if self._template.poll() is not None and self._has_started:
            self._control.close()
            self._start()
        if not self._has_started:
            if (answer := self._control.recv(MOST_REASON)) != READY:
                raise OSError(answer.decode(errors="replace") or "the process that follows forms has ended")
            self._has_started = True
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        reader = Connection(ours.detach())
        if not reader.poll(DEAF_SECONDS):
            raise OSError("the process that follows forms does not start")
        with contextlib.suppress(psutil.Error):  # it has ended already, which is seen at the first message
            self._process = psutil.Process(reader.recv())
        self._reader = reader
        return reader


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
