"""Restricts outputs to their forms (grammars). Another process computes the masks of allowed next tokens while the
device computes the forward pass.

The masks are computed by the library llguidance: an Earley parser above a lexer, which walks a trie of all tokens. A
matcher of llguidance reads the tokens of one output, and computes the mask of the output's next token. The state of a
matcher depends only on the output's tokens. Matchers can therefore be rebuilt after a preemption, on another worker, or
in a resumed stream. Matchers run in a separate process, form_process.py. A thread of this file communicates with the
process, and the device thread waits for the masks before it samples. The scheduler has checked the grammar before a
worker receives it.

The CPU time that a form needs is charged to its output. If a form is slow, the worker ends only outputs of this form
and of the same tenant:

- Reading one token or computing one mask may take `MAX_SECONDS`. If one token or mask takes longer, the process is
  killed, the output is ended, and a new process continues the other outputs. For `BAN_SECONDS`, new outputs of the same
  form and tenant are ended immediately. The limit applies to a single token or mask, so the output's number of tokens
  cannot be the cause. Other outputs of the form that already have tokens continue, until an output of the form exceeds
  the limit again.
- All tokens of an output together may take `MAX_LEFT`, plus `TOKEN_SECONDS` for each token.
- A new process reads the tokens of all running outputs again, in time slices between the masks of other outputs. Until
  the process has read all tokens of an output, the output is late and gains no token. Reading tokens a second time
  takes at most as long as the first time, and only half of the time is charged. Reading again therefore cannot use up
  an output's time.

Because of these limits, one form delays other outputs in one step by at most three times `MAX_SECONDS`: for the mask of
the next token, for the masks after drafts, and for a second try without drafts. On average, a form delays other outputs
by at most `TOKEN_SECONDS` in each step. In one step, at most `MAX_ENDED` processes are killed because of slow forms. A
step compiles one or a few new forms, in at most half of the step's time. Outputs of all other new forms are late.

If the time of a step is used up, all outputs that the process has not computed in this step are late. For fairness
between tenants, the process computes one output of each tenant, then a second output of each tenant, and so on. The
tenant whose outputs have used the least time comes first. If outputs did not take turns, a tenant's new output would
wait for all earlier outputs of other tenants. After a process was killed, the tenant's running outputs would wait in
the same way.

The memory of all outputs' matchers together is limited. If they need more than `MAX_TOGETHER` bytes, the worker ends
the largest output of the tenant whose outputs need the most memory. Without this limit, the process would run out of
memory and die. Each new process would read all outputs again, and would die for the same reason.
"""

import contextlib
import itertools
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import structlog

from pagewire_common.forms import MAX_SECONDS
from pagewire_common.model_files.eos_tokens import eos_token_ids
from pagewire_common.model_files.generation_config import FILE, GenerationConfig
from pagewire_common.processes.child_process import start_child
from worker_service.execution.sampling import form_progress, form_turns
from worker_service.execution.sampling.form_masks import FormMasks, FoundMasks
from worker_service.execution.sampling.form_process import FORK, HEAD, MAX_REASON, READY, SLICE_SECONDS, Work
from worker_service.execution.sampling.form_progress import FormedOutput, Progress
from worker_service.execution.sampling.form_turns import WithRows
from worker_service.loading.files.json_file import read_json
from worker_service.loading.tokenizer_files import eos_token_id
from worker_service.session.session import NO_DRAFTS, ScheduledChunk

log = structlog.get_logger()

LOOK_SECONDS = 0.05
DEAF_SECONDS = 10.0
"""A process that neither uses CPU time nor answers for this number of seconds counts as stuck and is killed."""
START_SECONDS = 60.0
BAN_SECONDS = 60.0
MAX_BANS = 1024
MAX_ENDED = 3
"""Maximum number of processes that may be killed or die in a step. After this number, the remaining outputs of the step
are late. If two processes die in a step while computing the same output, the worker ends the output.
"""


