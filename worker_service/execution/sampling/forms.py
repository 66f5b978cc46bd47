"""Restricts outputs to their forms (grammars). A process computes the masks of allowed tokens during the forward pass.

llguidance computes masks: an Earley parser above a lexer, which walks a trie of all tokens. A matcher reads one
output's tokens. The state of a matcher depends only on these tokens, so a matcher can be rebuilt anywhere. Matchers
run in form_process.py, and the device thread waits for masks before it samples. The scheduler has checked the grammar.

A form's CPU time is charged to its output. A slow form ends only outputs of the same form and tenant:

- A token or mask may take `MAX_SECONDS`. Beyond this limit, the process is killed, the output ends, and a new process
  continues the others. For `BAN_SECONDS`, new outputs of the form and tenant end immediately. Outputs that have tokens
  continue until the form exceeds the limit again.
- All tokens of an output together may take `MAX_LEFT`, plus `TOKEN_SECONDS` each.
- A new process reads running outputs again, in slices between other masks. Until then, these outputs are late. Only
  half of this time is charged, so reading again cannot use up an output's time.

Therefore a form delays other outputs in one step by at most three times `MAX_SECONDS`: the next mask, masks after
drafts, and a second try without drafts. On average the delay is at most `TOKEN_SECONDS` a step. Slow forms kill at most
`MAX_ENDED` processes in a step. Compiling takes at most half of a step, and other new forms are late.

When a step's time is used up, remaining outputs are late. The process computes one output of each tenant in turn, and
the tenant with the least used time comes first. Without turns, a tenant's output would wait for all earlier outputs of
others.

If all matchers need more than `MAX_TOGETHER` bytes, the largest output of the tenant with the most memory ends. Without
this limit, each new process would read all outputs again and run out of memory, too."""

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
from worker_service.session.sequence_state import NO_DRAFTS, ScheduledChunk

log = structlog.get_logger()

LOOK_SECONDS = 0.05
DEAF_SECONDS = 10.0
"""Seconds without CPU use and without an answer after which a process is killed as stuck."""
START_SECONDS = 60.0
BAN_SECONDS = 60.0
MAX_BANS = 1024
MAX_ENDED = 3
"""Processes that may die in a step before the remaining outputs are late. An output with which two processes die in a
step ends."""


class Forms:
    """Starts and calls the process that computes masks for one model."""

    def __init__(self, tokenizer: Path, vocabulary_size: int, ends: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocabulary_size), ",".join(map(str, ends))]
        self._vocabulary_size = vocabulary_size
        self._keys = itertools.count()
        self._gone: deque[int] = deque()
        # End of each ban, and number of bans (1 or 2). The key is a hash, because a form may have 64 KiB.
        self._bans: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "forms")
        self._reader: Connection | None = None
        self._process: psutil.Process  # psutil detects whether the process id is reused
        self._start()

    @classmethod
    def load(cls, files: Sequence[Path], vocabulary_size: int) -> "Forms | None":
        """Start the process without waiting until `is_ready`. Returns None without a tokenizer.json or an
        end-of-sequence token."""
        by_name = {file.name: file for file in files}
        if "tokenizer.json" not in by_name:
            return None
        config, said = (read_json(by_name[name]) if name in by_name else None for name in ("config.json", FILE))
        generation = GenerationConfig.read(config or {}, said, vocabulary_size)
        ends = eos_token_ids(config or {}, generation, eos_token_id(list(files)))
        return cls(by_name["tokenizer.json"].resolve(), vocabulary_size, ends) if ends else None

    def is_ready(self) -> bool:
        """Wait for the process. Returns False if it cannot start, for example because llguidance refuses the
        tokenizer."""
        try:
            self._fork()
        except OSError as error:
            log.warning("output forms are not supported", reason=str(error))
            return False
        return True

    def close(self) -> None:
        """End the process. Without `close`, the process ends with the worker."""
        self._thread.shutdown()
        self._end()
        self._control.close()
        self._template.wait()

    def begin(self, formed: Sequence[ScheduledChunk]) -> FormMasks:
        """Start to compute masks. formed: chunks whose output has a form, and whose tokens the host knows. For a chunk
        that does not sample, the process only reads tokens."""
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
        # Outputs whose masks a process was computing when it died in this step.
        died: set[int] = set()
        while left := deque(self._followed(left)):
            if num_ended == MAX_ENDED:  # several forms were too slow
                late.update(item.sequence_id for item, _ in left if item.samples)
                break
            again: list[WithRows] = []
            try:
                reader = self._living_reader()
            except OSError as error:
                log.error("masks of output forms cannot be computed now", reason=str(error))
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
            # The process took too long, is stuck, or has died, perhaps because memory ran out.
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
        """The outputs that are not ended. Drafts are removed if masks after drafts are banned for the form, or if the
        form is compiled separately."""
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
        """Receive the next answer. Raises TimeoutError if it takes too much CPU time, and OSError if the process is
        stuck."""
        if not reader.poll(LOOK_SECONDS):
            used, began = _processor_seconds(self._process), time.monotonic()
            while not reader.poll(LOOK_SECONDS):
                self._check_used(used - LOOK_SECONDS)
                if time.monotonic() - began > DEAF_SECONDS:
                    raise OSError(f"nothing was heard for {DEAF_SECONDS:g} s")
        return reader.recv_bytes()

    def _check_used(self, seconds: float) -> None:
        """seconds: CPU time that the process had used when it began the current answer. Raises TimeoutError."""
        if _processor_seconds(self._process) - seconds > MAX_SECONDS + SLICE_SECONDS:
            raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")

    def _end_output(self, item: FormedOutput, why: str) -> None:
        item.progress.is_over = True
        log.warning("an output has ended: its form cannot be followed", reason=why)

    def _ban(self, item: FormedOutput, is_draft: bool, why: str) -> None:
        """Ban new outputs of the form and tenant for `BAN_SECONDS`. A second ban in this time also ends running
        outputs.

        is_draft: only drafts are banned, because a mask after a draft took too long."""
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
        """The connection to the process, which is forked again if it has died. Raises OSError if no process can be
        started."""
        # If the connection is readable before a request, the process has ended.
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
        """Fork a process that computes masks. Raises OSError if it does not start."""
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
        # If the process has already ended, the first message to it fails.
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
