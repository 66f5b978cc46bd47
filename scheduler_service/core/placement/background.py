"""Counts lost workers and serving time of the whole fleet."""


class Background:
    __slots__ = ("_num_serving", "_seconds", "num_losses")

    def __init__(self) -> None:
        self.num_losses = 0
        self._num_serving = 0
        self._seconds = 0.0  # `seconds(now)` minus `now` for each serving worker

    def join(self, now: float) -> None:
        self._num_serving += 1
        self._seconds -= now

    def leave(self, now: float, *, is_lost: bool) -> None:
        self._num_serving -= 1
        self._seconds += now
        self.num_losses += is_lost

    def seconds(self, now: float) -> float:
        return self._seconds + self._num_serving * now

    def ahead(self, now: float, seconds: float) -> float:
        """Time at which the fleet will have served `seconds` more, if no worker joins or leaves."""
        return now + seconds / max(1, self._num_serving)