class Forms:
    """Starts and calls the process that computes masks for one model."""

    def __init__(self, tokenizer: Path, vocabulary_size: int, ends: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocabulary_size), ",".join(map(str, ends))]
        self._vocabulary_size = vocabulary_size
        self._keys = itertools.count()
        self._gone: deque[int] = deque()
        # For each banned form, the time at which the ban ends, and the number of bans (1 or 2). The key is a hash,
        # because a form may have 64 KiB.
        self._bans: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "forms")
        self._reader: Connection | None = None
        self._process: psutil.Process  # psutil detects whether the process id is reused
        self._start()

    @classmethod
    def load(cls, files: Sequence[Path], vocabulary_size: int) -> "Forms | None":
        """Start the process that computes masks. The method does not wait until the process is ready: see `is_ready`.
        Returns None for a model without a tokenizer.json or without an end-of-sequence token.
        """
        by_name = {file.name: file for file in files}
        if "tokenizer.json" not in by_name:
            return None
        config, said = (read_json(by_name[name]) if name in by_name else None for name in ("config.json", FILE))
        generation = GenerationConfig.read(config or {}, said, vocabulary_size)
        ends = eos_token_ids(config or {}, generation, eos_token_id(list(files)))
        return cls(by_name["tokenizer.json"].resolve(), vocabulary_size, ends) if ends else None

    def is_ready(self) -> bool:
        """Wait until the process that computes masks is ready. Returns False if the process cannot be started, for
        example because llguidance refuses the tokenizer.
        """
        try:
            self._fork()
        except OSError as error:
            log.warning("outputs cannot be held to a form", reason=str(error))
            return False
        return True

    def close(self) -> None:
        """End the process that computes masks. If `close` is not called, the process ends when the worker ends."""
        self._thread.shutdown()
        self._end()
        self._control.close()
        self._template.wait()

    def begin(self, chunks: Sequence[ScheduledChunk]) -> FormMasks | None:
        """Start to compute masks for the chunks whose output has a form. Returns None if no output of the step has a
        form.

        For a chunk that does not sample yet, the process only reads the output's tokens. The host must know all tokens
        of the chunks' sequences.
        """
        formed = [chunk for chunk in chunks if chunk.sequence.sampling.form]
        if not formed:
            return None
        sampled = [
            (sequence.sequence_id, len(sequence.token_ids) + number)
            for sequence, *_, samples, drafts in formed
            for number in range(1 + len(drafts) if samples else 0)
        ]
        rows = {key: row for row, key in enumerate(sampled)}
        items = [self._item(chunk) for chunk in formed]
        return FormMasks(rows, self._thread.submit(self._find, items, len(rows)))

    def _item(self, chunk: ScheduledChunk) -> FormedOutput:
        sequence = chunk.sequence
        form, owner = sequence.sampling.form, sequence.sampling.form_owner
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        progress = sequence.form_progress
        if not isinstance(progress, Progress):
            progress = sequence.form_progress = Progress(next(self._keys), self._gone)
            progress.is_over = not output and self._is_banned(form, owner)
        return FormedOutput(sequence.sequence_id, form, owner, progress, output, chunk.samples, chunk.drafts)

    # ---- methods of the thread that calls the process

    def _find(self, items: Sequence[FormedOutput], num_rows: int) -> FoundMasks:
        """Compute the masks of a step. `FormMasks` waits for the result."""
        masks = np.zeros((num_rows, -(-self._vocabulary_size // 32) * 4), np.uint8)
        late: set[int] = set()
        ends = itertools.accumulate(item.num_masks for item in items)
        every = [(item, masks[end - item.num_masks : end]) for item, end in zip(items, ends, strict=True)]
        left, num_ended = deque(form_turns.in_turns(every)), 0
        # Keys of outputs whose masks a process was computing when it died in this step.
        died: set[int] = set()
        while left := deque(self._followed(left)):
            if num_ended == MAX_ENDED:  # several forms were too slow
                late.update(item.sequence_id for item, _ in left if item.samples)
                break
            again: list[WithRows] = []
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
                    number, has_failed = 0, False
                    used, began = _processor_seconds(self._process) if item.drafts else 0.0, time.monotonic()
                    progress = item.progress
                    for number in range(1 + len(item.drafts)):
                        if number and time.monotonic() - began > MAX_SECONDS:
                            self._check_used(used)
                        answer = self._receive(reader)
                        seconds, growth, num_read, is_late = HEAD.unpack_from(answer)
                        progress.memory += growth
                        if number == 0:
                            progress.charge(seconds, num_read)
                        mask = np.frombuffer(answer, np.uint8, offset=HEAD.size)
                        if is_late and item.samples:
                            late.add(item.sequence_id)
                        elif item.samples and len(mask):
                            rows[number] = mask
                        elif item.samples and number == 0:
                            has_failed = True
                    left.popleft()  # outputs in `again` are sent again
                    progress.taken += time.monotonic() - began
                    if progress.left < 0:
                        self._end_output(item, f"its tokens take more than {form_progress.TOKEN_SECONDS:g} s each")
                        rows[:] = 0
                        late.discard(item.sequence_id)
                    elif has_failed and not progress.is_fresh:
                        progress.reader, progress.is_alone = None, True
                        again.append((item, rows))
                    elif item.samples and item.sequence_id not in late:
                        progress.num_masks += 1
            # The process took too long for an answer, is stuck, or has died, perhaps because memory ran out.
            except (OSError, EOFError) as error:
                self._end()
                num_ended += 1
                item = left[0][0]
                if isinstance(error, TimeoutError):
                    self._ban(item, number > 0, str(error))
                elif item.progress.key in died:
                    if number:
                        item.progress.is_alone = True
                    else:
                        self._end_output(item, "the process that follows it has died twice")
                died.add(item.progress.key)
            left.extend(again)
        for item, rows in form_turns.largest(every):
            self._end_output(item, "outputs of its owner take most of the memory of all forms")
            rows[:] = 0
            late.discard(item.sequence_id)
        return FoundMasks(masks, late)

    def _followed(self, items: Iterable[WithRows]) -> Iterator[WithRows]:
        """The outputs whose masks are still to be computed, without outputs that the worker has ended. The drafts of an
        output are removed if masks after drafts are banned for its form, or if its form is compiled separately.
        """
        for item, rows in items:
            if not item.progress.is_over and self._is_banned(item.form, item.owner, times=2):
                self._end_output(item, "other outputs of the form have taken too long twice in a minute")
            if not item.progress.is_over:
                without = item.progress.is_alone or self._is_banned(item.form, item.owner, is_draft=True)
                yield item._replace(drafts=NO_DRAFTS) if without else item, rows

    def _send(self, reader: Connection, items: Sequence[FormedOutput]) -> None:
        work = []
        for _, form, _, progress, token_ids, samples, drafts in items:
            if is_new := progress.reader is not reader:
                progress.begin(reader)
            unread = token_ids[progress.num_tokens :]
            work.append(Work(progress.key, form if is_new else "", unread, samples, drafts, progress.is_alone))
            progress.num_tokens = len(token_ids)
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        reader.send((gone, work))

    def _receive(self, reader: Connection) -> bytes:
        """Receive the next answer of the process. Raises TimeoutError if the answer takes too much CPU time, and
        OSError if the process is stuck.
        """
        if not reader.poll(LOOK_SECONDS):
            used, began = _processor_seconds(self._process), time.monotonic()
            while not reader.poll(LOOK_SECONDS):
                self._check_used(used - LOOK_SECONDS)
                if time.monotonic() - began > DEAF_SECONDS:
                    raise OSError(f"nothing was heard for {DEAF_SECONDS:g} s")
        return reader.recv_bytes()

    def _check_used(self, seconds: float) -> None:
        """Raise TimeoutError if the process has used more CPU time for the current answer than one answer may use.

        seconds: the CPU time that the process had used when it began the current answer.
        """
        if _processor_seconds(self._process) - seconds > MAX_SECONDS + SLICE_SECONDS:
            raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")

    def _end_output(self, item: FormedOutput, why: str) -> None:
        item.progress.is_over = True
        log.warning("an output has ended: its form cannot be followed", reason=why)

    def _ban(self, item: FormedOutput, is_draft: bool, why: str) -> None:
        """Ban new outputs of this output's form and tenant for `BAN_SECONDS`. A second ban in this time also ends
        running outputs of the form.

        is_draft: whether only drafts are banned, because a mask after a draft took too long.
        """
        if not is_draft:
            self._end_output(item, why)
        times = 2 if self._is_banned(item.form, item.owner, is_draft=is_draft) else 1
        self._bans[hash((item.form, item.owner, is_draft))] = time.monotonic() + BAN_SECONDS, times
        if len(self._bans) > MAX_BANS:
            self._bans.popitem(last=False)

    def _is_banned(self, form: str, owner: bytes, *, is_draft: bool = False, times: int = 1) -> bool:
        if not self._bans:
            return False
        until, so_often = self._bans.get(hash((form, owner, is_draft)), (0.0, 0))
        return so_often >= times and until > time.monotonic()

    # ---- the processes

    def _living_reader(self) -> Connection:
        """The connection to the process that computes masks. If the process has died, a new process is forked. Raises
        OSError if no process can be started.
        """
        # If the connection is readable before a request is sent, the process has ended.
        if self._reader is not None and self._reader.poll(0):
            self._end()
        return self._reader or self._fork()

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            with contextlib.suppress(psutil.Error):
                self._process.kill()

    def _start(self) -> None:
        self._template, self._control = start_child("worker_service.execution.sampling.form_process", self._arguments)
        self._control.settimeout(START_SECONDS)
        self._has_started = False

    def _fork(self) -> Connection:
        """Fork a new process that computes masks, and return the connection to it. Raises OSError if the process does
        not start.
        """
        if self._template.poll() is not None and self._has_started:
            self._control.close()
            self._start()
        if not self._has_started:
            if (answer := self._control.recv(MAX_REASON)) != READY:
                raise OSError(answer.decode(errors="replace") or "the process that follows forms has ended")
            self._has_started = True
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        reader = Connection(ours.detach())
        if not reader.poll(DEAF_SECONDS):
            raise OSError("the process that follows forms does not start")
        # An error of psutil is ignored here: if the process has already ended, the first message to it fails.
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(reader.recv())
        self._reader = reader
        return reader


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
