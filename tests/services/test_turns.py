import asyncio
from itertools import pairwise

from scheduler_service.core import SequenceStatus
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.streams import AT_ONCE, SLOW_AFTER, OutputDelta, OutputStream, Turn, Turns


def ask(turns: Turns, count: int) -> list[Turn]:
    asked = [Turn() for _ in range(count)]
    for turn in asked:
        turns.ask(turn)
    return asked


def again(turns: Turns, turn: Turn) -> Turn:
    turn.came = asyncio.get_running_loop().create_future()
    turns.ask(turn)
    return turn


async def test_a_few_have_their_turn_at_once_and_the_others_theirs_in_order_as_one_ends() -> None:
    turns = Turns()
    asked = ask(turns, 3 * AT_ONCE)
    for number, turn in enumerate(asked):
        assert [other.came.done() for other in asked] == [place < number + AT_ONCE for place in range(len(asked))]
        turns.end(turn)
        turns.end(turn)  # which it had ended


async def test_one_that_left_takes_no_turn() -> None:
    turns = Turns()
    having, gone, (last,) = ask(turns, AT_ONCE), ask(turns, AT_ONCE), ask(turns, 1)
    for turn in gone:
        turn.came.cancel()
        turns.end(turn)  # which did not come
    turns.end(having[0])
    assert last.came.done()


async def test_turns_that_never_end_do_not_delay_others_for_long() -> None:
    """Thousands of turns that freeze at once take a millisecond for each few of them; 20 ms would be five seconds."""
    turns = Turns()
    for _, after in pairwise([ask(turns, AT_ONCE) for _ in range(250)]):
        last = after
    async with asyncio.timeout(3):
        for turn in last:
            await turn.came


async def test_a_turn_slower_than_many_others_does_not_count_until_it_is_quick_again() -> None:
    turns = Turns()
    (slow,) = ask(turns, 1)
    for _ in range(SLOW_AFTER + 1):
        turns.end(*ask(turns, 1))
    turns.end(slow)
    again(turns, slow)
    having, (waiting,) = ask(turns, AT_ONCE), ask(turns, 1)
    assert all(turn.came.done() for turn in (slow, *having))
    assert not waiting.came.done()
    turns.end(slow)
    again(turns, slow)
    turns.end(having[0])
    assert waiting.came.done()
    assert not slow.came.done()


async def test_a_reader_has_its_turn_until_it_asks_for_more_or_leaves() -> None:
    turns = Turns()
    streams = [OutputStream(1, turns, UnreadOutput(1 << 30)) for _ in range(AT_ONCE)]
    for stream in streams:
        stream.put(OutputDelta(0, "text"))
        assert (await anext(stream)).text == "text"
    first, second, third = ask(turns, 3)
    assert not first.came.done()
    more = asyncio.ensure_future(anext(streams[0]))
    await asyncio.sleep(0)
    assert first.came.done()
    streams[1].leave()
    assert second.came.done()
    assert not third.came.done()
    streams[0].put(OutputDelta(0, status=SequenceStatus.FINISHED_STOPPED))
    turns.end(first)
    assert third.came.done()
    turns.end(second)
    assert (await more).status is SequenceStatus.FINISHED_STOPPED
