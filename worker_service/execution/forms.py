"""Holds outputs to their forms: which tokens may come next, found while the forward pass runs.

A form is a grammar, which llguidance reads: an Earley parser above a lexer, walked along a trie of all tokens. A
matcher has read an output's tokens so far, and knows which may follow. It is a function of these tokens, so it is made
again wherever the sequence is: after a preemption, on another worker, in a resumed stream. A thread of its own keeps
matchers; the device thread waits for it where it samples. The scheduler has checked the form.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLTokenizer

from pagewire_common.eos_tokens import eos_token_ids
from pagewire_common.forms import parser_limits
from worker_service.session.session import ScheduledChunk, SequenceState

log = structlog.get_logger()

MOST_KEPT = 32
"""Grammars that are kept compiled. One takes up to some tens of MB, most take less than one."""


class FormMasks:
    """The tokens that may come next in a step, of the sequences that have a form and sample."""

    def __init__(self, rows: dict[int, int], masks: "Future[npt.NDArray[np.uint8]]", vocabulary_size: int) -> None:
        self._rows = rows  # by sequence id
        self._masks = masks  # [rows, bytes of bits]
        self._vocabulary_size = vocabulary_size

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.bool_]:
        """[sequences, vocabulary_size], once they are known. A sequence whose form cannot go on has none."""
        packed = self._masks.result()[[self._rows[sequence.sequence_id] for sequence in sequences]]
        bits = np.unpackbits(packed, axis=1, count=self._vocabulary_size, bitorder="little")
        return bits.view(np.bool_)


@dataclass(slots=True)
class _Progress:
    """How far an output has been read."""

    num_tokens: int = 0
    """Given to the matcher, or on their way to it."""
    matcher: LLMatcher | None = None


class Forms:
    """Compiles grammars and keeps the matchers of sequences, for one model."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the one that was used last is last
        self._thread = ThreadPoolExecutor(1, "forms")

    @classmethod
    def load(cls, files: Sequence[Path], vocabulary_size: int) -> "Forms | None":
        """None for a model without tokenizer or end of sequence, or with a tokenizer whose tokens are not bytes."""
        by_name = {file.name: file for file in files}
        if "tokenizer.json" not in by_name:
            return None
        configs = [
            json.loads(by_name[name].read_text()) if name in by_name else {}
            for name in ("config.json", "generation_config.json")
        ]
        ends = eos_token_ids(configs[0], configs[1], vocabulary_size)
        if not ends:
            return None
        try:
            text = by_name["tokenizer.json"].read_text()
            return cls(LLTokenizer(text, n_vocab=vocabulary_size, eos_token=list(ends)), vocabulary_size)
        except Exception as error:  # of the library's own kinds
            log.warning("outputs cannot be held to a form", reason=str(error))
            return None

    def begin(self, chunks: Sequence[ScheduledChunk]) -> FormMasks | None:
        """Begin to find what may follow the tokens of those chunks that have a form; None if there are none.

        It also reads the tokens of a sequence that samples later. All tokens must be known.
        """
        formed = [chunk for chunk in chunks if chunk.sequence.sampling.form]
        if not formed:
            return None
        work = [(chunk.sequence, *self._unread(chunk.sequence), chunk.samples) for chunk in formed]
        rows = {sequence_id: row for row, sequence_id in enumerate(c.sequence.sequence_id for c in formed if c.samples)}
        return FormMasks(rows, self._thread.submit(self._find, work, len(rows)), self._vocabulary_size)

    @staticmethod
    def _unread(sequence: SequenceState) -> tuple[_Progress, list[int]]:
        """The tokens of an output that its matcher has not been given."""
        progress = sequence.form_progress
        if not isinstance(progress, _Progress):
            progress = sequence.form_progress = _Progress()
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + progress.num_tokens :].tolist()
        progress.num_tokens += len(token_ids)
        return progress, token_ids

    # ---- on the thread

    def _find(
        self, work: Sequence[tuple[SequenceState, _Progress, list[int], bool]], num_rows: int
    ) -> npt.NDArray[np.uint8]:
        """What `FormMasks` has. `work`: sequences, their unread tokens, and whether they sample."""
        masks = np.zeros((num_rows, -(-self._vocabulary_size // 32) * 4), np.uint8)
        rows = iter(masks)
        for sequence, progress, token_ids, samples in work:
            matcher = progress.matcher = progress.matcher or self._matcher(sequence.sampling.form)
            if not matcher.is_stopped():
                matcher.consume_tokens(token_ids)
            if samples:
                self._fill(next(rows), matcher)
                if matcher.is_error():
                    reason = matcher.get_error().partition("\n")[0]
                    log.warning("a form cannot go on", sequence=sequence.sequence_id, reason=reason)
        return masks

    def _fill(self, row: npt.NDArray[np.uint8], matcher: LLMatcher) -> None:
        """Set the bits of the tokens that may come next, in a row of zeros; none after an error."""
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            row[:] = 0
        elif matcher.is_stopped():  # the text is whole and cannot go on
            for token_id in self._tokenizer.eos_tokens:
                row[token_id // 8] |= 1 << token_id % 8

    def _matcher(self, form: str) -> LLMatcher:
        """One that has read nothing."""
        compiled = self._compiled.pop(form, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, form, limits=parser_limits())
        self._compiled[form] = compiled
        if len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()
