from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.sequence_group_pb2 import GroupSampling
from scheduler_service.wire.messages import SHORT, fill_column

NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 35).map(lambda bits: min(2**bits, 2**32 - 1))


@given(seed=st.lists(NUMBERS, min_size=1, max_size=20), length=st.sampled_from([0, 1, SHORT - 1, SHORT, 3 * SHORT]))
def test_a_long_column_is_what_protobuf_makes_of_its_numbers(seed: list[int], length: int) -> None:
    numbers = (seed * length)[:length]
    message = pb.NewSequence(sequence_id=7)
    fill_column(message, "token_ids", numbers)
    assert message == pb.NewSequence(sequence_id=7, token_ids=numbers)
    sampling = GroupSampling(seed=7)
    fill_column(sampling, "allowed_token_ids", numbers)
    assert sampling.SerializeToString() == GroupSampling(seed=7, allowed_token_ids=numbers).SerializeToString()
