"""A request's fields are counted as its parser would find them, before it is parsed."""

from hypothesis import assume, given
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.request_limits import MAX_FIELDS, has_more_fields, num_opaque_bytes

REQUESTS = st.builds(
    lambda text, messages, biases, stop, allowed, outputs, number: pb.GenerateRequest(
        **({"chat": {"messages": messages}} if messages else {"text": text}),
        sampling={
            "logit_bias": dict.fromkeys(biases, 0.5),
            "stop": stop,
            "allowed_token_ids": allowed,
            "top_p": number,
            "seed": 3,
        },
        resume={"outputs": outputs},
    ),
    st.text(min_size=1, max_size=300),
    st.lists(st.builds(lambda text: pb.ChatMessage(role="user", content=text), st.text(max_size=200)), max_size=4),
    st.sets(st.integers(0, 2**32 - 1), max_size=4),
    st.lists(st.text(max_size=9), max_size=4),
    st.lists(st.integers(0, 2**32 - 1), max_size=9),
    st.lists(st.builds(lambda ids: pb.ResumedOutput(token_ids=ids), st.lists(st.integers(0, 9))), max_size=3),
    st.floats(0.1, 1),
)


def num_fields(message: pb.GenerateRequest) -> int:
    """Counted in the message itself; the parts without parts are chat messages, resumed outputs and biases."""
    count = len(message.ListFields())
    if message.HasField("chat"):
        count += len(message.chat.messages)
    count += len(message.resume.outputs)
    sampling = message.sampling
    count += 2 + len(sampling.stop) + len(sampling.logit_bias) + bool(sampling.allowed_token_ids)
    return count


@given(message=REQUESTS, shorter=st.integers(1, 40))
def test_fields_of_a_request_and_of_its_parts_are_counted(message: pb.GenerateRequest, shorter: int) -> None:
    data, count = message.SerializeToString(), num_fields(message)
    assume(len(data) > count)
    assert has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, count - 1)
    assert not has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, count)
    assert not has_more_fields(data[:-shorter], pb.GenerateRequest.DESCRIPTOR, count)


def test_a_packed_list_is_one_field_and_an_unpacked_one_many() -> None:
    fields = pb.DetokenizeRequest.DESCRIPTOR
    packed = pb.DetokenizeRequest(token_ids=range(1000)).SerializeToString()
    assert not has_more_fields(packed, fields, 1)
    unpacked = b"\x08\x05" * 1000
    assert list(pb.DetokenizeRequest.FromString(unpacked).token_ids) == [5] * 1000
    assert has_more_fields(unpacked, fields, 999)
    assert not has_more_fields(unpacked, fields, 1000)


@given(st.binary(max_size=60), st.integers(0, 20))
def test_what_is_no_request_is_left_to_the_parser(data: bytes, most: int) -> None:
    has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, most)


def test_a_number_without_end_is_none() -> None:
    assert not has_more_fields(b"\x80" * 1_500_000, pb.GenerateRequest.DESCRIPTOR, 1000)


def test_a_field_that_takes_more_bytes_than_it_needs_counts_more() -> None:
    padded = (b"\xb8\x80\x80\x80\x00" + b"\x80" * 9 + b"\x00") * 100  # priority 0
    assert pb.GenerateRequest.FromString(padded) == pb.GenerateRequest()
    assert has_more_fields(padded, pb.GenerateRequest.DESCRIPTOR, 400 - 1)
    assert not has_more_fields(padded, pb.GenerateRequest.DESCRIPTOR, 400)


def test_a_chat_message_is_one_field_and_each_of_its_parts_another() -> None:
    message = pb.ChatMessage(role="user", content="hi", fields="{}")
    plain = pb.GenerateRequest(chat=pb.Chat(messages=[message] * 4096)).SerializeToString()
    assert not has_more_fields(plain, pb.GenerateRequest.DESCRIPTOR, 2 + 4096)
    assert has_more_fields(plain, pb.GenerateRequest.DESCRIPTOR, 4096)
    message.parts.add(text="a")
    message.parts.add(image=pb.Image(data=b"b"))
    parts = pb.GenerateRequest(chat=pb.Chat(messages=[message] * 10)).SerializeToString()
    assert not has_more_fields(parts, pb.GenerateRequest.DESCRIPTOR, 1 + 3 * 10)
    assert has_more_fields(parts, pb.GenerateRequest.DESCRIPTOR, 3 * 10)
    repeated = b"\x0a\x00" * 1000  # the role, again and again
    again = pb.GenerateRequest(chat=pb.Chat()).SerializeToString()
    chat = b"\x0a" + bytes([0xD0, 0x0F]) + repeated
    data = again[:1] + bytes([0xD3, 0x0F]) + chat
    assert len(pb.GenerateRequest.FromString(data).chat.messages) == 1
    assert has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, 990)


def test_strings_of_a_part_count() -> None:
    data = pb.GenerateRequest(sampling={"choice": {"options": [""] * 1000}}).SerializeToString()
    assert has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, 1000)


def test_parts_that_come_again_and_again_count_each_time() -> None:
    assert has_more_fields(b"\x22\x00" * 1001, pb.GenerateRequest.DESCRIPTOR, 1000)
    assert has_more_fields(b"\x22\x02\x0a\x00" * 501, pb.GenerateRequest.DESCRIPTOR, 1000)


@given(message=REQUESTS, sound=st.binary(max_size=400), kind=st.text(max_size=20))
def test_bytes_that_no_parser_looks_into_are_those_of_sounds_embeddings_and_images_alone(
    message: pb.GenerateRequest, sound: bytes, kind: str
) -> None:
    for request in (
        pb.TranscribeRequest(sound=pb.Sound(data=sound, content_type=kind), language=kind, temperature=0.5),
        pb.GenerateRequest(encoder_sound=pb.Sound(data=sound, content_type=kind), sampling=message.sampling),
        pb.GenerateRequest(parts={"parts": [{"text": kind}, {"prompt_embeds": sound}]}, sampling=message.sampling),
        pb.GenerateRequest(parts={"parts": [{"text": kind}, {"image": {"data": sound}}]}, sampling=message.sampling),
    ):
        assert num_opaque_bytes(request.SerializeToString(), request.DESCRIPTOR) == len(sound)
    assert num_opaque_bytes(message.SerializeToString(), message.DESCRIPTOR) == 0


def test_they_are_counted_within_the_fields_that_a_request_may_have() -> None:
    """Each further field would take a third of a microsecond."""
    sound = pb.GenerateRequest(encoder_sound=pb.Sound(data=b"sound")).SerializeToString()
    few, many = b"\x28\x01" * (MAX_FIELDS - 2), b"\x28\x01" * MAX_FIELDS
    assert num_opaque_bytes(few + sound, pb.GenerateRequest.DESCRIPTOR) == 5
    assert num_opaque_bytes(many + sound, pb.GenerateRequest.DESCRIPTOR) == 0


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_have_no_more_of_them_than_there_are(data: bytes) -> None:
    assert 0 <= num_opaque_bytes(data, pb.TranscribeRequest.DESCRIPTOR) <= len(data)
