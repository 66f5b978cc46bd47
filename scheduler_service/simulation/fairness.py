"""How unequally tenants were served, after Sheng et al., "Fairness in Serving Large Language Models".

Service is counted in tokens: prompt tokens once, at admission, output tokens twice. Tenants can claim equal service
only while both have waiting requests.
"""

from collections import Counter, defaultdict

from scheduler_service.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

PAIRS_A_STEP = 16


class ServiceGap:
    """The largest difference between two tenants' services in any span in which both have waiting requests.

    A pair's gap is its highest minus its lowest difference, because a span may begin and end there. With more than
    `PAIRS_A_STEP` pairs, gaps are updated once in several steps.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._service: defaultdict[str, float] = defaultdict(float)
        self._waiting: Counter[str] = Counter()  # requests by tenant
        # Pairs of tenants that both have waiting requests.
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}
        self._steps_to_skip = 0

    def arrived(self, tenant: str) -> None:
        if tenant not in self._waiting:
            for other in self._waiting:
                difference = self._service[tenant] - self._service[other]
                self._ranges[tenant, other] = difference, difference
        self._waiting[tenant] += 1

    def admitted(self, tenant: str, num_prompt_tokens: int) -> None:
        self._service[tenant] += PROMPT_TOKEN_COST * num_prompt_tokens
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            for pair in [pair for pair in self._ranges if tenant in pair]:
                self._widen(pair)
                del self._ranges[pair]

    def generated(self, tenant: str) -> None:
        self._service[tenant] += OUTPUT_TOKEN_COST

    def end_step(self) -> None:
        if self._steps_to_skip:
            self._steps_to_skip -= 1
        elif self._ranges:
            self._steps_to_skip = (len(self._ranges) - 1) // PAIRS_A_STEP
            for pair in self._ranges:
                self._widen(pair)

    def _widen(self, pair: tuple[str, str]) -> None:
        difference = self._service[pair[0]] - self._service[pair[1]]
        low, high = self._ranges[pair]
        if not low <= difference <= high:
            low, high = min(low, difference), max(high, difference)
            self._ranges[pair] = low, high
            self.tokens = max(self.tokens, high - low)
