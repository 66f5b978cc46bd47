"""Whether a request is what workers are lost to, judged by the losses of workers with it in flight."""

# A group with this many lost steps that gained nothing since the one before is ended, if it was alone in the last of
# them and in another: where workers hang in turn, every three seconds, one may by chance be lost with a suspect alone.
MAX_LOST_STEPS = 3
LOST_ALONE = 2
# So is one that gains a token or a few on each worker first, as where the decoding after a prompt is what kills.
MOST_LOST_STEPS = 4
# A group that gains so many tokens since a lost step had nothing to do with it. More would find those who kill with
# their tenth token as well, but where workers are lost all the time it would have everybody run alone, for long.
CLEARING_TOKENS = 4


class Suspicion:
    """The losses of workers with one group in flight, until CLEARING_TOKENS that it gains clear it of them.

    `num_losses` counts them, `num_alone` those with nothing else in flight, `lost_on` names the workers, and
    `num_clean_tokens` counts what the group has gained since the last loss.
    """

    __slots__ = ("lost_on", "num_alone", "num_clean_tokens", "num_losses")

    def __init__(self) -> None:
        self.num_losses = 0
        self.num_alone = 0
        self.lost_on: frozenset[str] = frozenset()
        self.num_clean_tokens = 0

    @property
    def is_grave(self) -> bool:
        """Whether the group is to be scheduled alone.

        After the second loss it must gain a token alone, after further ones as many as clear it: so a group that kills
        workers with the token after that is alone with one at last.
        """
        if self.num_losses < MAX_LOST_STEPS:
            return self.num_losses == MAX_LOST_STEPS - 1 and not self.num_clean_tokens
        return self.num_clean_tokens < CLEARING_TOKENS

    def lose(self, worker: str, *, alone: bool) -> bool:
        """A worker was lost with the group in flight; returns whether that is likely to be the group's doing."""
        self.lost_on |= {worker}
        has_gained, self.num_clean_tokens = self.num_clean_tokens > 0, 0
        self.num_losses += 1
        self.num_alone += alone
        enough = MOST_LOST_STEPS if has_gained else MAX_LOST_STEPS
        return alone and self.num_alone >= LOST_ALONE and self.num_losses >= enough

    def gain_token(self) -> None:
        """Hear of a token, after a loss."""
        self.num_clean_tokens += 1
        if self.num_clean_tokens >= CLEARING_TOKENS:
            self.num_losses = self.num_alone = self.num_clean_tokens = 0
            self.lost_on = frozenset()
