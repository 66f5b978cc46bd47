"""Epochs of sessions: whatever a peer has said, there is a newer one, and it is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire_common.epochs import LAST, MAX, check_epoch, next_epoch

EPOCHS = st.one_of(st.integers(0, LAST - 1), st.sampled_from([0, 1, MAX - 1, MAX, MAX + 1, LAST - 1]))


@given(EPOCHS, EPOCHS)
def test_a_schedulers_next_epoch_is_one_that_the_worker_takes(newest: int, now: int) -> None:
    epoch = next_epoch(newest, now)
    check_epoch(epoch, newest)
    assert newest < epoch <= LAST


@given(EPOCHS, st.integers(0, LAST))
def test_no_epoch_that_is_taken_leaves_out_more_than_clocks_need(newest: int, epoch: int) -> None:
    try:
        check_epoch(epoch, newest)
    except ValueError:
        assert epoch <= newest or epoch > max(MAX, newest + 1)
    else:
        assert newest < epoch
        assert epoch <= MAX or epoch == newest + 1


def test_after_the_last_epoch_there_is_none() -> None:
    with pytest.raises(ValueError, match=f"the newest epoch is said to be {LAST}, and no session can be newer"):
        next_epoch(LAST, 1)
