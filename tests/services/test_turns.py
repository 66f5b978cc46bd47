import asyncio

from scheduler_service.turns import A_PASS, Turns


async def test_whatever_else_is_to_be_done_comes_between_a_few_turns() -> None:
    """However many ask, the rest of the loop waits for no more than a pass of them."""
    loop, turns = asyncio.get_running_loop(), Turns()
    asked = [loop.create_future() for _ in range(5 * A_PASS)]
    for turn in asked:
        turns.ask(turn)
    for number in range(5):
        await asyncio.sleep(0)
        assert [turn.done() for turn in asked] == [place < (number + 1) * A_PASS for place in range(len(asked))]


async def test_one_that_left_takes_no_turn() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    gone, first = ([loop.create_future() for _ in range(A_PASS)] for _ in range(2))
    for turn in gone + first:
        turns.ask(turn)
    for turn in gone:
        turn.cancel()
    await asyncio.sleep(0)
    assert all(turn.done() for turn in first)


async def test_turns_go_on_after_there_was_nothing_to_do() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    for _ in range(3):
        turn = loop.create_future()
        turns.ask(turn)
        await asyncio.wait_for(turn, 5)
