"""The recording's file, and the recorder that must never get in the way."""

import dataclasses
import os
from pathlib import Path
from random import Random

import pytest
import structlog
from recorded_workload import OVERTAKES, WEIGHTS, Connection, MemorySink, Worker, Workload, record
from sampler_numbers import OTHERS

from pagewire.v1 import recording_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire_pb
from pagewire.v1 import sequence_group_pb2 as group_pb
from pagewire_common.start_error import StartError
from scheduler_service.core import (
    EncoderInput,
    ImagePart,
    PhaseRule,
    PreemptionMode,
    PromptItem,
    SamplingParams,
    SchedulerConfig,
    SequenceGroup,
    SequenceStatus,
    TranscriptParams,
    WaitingQueue,
)
from scheduler_service.core.config import LayerGroup
from scheduler_service.core.groups.pooling_params import PoolingParams, PoolingType
from scheduler_service.core.planning.step_writer import StepWriter
from scheduler_service.recording import writer
from scheduler_service.recording.format import MAX_EVENT_BYTES, VERSION, ReadEvent, RecordingError, frame, read_events
from scheduler_service.recording.recorder import RecordedScheduler, Recorder
from scheduler_service.recording.writer import FileWriter
from scheduler_service.wire.messages import decode_enum, decode_fields, encode_enum, encode_fields
from scheduler_service.wire.sampling import RequestSampling

SAMPLING = RequestSampling(
    **OTHERS,
    max_tokens=9,
    n=2,
    min_tokens=3,
    seed=(1 << 63) + 1,
    eos_token_ids=frozenset({2, 1}),
    stop_token_ids=frozenset({7, 3}),
    logprobs=0,
    prompt_logprobs=4,
    logit_bias={5: -0.1, 4: 100.0},
    allowed_token_ids=(9, 8, 9),
    bad_words=((1, 2), (), (3,)),
    form="a grammar",
    beam_width=4,
    length_penalty=-0.3,
    early_stopping=True,
    pooling=PoolingParams(
        type=PoolingType.MEAN, dimensions=3, normalize=True, half=True, num_first_tokens=2, num_sound_tokens=4
    ),
    transcript=TranscriptParams(
        first_timestamp=9, max_initial=3, num_text_tokens=5, suppressed=(1, 2), begin_suppressed=(4,)
    ),
)
CONFIG = SchedulerConfig(
    block_size=3,
    num_device_blocks=5,
    max_num_batched_tokens=70,
    max_num_seqs=8,
    max_model_len=90,
    watermark=0.3,
    num_host_blocks=11,
    prefix_caching=False,
    phase_rule=PhaseRule.SEPARATE,
    delay_factor=0.7,
    preemption_mode=PreemptionMode.AUTO,
    block_bytes=123,
    swap_bytes_per_second=1 << 40,
    prefill_tokens_per_second=456,
    max_loras=3,
    max_held_loras=5,
    lora_copy_seconds=0.25,
    num_lookahead_slots=2,
    sliding_window=7,
    max_step_bytes=1000,
    max_prefill_chunk=13,
    max_num_encoder_tokens=77,
    encoder_cache_size=90,
    encoder_budget=9,
    prepares_images=True,
    images_attend_both_ways=True,
)
ENCODER_INPUT = EncoderInput(num_tokens=5, token_ids=(3, 1, 4), features=b"sound", num_feature_bytes=5, digest=b"d")


def header() -> pb.RecordedEvent:
    return pb.RecordedEvent(
        at=1.0, header=pb.RecordingHeader(format="pagewire recording", version=VERSION, policy="RECORDED_POLICY_FCFS")
    )


def arrival(name: str) -> pb.RecordedEvent:
    return pb.RecordedEvent(at=2.0, arrival=pb.RecordedArrival(request_id=name, prompt_token_ids=range(20)))


def recorder(sink: MemorySink) -> Recorder:
    return Recorder(sink, policy="fair", overtakes=OVERTAKES, tenant_weights=WEIGHTS, clock=lambda: 0.0)


def read_all(path: Path) -> tuple[list[ReadEvent], str]:
    """The events before whatever is wrong with a file, and what that is."""
    read: list[ReadEvent] = []
    try:
        read.extend(read_events(path))
    except RecordingError as error:
        return read, str(error)
    return read, ""


# ---- fields


