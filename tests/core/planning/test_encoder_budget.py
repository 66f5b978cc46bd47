"""What encoders read has a budget of its own: it is read in turn, and no decode waits for it."""

from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler


def test_long_inputs_are_read_one_a_step_while_every_decode_goes_on() -> None:
    scheduler = make_scheduler(num_device_blocks=64, max_num_batched_tokens=8, max_num_encoder_tokens=20)
    worker = FakeWorker(scheduler.config)

    def step() -> tuple[int, int]:
        """How many decodes a step has, and how many inputs of encoders."""
        output = scheduler.schedule()
        scheduler.update_from_output(output, worker.execute(output))
        inputs = [scheduled for scheduled in output.scheduled if scheduled.sequence.is_encoder]
        return sum(scheduled.num_tokens == 1 for scheduled in output.scheduled), len(inputs)

    for number in range(3):
        scheduler.add_request(make_group(f"runs {number}", 1, max_tokens=20))
    assert step() == (3, 0)
    for number in range(3):  # of different contents, so that none is found in the cache
        encoder = range(100 * number, 100 * number + 20)
        scheduler.add_request(make_group(f"reads {number}", 1, max_tokens=20, encoder=encoder))
    assert [step() for _ in range(4)] == [(4, 1), (5, 1), (6, 1), (6, 0)]


def test_an_input_that_is_cached_takes_nothing_of_the_budget() -> None:
    scheduler = make_scheduler(num_device_blocks=64, max_num_encoder_tokens=20)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 1, max_tokens=1, encoder=range(20)))
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.execute(output))
    scheduler.add_request(make_group("again", 1, encoder=range(20)))
    scheduler.add_request(make_group("other", 1, encoder=range(50, 70)))
    output = scheduler.schedule()
    worker.execute(output)
    assert [new.num_computed_tokens for new in output.new_sequences if new.sequence.is_encoder] == [20, 0]
    assert [scheduled.sequence.group.request_id for scheduled in output.scheduled] == ["again", "other", "other"]


def test_an_input_beyond_the_budget_is_refused_in_a_sentence() -> None:
    scheduler = make_scheduler(num_device_blocks=64, max_num_encoder_tokens=20)
    group = make_group("a", 1, encoder=range(21))
    scheduler.add_request(group)
    assert scheduler.schedule().ignored == [group]
    assert group.error is not None
    assert "and 21 encoder tokens do not fit the worker" in group.error
