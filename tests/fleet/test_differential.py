"""What `make fuzz` compares for as long as it is given: one seed of it, and that it tells answers apart."""

from pathlib import Path

import pytest
from alone import Alone
from answers import Answer, Said, difference
from differential import Totals, run_seed

from pagewire.v1 import inference_service_pb2 as pb

SEED = 71
"""Of a small draw: one worker that guesses, adapters, vectors, forms, breaks."""

END = ("FINISH_REASON_LENGTH", None, (0, ""), (3, 4))


async def test_requests_of_every_kind_say_in_a_disturbed_fleet_what_they_say_alone(tmp_path: Path) -> None:
    totals = Totals()
    with Alone(tmp_path) as alone:
        assert await run_seed(SEED, alone, totals, num_requests=10) == []
    assert totals["requests"] == 10
    # How many preemptions there are depends on how fast the machine is.
    assert sum(totals.values()) > 10 + totals["preemptions"] + totals["of_which_errors"], "nothing was disturbed"


def answer(text: str = "abcd", logprob: float = -1.0, end: tuple[object, ...] = END) -> Answer:
    chosen = pb.TokenLogprob(token_id=97, logprob=logprob, rank=1)
    return Answer({0: Said(list(text.encode()), text, [pb.TokenLogprobs(chosen=chosen)], end)})


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (answer("abXd"), "token 2: [88, 100] of 4, alone [99, 100] of 4"),
        (answer("abc"), "token 3: [] of 3"),
        (answer(end=("FINISH_REASON_STOP", "d", (0, ""), (3, 4))), "FINISH_REASON_STOP"),
        (answer(end=("FINISH_REASON_LENGTH", None, (0, ""), (3, 5))), "(3, 5)"),
        (answer(logprob=-1.0001), "logprobs[0]"),
        (answer(logprob=float("nan")), "logprobs[0]"),
        (Answer(), "other outputs"),
        (Answer(error=("INTERNAL", "an error")), "error ('INTERNAL', 'an error'), alone None"),
        (Answer(answer().outputs, vectors={0: [1.0]}), "vectors"),
        (Answer({0: Said([97, 99])}, has_left=True), "token 1"),
    ],
)
def test_an_answer_that_is_not_that_of_the_request_alone_is_named(found: Answer, named: str) -> None:
    assert named in difference(found, answer())


def test_of_a_client_that_left_what_it_has_is_compared() -> None:
    assert difference(Answer({0: Said([97, 98], "a")}, has_left=True), answer()) == ""
    assert difference(Answer(has_left=True), answer()) == ""
    assert difference(answer(logprob=-1.000001), answer()) == ""