@pytest.mark.parametrize(
    ("value", "message"),
    [(SAMPLING, group_pb.GroupSampling()), (CONFIG, pb.RecordedConfig()), (ENCODER_INPUT, wire_pb.EncoderInput())],
    ids=["sampling", "config", "encoder's input"],
)
def test_every_field_is_carried_and_comes_back(
    value: RequestSampling | SchedulerConfig | EncoderInput, message: object
) -> None:
    for field in dataclasses.fields(value):
        if field.name == "layer_groups":
            continue  # excludes other fields
        assert getattr(value, field.name) != field.default, f"give {field.name} a value here that is not its default"
    encode_fields(type(value), value, message)  # type: ignore[arg-type]
    assert decode_fields(type(value), message) == value  # type: ignore[arg-type]


def test_groups_of_layers_come_back() -> None:
    message, groups = pb.RecordedConfig(), (LayerGroup(6), LayerGroup(2, 5, chunked=True))
    config = dataclasses.replace(CONFIG, block_size=6, sliding_window=0, max_num_encoder_tokens=0, layer_groups=groups)
    encode_fields(SchedulerConfig, config, message)
    assert decode_fields(SchedulerConfig, message) == config


def test_values_that_are_none_come_back_as_none() -> None:
    message = group_pb.GroupSampling()
    encode_fields(RequestSampling, RequestSampling(max_tokens=1), message)
    assert decode_fields(RequestSampling, message) == RequestSampling(max_tokens=1)


def test_a_group_comes_back_as_it_was_made() -> None:
    message = pb.RecordedArrival()
    image = PromptItem(b"image", 1, 1, 3, b"png", ImagePart(640, 480, 2))
    items = (PromptItem(b"digest", 0, 1, 30, b"data"), image, image._replace(start=2))
    group = SequenceGroup(
        "r", [3, 1, 2], SAMPLING, b"root", priority=-4, tenant="t", adapter_id="l", arrived_at=0.1, items=items
    )
    encode_fields(SequenceGroup, group, message)
    made = decode_fields(SequenceGroup, message)
    names = (
        "request_id",
        "prompt_token_ids",
        "sampling",
        "cache_root",
        "priority",
        "tenant",
        "adapter_id",
        "arrived_at",
        "items",
    )
    for name in names:
        assert getattr(made, name) == getattr(group, name)
    assert made.sequences[0].token_ids == [3, 1, 2]


def test_a_recording_from_before_a_field_was_made_has_the_fields_default() -> None:
    message = group_pb.GroupSampling(max_tokens=5)
    assert decode_fields(RequestSampling, message) == RequestSampling(max_tokens=5)


def test_a_field_that_the_format_does_not_know_is_an_error_and_not_forgotten() -> None:
    @dataclasses.dataclass
    class Params:
        max_tokens: int
        novelty: int

    with pytest.raises(ValueError, match=r"GroupSampling has no field for Params\.novelty"):
        encode_fields(Params, Params(1, 2), group_pb.GroupSampling())


def test_every_way_to_end_has_a_number() -> None:
    kind = group_pb.SequenceStatus.DESCRIPTOR
    ends = [status for status in SequenceStatus if status.is_finished]
    assert [decode_enum(SequenceStatus, kind, encode_enum(kind, status)) for status in ends] == ends
    for number in (0, 99):
        with pytest.raises(ValueError, match=f"{number} is no SequenceStatus"):
            decode_enum(SequenceStatus, kind, number)


# ---- the file


