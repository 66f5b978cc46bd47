"""Limits the number and the memory of calls in flight, before their text is tokenized, and the usage of each API key.

A key's quotas are requests a minute, tokens a minute, and requests in flight. The first two quotas are token buckets
with room for a minute. Prompt tokens are subtracted when a request is queued, output tokens when its call ends. So a
request may overdraw the bucket of tokens; then the key's next requests are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from pagewire_common.calls.errors import RequestError
from scheduler_service.access.bucket import Bucket
from scheduler_service.access.keys import ApiKey, Keyring
from scheduler_service.engine.calls.calls import Call
from scheduler_service.engine.calls.side_calls import SideCalls
from scheduler_service.settings import SchedulerSettings

MAX_SIDE_CALLS = 256
MAX_SIDE_BYTES = 16 << 20
"""Bytes of calls other than Generate; tokenizing so many takes some seconds."""
UNREAD_SHARE = 4
"""Divisor of `--request-memory`: by default, 60 s of unread output of 50 streams fit."""


def unread_bytes(settings: SchedulerSettings) -> int:
    return int(settings.request_memory * 2**30) // UNREAD_SHARE


@dataclass(slots=True)
class _Use:
    key: ApiKey
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    num_in_flight: int = 0

    def is_over(self, now: float) -> bool:
        """Whether the key has no requests in flight, and all its buckets are full."""
        limits = (self.requests, self.key.requests_per_minute), (self.tokens, self.key.tokens_per_minute)
        return not self.num_in_flight and not any(most is not None and one.used(most, now) for one, most in limits)


class Quotas:
    """Counts the usage of each API key. A removed key, which may be added again, is kept until its buckets are full."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._uses: dict[str, _Use] = {}

    def set_keys(self, keyring: Keyring, now: float) -> None:
        self._keyring = keyring
        for key_id, use in [*self._uses.items()]:
            use.key = keyring.by_id.get(key_id, use.key)
            if key_id not in keyring.by_id and use.is_over(now):
                del self._uses[key_id]

    def admit(
        self, key_id: str, now: float, *, is_request: bool, takes_place: bool = False, restores: bool = False
    ) -> None:
        """Check and count a call. With `is_request` it is in flight until `leave`; `takes_place` of an older call
        allows one more; `restores` allows any.

        Raises RESOURCE_EXHAUSTED, or UNAUTHENTICATED for a removed key.
        """
        if self._keyring is None:
            return
        if (key := self._keyring.by_id.get(key_id)) is None:
            raise RequestError(grpc.StatusCode.UNAUTHENTICATED, "the API key is not known any more")
        use = self._uses.setdefault(key_id, _Use(key))
        if not restores:
            self._check(key, use, now, has_place=takes_place or not is_request)
        if key.requests_per_minute is not None:
            use.requests.use(1)
        use.num_in_flight += is_request

    def _check(self, key: ApiKey, use: _Use, now: float, *, has_place: bool) -> None:
        if not has_place and key.concurrency is not None and use.num_in_flight >= key.concurrency:
            _refuse(f"this API key has {use.num_in_flight} requests in flight, as many as it may; try again later")
        for bucket, most, what in (
            (use.requests, key.requests_per_minute, "requests"),
            (use.tokens, key.tokens_per_minute, "tokens"),
        ):
            if most is not None and (seconds := bucket.missing(most, now)) > 0:
                _refuse(f"this API key has used its {most} {what} a minute; try again in {seconds:.1f} s")

    def use_tokens(self, key_id: str, number: int) -> None:
        """Count tokens. A key without a token limit has a full bucket if it receives a limit later."""
        if (use := self._uses.get(key_id)) is not None and use.key.tokens_per_minute is not None:
            use.tokens.use(number)

    def leave(self, key_id: str) -> None:
        if (use := self._uses.get(key_id)) is not None and use.num_in_flight:
            use.num_in_flight -= 1


def _refuse(reason: str) -> None:
    raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)


