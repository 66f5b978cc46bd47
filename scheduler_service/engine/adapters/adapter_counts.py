"""Counts of finished requests, by adapter."""

from collections import Counter

from pagewire.v1.admin_service_pb2 import FinishedRequest

MAX_COUNTED = 64
OTHERS = "(others)"


class AdapterCounts:
    """Names after the first MAX_COUNTED share one counter: labels of metrics are never removed."""

    def __init__(self) -> None:
        self.num_requests: Counter[str] = Counter()
        self.num_prompt_tokens: Counter[str] = Counter()
        self.num_output_tokens: Counter[str] = Counter()

    def add(self, name: str, finished: FinishedRequest) -> None:
        if name not in self.num_requests and len(self.num_requests) >= MAX_COUNTED:
            name = OTHERS
        self.num_requests[name] += 1
        self.num_prompt_tokens[name] += finished.prompt_tokens
        self.num_output_tokens[name] += finished.output_tokens