def test_a_file_that_is_cut_off_anywhere_gives_every_event_before_the_cut(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    frames = [frame(header()), frame(arrival("a")), frame(arrival("b"))]
    data = b"".join(frames)
    ends = [sum(map(len, frames[:count])) for count in range(4)]
    for size in range(1, len(data)):
        file.write_bytes(data[:size])
        whole = sum(end <= size for end in ends[1:])
        read, error = read_all(file)
        assert [event.offset for event in read] == ends[:whole]
        assert error == "" if size in ends else f"event {whole} at byte {ends[whole]} is cut off" in error


def test_a_bit_that_flips_anywhere_is_found(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    data = b"".join([frame(header()), frame(arrival("a")), frame(arrival("b"))])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(RecordingError, match="at byte"):
            list(read_events(file))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty: nothing was recorded"),
        (b"TIMESTAMP,ContextTokens\n1,2\n", "is not a recording"),
        (b"\x00" * 100, "is not a recording"),
        (b"\xff" * 100, "is not a recording"),
        (frame(arrival("a")), "byte 0 begins no header"),
        (
            frame(pb.RecordedEvent(header=pb.RecordingHeader(format="pagewire recording", version=1))),
            "has version 1 of the format; 3 can be read",
        ),
        (frame(header()) + b"\xff\xff\xff\xff\x7f", f"claims 34359738367 bytes; .* {MAX_EVENT_BYTES}"),
        (frame(header()) + b"\xff" * 20, "event 1 at byte .* has no length"),
        (frame(header()) + frame(pb.RecordedEvent(at=1.0)), "is of a kind that this program does not know"),
    ],
)
def test_a_file_that_is_no_recording_says_so(data: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "recording"
    file.write_bytes(data)
    with pytest.raises(RecordingError, match=reason):
        list(read_events(file))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        list(read_events(tmp_path / "nothing"))


# ---- the recorder


def test_a_call_that_changes_nothing_is_left_out() -> None:
    sink = MemorySink()
    scheduler = recorder(sink).scheduler(CONFIG, WaitingQueue(), "worker", Connection(1))
    size = len(sink.data)
    assert scheduler.schedule(1.0).is_empty
    assert scheduler.finish_requests(["unknown"], SequenceStatus.FINISHED_ABORTED) == []
    assert len(sink.data) == size


def test_a_call_that_raises_is_recorded_and_raises_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink()
    scheduler = recorder(sink).scheduler(CONFIG, WaitingQueue(), "worker", Connection(1))
    scheduler.add_request(SequenceGroup("a", [1], SamplingParams(max_tokens=1)))
    monkeypatch.setattr(StepWriter, "write", lambda self, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule(1.0)
    (tmp_path / "recording").write_bytes(sink.data)
    *_, last = read_events(tmp_path / "recording")
    assert last.event.plan.raised == "ZeroDivisionError"


def test_an_event_that_cannot_be_written_ends_the_recording_and_nothing_else() -> None:
    sink, waiting = MemorySink(), WaitingQueue()
    recording = recorder(sink)
    worker = Worker(recording.scheduler(CONFIG, waiting, "worker", Connection(1)), Connection(1))
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            group = SequenceGroup(name, [1, 2], SamplingParams(max_tokens=2, seed=-1))
            waiting.append(group)
            recording.arrived(group)
        assert not worker.plan(2.0).is_empty
    assert [entry["event"] for entry in logs] == ["an event could not be recorded"]
    assert sink.failure
    assert type(worker.scheduler) is RecordedScheduler


# ---- the writer


def test_what_was_added_is_in_the_file_when_it_is_closed_and_no_other_user_may_read_it(tmp_path: Path) -> None:
    file = FileWriter(tmp_path / "recording")
    for number in range(1000):
        file.add(b"%d\n" % number)
    file.close()
    assert (tmp_path / "recording").read_bytes() == b"".join(b"%d\n" % number for number in range(1000))
    assert (tmp_path / "recording").stat().st_mode & 0o777 == 0o600
    file.add(b"late")
    file.close()
    assert b"late" not in (tmp_path / "recording").read_bytes()


def test_a_recording_is_never_overwritten_and_an_empty_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.touch()
    file = FileWriter(path)
    file.add(b"something")
    file.close()
    with pytest.raises(StartError, match="holds something already; a recording is never overwritten"):
        FileWriter(path)
    assert path.read_bytes() == b"something"


def test_a_place_that_cannot_be_written_to_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--record: .*nowhere.* cannot be written: No such file or directory"):
        FileWriter(tmp_path / "nowhere" / "recording")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_is_logged_once_and_ends_the_recording_but_not_the_work() -> None:
    with structlog.testing.capture_logs() as logs:
        file = FileWriter(Path("/dev/full"))
        recording = Recorder(file, policy="fcfs", overtakes=1, tenant_weights={})
        Workload(Random(1), recording).run()
        file.close()
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("recording stopped", "No space left on device")]


def test_a_disk_that_is_too_slow_ends_the_recording_instead_of_filling_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING_BYTES", 10)
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 60.0)
    with structlog.testing.capture_logs() as logs:
        file = FileWriter(tmp_path / "recording")
        for _ in range(100):
            file.add(b"12345678")
        file.close()
    assert [entry["reason"] for entry in logs] == ["the disk is too slow"]
    assert (tmp_path / "recording").read_bytes() == b"12345678" * 2


def test_events_lie_in_the_order_of_the_calls(tmp_path: Path) -> None:
    record(tmp_path / "recording", Random(5))
    times = [read.event.at for read in read_events(tmp_path / "recording")]
    assert times == sorted(times)