class Admission:
    """Counts calls being checked, and calls with a submitted request (`requests`, by key).

    A resumed request may have one call of each kind. A call with several texts is being checked until closed; texts do
    not count as requests.
    """

    def __init__(self, settings: SchedulerSettings, requests: dict[str, Call], keyring: Keyring | None = None) -> None:
        self._requests = requests
        self.quotas = Quotas(keyring)
        self._max_num_requests = settings.max_num_requests
        self._memory = int(settings.request_memory * 2**30)
        self._being_checked: dict[str, Call] = {}
        self._side_calls = SideCalls(
            "Tokenize, Detokenize and GetModel", max_calls=MAX_SIDE_CALLS, max_bytes=MAX_SIDE_BYTES
        )
        self.num_bytes = 0
        """Includes superseded requests whose call is still open."""
        self._num_texts = 0  # in `requests`

    @property
    def being_checked(self) -> Mapping[str, Call]:
        return self._being_checked

    def admit(self, call: Call, num_bytes: int, *, resumes: bool, now: float = 0.0) -> None:
        """Reserve a place, or take over the place of a broken stream. Raises RequestError at a limit.

        `now`: seconds of a monotonic clock. A call refused by the quota does not count towards the quota, other refused
        calls do.
        """
        key = call.key
        mine = self._requests.get(key) if resumes else None
        takes_place = mine is not None and mine.api_key_id == call.api_key_id
        self.quotas.admit(
            call.api_key_id, now, is_request=bool(key), takes_place=takes_place, restores=call.is_restored
        )
        try:
            self._admit(call, num_bytes, resumes=resumes)
        except RequestError:
            if key:
                self.quotas.leave(call.api_key_id)
            raise

    def _admit(self, call: Call, num_bytes: int, *, resumes: bool) -> None:
        key = call.key
        if not key:
            self._side_calls.enter(num_bytes, is_checked=not call.is_restored)
            call.num_bytes = num_bytes
            return
        has_place = resumes and key in self._requests and not call.is_restored  # else, a later call has resumed it
        in_flight = len(self._requests) - self._num_texts + len(self._being_checked)
        if in_flight >= self._max_num_requests and not (has_place or call.is_restored):
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{in_flight} requests are in flight; try again later"
            )
        if key in self._being_checked or (key in self._requests and not has_place):
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                "request_id is in flight already; choose another one, or set resume to go on with a broken stream",
            )
        self.hold(call, num_bytes)
        self._being_checked[key] = call

    def hold(self, call: Call, num_bytes: int) -> None:
        """Add to a call's memory. Raises RequestError at the limit."""
        in_all, most = call.num_bytes + num_bytes, self._memory
        if call.is_restored and call.group is None:
            call.num_bytes, self.num_bytes = in_all, self.num_bytes + num_bytes
            return
        sizes = f"this request takes {in_all / 2**20:.1f} MiB of memory, and --request-memory allows all together "
        sizes += f"{most / 2**20:.1f} MiB"
        if in_all > most:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"{sizes}; send a smaller one")
        if num_bytes > most - self.num_bytes:
            held = f"requests in flight hold {self.num_bytes / 2**20:.1f} MiB"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{sizes}, of which {held}; try again later")
        call.num_bytes = in_all
        self.num_bytes += num_bytes

    def submitted(self, call: Call, superseded: Call | None = None) -> None:
        """Count a checked call's request as in flight.

        The API key pays for prompt and resumed tokens that `superseded` has not paid.
        """
        group = call.group
        assert group is not None
        call.num_resumed = group.num_output_tokens
        num_charged = 0 if superseded is None else _num_charged(superseded, call)
        self.quotas.use_tokens(call.api_key_id, group.num_prompt_tokens + call.num_resumed - num_charged)
        if call.parent is None:
            del self._being_checked[call.key]
        else:
            self._num_texts += 1
        self._requests[call.key] = call

    def abort(self, key: str) -> bool:
        """End a request after its check. Returns whether the key is being checked."""
        if (call := self._being_checked.get(key)) is None:
            return False
        call.is_aborted = True
        return True

    def release(self, call: Call) -> None:
        if not call.key:
            self._side_calls.leave(call.num_bytes)
        else:
            if self._being_checked.get(call.key) is call:
                del self._being_checked[call.key]
            self.num_bytes -= call.num_bytes
            if call.group is not None and call.group.sampling.pooling is None:
                self.quotas.use_tokens(call.api_key_id, call.group.num_output_tokens - call.num_resumed)
            if call.parent is not None:
                self._num_texts -= call.group is not None
            else:
                self.quotas.leave(call.api_key_id)
            call.api_key_id = ""
        call.num_bytes = 0


def _num_charged(before: Call, later: Call) -> int:
    """Tokens of `later` that `before`, the superseded call, has paid: the prompt, unless recomputed whole, and the
    leading tokens that the outputs share.

    None if API key or `cache_salt` differs, because the prefix cache then finds no blocks. None if `before` was
    computed without a new token: repeated superseding would make prompts free.
    """
    old, new = before.group, later.group
    assert old is not None
    assert new is not None
    is_same_caller = before.api_key_id == later.api_key_id and old.cache_root == new.cache_root
    is_progress = before.queued_seconds is None or old.num_output_tokens > before.num_resumed
    if not (is_same_caller and is_progress):
        return 0
    outputs = zip(old.sequences, new.sequences, strict=False)
    num_prompt_tokens = 0 if new.sampling.needs_all_states else new.num_prompt_tokens
    return num_prompt_tokens + sum(_common_prefix(a.output_token_ids, b.output_token_ids) for a, b in outputs)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    most = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differing[0]) if len(differing) else most
