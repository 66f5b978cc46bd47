import asyncio
from itertools import pairwise

from scheduler_service.core import SequenceStatus
from scheduler_service.streams import OutputDelta, OutputStream
from scheduler_service.turns import AT_ONCE, Turns


def ask(turns: Turns, count: int) -> list[asyncio.Future[None]]:
    asked = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for turn in asked:
        turns.ask(turn)
    return asked


async def test_a_few_have_their_turn_at_once_and_the_others_theirs_in_order_as_one_ends() -> None:
    turns = Turns()
    asked = ask(turns, 3 * AT_ONCE)
    for number, turn in enumerate(asked):
        assert [other.done() for other in asked] == [place < number + AT_ONCE for place in range(len(asked))]
        turns.end(turn)
        turns.end(turn)  # which it had ended


async def test_one_that_left_takes_no_turn() -> None:
    turns = Turns()
    having, gone, last = ask(turns, AT_ONCE), ask(turns, AT_ONCE), ask(turns, 1)
    for turn in gone:
        turn.cancel()
        turns.end(turn)  # which did not come
    turns.end(having[0])
    assert last[0].done()


async def test_those_that_never_end_hold_nobody_up_for_long() -> None:
    turns = Turns()
    for _, after in pairwise([ask(turns, AT_ONCE) for _ in range(4)]):
        await asyncio.wait_for(asyncio.gather(*after), 5)


async def test_those_that_took_too_long_take_nobodys_place_the_next_time() -> None:
    turns = Turns()
    slow = [asyncio.get_running_loop().create_future() for _ in range(2 * AT_ONCE)]
    for turn in slow:
        turns.ask(turn, is_slow=True)
    assert all(turn.done() for turn in ask(turns, AT_ONCE))
    assert not ask(turns, 1)[0].done()


async def test_a_reader_has_its_turn_until_it_asks_for_more_or_leaves() -> None:
    turns = Turns()
    streams = [OutputStream(1, turns) for _ in range(AT_ONCE)]
    for stream in streams:
        stream.put(OutputDelta(0, "text"))
        assert (await anext(stream)).text == "text"
    first, second, third = ask(turns, 3)
    assert not first.done()
    more = asyncio.ensure_future(anext(streams[0]))
    await asyncio.sleep(0)
    assert first.done()
    streams[1].leave()
    assert second.done()
    assert not third.done()
    streams[0].put(OutputDelta(0, status=SequenceStatus.FINISHED_STOPPED))
    turns.end(first)
    assert third.done()
    turns.end(second)
    assert (await more).status is SequenceStatus.FINISHED_STOPPED
