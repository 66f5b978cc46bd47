"""Losses and serving time of the whole fleet, with which losses of one request's workers are compared."""


class Background:
    """How many workers of a fleet were lost, and for how many seconds its workers have served, all together."""

    __slots__ = ("_num_serving", "_seconds", "num_losses")

    def __init__(self) -> None:
        self.num_losses = 0
        self._num_serving = 0
        self._seconds = 0.0  # when those that serve now are taken to have served since time 0

    def join(self, now: float) -> None:
        """A worker's session begins."""
        self._num_serving += 1
        self._seconds -= now

    def leave(self, now: float, *, is_lost: bool) -> None:
        """A worker's session is over."""
        self._num_serving -= 1
        self._seconds += now
        self.num_losses += is_lost

    def seconds(self, now: float) -> float:
        return self._seconds + self._num_serving * now

    def ahead(self, now: float, seconds: float) -> float:
        """When the fleet as it is now will have served for so many seconds more."""
        return now + seconds / max(1, self._num_serving)
