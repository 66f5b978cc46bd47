"""A recording, run again: every decision comes out the same, and whatever does not is named."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_workload import Clock, Connection, MemorySink, Worker, record

from pagewire.v1 import recording_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire
from pagewire_client import Client, SamplingParams
from pagewire_client.local import ServiceProcess
from pagewire_common.calls.errors import RequestError
from scheduler_service import core
from scheduler_service.core import PhaseRule, PreemptionMode, SchedulerConfig, SequenceGroup, WaitingQueue
from scheduler_service.recording.format import RecordingError, frame, read_events
from scheduler_service.recording.recorder import Recorder
from scheduler_service.recording.replayer import DifferenceError, Moment, Replayer
from scheduler_service.recording.words import compare_steps
from scheduler_service.replay import main

Change = Callable[[pb.RecordedEvent], object]


def replay(path: Path) -> tuple[Replayer, list[Moment]]:
    replayer = Replayer()
    return replayer, list(replayer.run(path))


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler_service.replay", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def changed(path: Path, kind: str, change: Change, *, number: int = 0) -> Path:
    """A recording in which the given one of the events of a kind is another, with a checksum that is right."""
    frames, count = [], 0
    for read in read_events(path):
        if read.event.WhichOneof("event") == kind:
            if count == number:
                change(read.event)
            count += 1
        frames.append(frame(read.event))
    tampered = path.with_suffix(".tampered")
    tampered.write_bytes(b"".join(frames))
    return tampered


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two requests on one worker, the second first; a token of 3 ends an output. Nothing but 5 is sampled."""
    path, sink, clock = tmp_path / "recording", MemorySink(), Clock()
    recorder = Recorder(sink, policy="priority", overtakes=64, tenant_weights={}, clock=clock)
    waiting = core.PriorityQueue(64)
    config = SchedulerConfig(
        block_size=4, num_device_blocks=16, max_num_batched_tokens=32, max_num_seqs=1, max_model_len=64
    )
    connection = Connection(1)
    worker = Worker(recorder.scheduler(config, waiting, "here:1", connection), connection)
    for name in ("first", "second"):
        sampling = core.SamplingParams(max_tokens=4, eos_token_ids=frozenset({3}))
        group = SequenceGroup(name, [1] * len(name), sampling, priority=-len(name), arrived_at=clock())
        waiting.append(group)
        recorder.arrived(group)

    class Fives(Random):
        def randrange(self, *_: object) -> int:
            return 5

    while worker.scheduler.has_work:
        worker.plan(clock())
        worker.answer(Fives(), clock())
    path.write_bytes(sink.data)
    return path


def record_a_poison(path: Path) -> SequenceGroup:
    """One worker after the other is lost with a request, a second after each began, until the request is ended."""
    sink, waiting = MemorySink(), WaitingQueue()
    now = 0.0
    recorder = Recorder(sink, policy="fcfs", overtakes=64, tenant_weights={}, clock=lambda: now)
    config = SchedulerConfig(
        block_size=4, num_device_blocks=16, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=64
    )
    group = SequenceGroup("poison", [1], core.SamplingParams(max_tokens=4))
    waiting.append(group)
    recorder.arrived(group)
    for epoch in range(1, 20):
        connection = Connection(epoch)
        worker = Worker(recorder.scheduler(config, waiting, f"worker:{epoch % 2}", connection), connection)
        now += 1.0
        while worker.plan(now).is_empty:
            now += 1.0
        now += 0.001
        if worker.scheduler.release_all(now):
            break
    path.write_bytes(sink.data)
    return group


def test_what_a_request_is_ended_for_is_in_the_recording(tmp_path: Path) -> None:
    """Suspicion depends on times, of sessions as well as of steps; another time gives another replay."""
    path = tmp_path / "recording"
    poison = record_a_poison(path)
    assert poison.is_finished
    replayer, moments = replay(path)
    assert [group.request_id for group in moments[-1].groups] == ["poison"]
    (last,) = [read.event.at for read in read_events(path)][-1:]
    slow = changed(path, "session_end", lambda event: setattr(event, "at", last + 2.0), number=replayer.num_steps - 1)
    with pytest.raises(DifferenceError, match="requests that the core ends for lost workers"):
        replay(slow)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(["fcfs", "priority", "fair"]),
    st.sampled_from(PhaseRule),
    st.sampled_from(PreemptionMode),
    st.integers(1, 3),  # workers
    st.integers(1, 3),  # steps in flight
    st.booleans(),
)
def test_whatever_happens_every_decision_comes_out_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    policy: str,
    phase_rule: PhaseRule,
    mode: PreemptionMode,
    num_workers: int,
    most_in_flight: int,
    is_hybrid: bool,
) -> None:
    """Also for models whose layers have windows and states."""
    path = tmp_path_factory.mktemp("replay") / "recording"
    workload = record(
        path,
        Random(seed),
        policy=policy,
        phase_rule=phase_rule,
        mode=mode,
        num_workers=num_workers,
        most_in_flight=most_in_flight,
        is_hybrid=is_hybrid,
        num_actions=80,
    )
    replayer, moments = replay(path)
    assert replayer.num_requests == len(workload.groups)
    replayed = {group.request_id: group for moment in moments if moment.kind == "arrival" for group in moment.groups}
    for group in workload.groups:
        for sequence, again in zip(group.sequences, replayed[group.request_id].sequences, strict=True):
            assert (again.token_ids, again.status) == (sequence.token_ids, sequence.status)


@settings(max_examples=8)
@given(st.integers(0, 1 << 32))
def test_long_runs_come_out_the_same_too(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, path = Random(seed), tmp_path_factory.mktemp("replay") / "recording"
    policy, mode = random.choice(["fcfs", "priority", "fair"]), random.choice(list(PreemptionMode))
    record(path, random, policy=policy, mode=mode, num_workers=3, is_hybrid=random.random() < 0.5, num_actions=600)
    replay(path)


def test_replaying_keeps_nothing_of_requests_that_have_ended(tmp_path: Path) -> None:
    record(tmp_path / "recording", Random(3))
    replayer, _ = replay(tmp_path / "recording")
    assert replayer._groups == {}
    assert replayer._sessions == {}


# ---- what is not the same


def test_a_token_that_was_changed_is_found_where_it_changes_a_plan(small: Path) -> None:
    tampered = changed(small, "answer", lambda event: event.answer.answer.token_ids.__setitem__(0, 3))
    with pytest.raises(DifferenceError) as error:
        replay(tampered)
    assert str(error.value).startswith("event 6 at byte ")
    assert ", worker here:1, step 2: the plans differ" in str(error.value)
    assert "computes tokens: recorded 1 of 1; replayed 1 of 2" in str(error.value)
    assert "forgets finished: recorded nothing; replayed 1" in str(error.value)


def test_another_policy_is_found(small: Path) -> None:
    tampered = changed(small, "header", lambda event: setattr(event.header, "policy", pb.RECORDED_POLICY_FCFS))
    with pytest.raises(DifferenceError, match=r"event 4 .* step 1: the plans differ"):
        replay(tampered)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("plan", lambda event: event.plan.ClearField("step"), "recorded: nothing to do; replayed: "),
        ("plan", lambda event: event.plan.step.new_sequences[0].block_ids.append(9), "new sequences: recorded 1"),
        ("plan", lambda event: event.plan.ignored_request_ids.append("first"), "ends as too large: recorded"),
        ("plan", lambda event: setattr(event.plan, "raised", "KeyError"), "raised KeyError, replayed .* nothing"),
        (
            "plan",
            lambda event: setattr(event.plan.placements[0], "num_overtaken", 3),
            r"placements, number 1: recorded 'second' taken \(alone; .* overtaken 3 times\); replayed 'second' taken",
        ),
        (
            "plan",
            lambda event: event.plan.moved.add(request_id="x"),
            "moved, number 1: recorded 'x' .* replayed nothing",
        ),
        ("answer", lambda event: event.answer.answer.token_ids.append(1), "raised nothing, replayed .* ValueError"),
        ("arrival", lambda event: setattr(event.arrival.sampling, "seed", 7), "sampling of new sequences: recorded"),
        ("arrival", lambda event: setattr(event.arrival, "priority", 9), "new sequences"),
        ("session_start", lambda event: setattr(event.session_start.config, "max_num_seqs", 2), "computes tokens"),
    ],
)
def test_whatever_else_was_changed_is_found(small: Path, kind: str, change: Change, reason: str) -> None:
    with pytest.raises(DifferenceError, match=reason):
        replay(changed(small, kind, change, number=int(kind == "arrival")))


def test_a_recording_from_before_placements_were_recorded_is_replayed_without_them(small: Path) -> None:
    older = changed(small, "header", lambda event: event.header.ClearField("has_placements"))
    replay(changed(older, "plan", lambda event: event.plan.ClearField("placements")))


def test_choices_between_workers_are_recorded_with_what_they_were_made_of(tmp_path: Path) -> None:
    """All reasons come up among random workloads, and what was left names the session that it was left to."""
    reasons, left_to = set[str](), set[int]()
    for seed in range(10):
        path = tmp_path / str(seed)
        record(path, Random(seed), num_workers=4, num_actions=400, policy="priority")
        for read in read_events(path):
            for placement in read.event.plan.placements:
                reasons.add(
                    pb.RecordedPlacementReason.Name(placement.reason).removeprefix("RECORDED_PLACEMENT_REASON_")
                )
                left_to.add(placement.left_to_session)
        replay(path)
    assert reasons == {reason.name for reason in core.PlacementReason}
    assert len(left_to) > 5


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("plan", lambda event: setattr(event.plan, "session", 9)),
        ("answer", lambda event: setattr(event.answer, "session", 9)),
        ("arrival", lambda event: event.arrival.ClearField("sampling")),
        ("arrival", lambda event: event.finish.SetInParent() or setattr(event.finish, "session", 1)),
        ("session_start", lambda event: setattr(event.session_start.config, "block_size", 0)),
        ("session_start", lambda event: event.header.SetInParent()),
        ("session_start", lambda event: setattr(event.session_start.config, "num_device_blocks", 1 << 28)),
        ("session_start", lambda event: setattr(event.session_start.config, "num_host_blocks", (1 << 64) - 1)),
        ("arrival", lambda event: setattr(event.arrival.sampling, "n", 1 << 20)),
        ("arrival", lambda event: setattr(event.arrival.sampling, "beam_width", 1 << 20)),
        ("arrival", lambda event: event.arrival.ended.extend(range(128))),
    ],
)
def test_events_that_contradict_each_other_are_a_damaged_recording(small: Path, kind: str, change: Change) -> None:
    with pytest.raises(RecordingError, match=r"event \d+ at byte \d+ makes no sense"):
        replay(changed(small, kind, change))


Field = tuple[Message, FieldDescriptor]


def plain_fields(message: Message) -> Iterator[Field]:
    """Those that hold no message, of a message and of all within it."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield message, field
        elif not field.message_type.GetOptions().map_entry:
            for item in value if field.is_repeated else [value]:
                yield from plain_fields(item)


ODD: dict[int, st.SearchStrategy[object]] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 10**7, 2**31, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**24, 2**40, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3]),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(["", "x", "x" * 1000]),
}


@given(data=st.data(), random=st.randoms(use_true_random=False))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_recording_says_its_replay_ends_with_a_sentence(
    data: st.DataObject, random: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Checksums are right, so that odd values come as far as the core. Time and memory are those of an honest file."""
    path = tmp_path_factory.mktemp("odd") / "recording"
    record(path, random, num_actions=30)
    events = [read.event for read in read_events(path)]
    message, field = data.draw(st.sampled_from(list(plain_fields(data.draw(st.sampled_from(events))))))
    value = data.draw(ODD[field.cpp_type])
    if field.type == FieldDescriptor.TYPE_BYTES:
        value = str(value).encode()
    if field.is_repeated:
        getattr(message, field.name).extend([value] * data.draw(st.sampled_from([1, 1000])))
    else:
        setattr(message, field.name, value)
    path.write_bytes(b"".join(map(frame, events)))
    with contextlib.suppress(DifferenceError, RecordingError):
        replay(path)


def test_a_core_that_decides_by_chance_is_found_out(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.PriorityQueue, "append", WaitingQueue.append)
    with pytest.raises((DifferenceError, RecordingError)):
        replay(small)


# ---- the command


def test_the_command_ends_with_json_and_says_how_it_went_by_its_exit_status(small: Path) -> None:
    result = command(small)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report.pop("seconds") > 0
    assert report == {
        "events": 22,
        "steps": 9,
        "requests": 2,
        "workers": 1,
        "identical": True,
        "complete": True,
    }


def test_the_command_names_the_first_difference(small: Path) -> None:
    result = command(changed(small, "answer", lambda event: event.answer.answer.token_ids.__setitem__(0, 3)))
    assert result.returncode == 1
    assert "scheduler_service.replay: event 6 at byte " in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["identical"] is False


def test_the_command_replays_what_comes_before_a_cut(small: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(small.read_bytes()[:-3])
    result = command(tmp_path / "cut")
    assert result.returncode == 2
    assert "scheduler_service.replay: event 21 at byte " in result.stderr
    assert "is cut off" in result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["events"], report["identical"], report["complete"]) == (21, True, False)


def test_a_port_in_use_is_named_before_the_recording_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["replay", "nowhere", "--page", "--http-listen", address])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    assert f"cannot listen on {address}: port" in capsys.readouterr().err


def test_the_command_says_what_is_no_recording_and_lists_its_exit_codes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, reason in (("empty", "is empty"), ("nothing", "No such file"), (".", "Is a directory")):
        result = command(tmp_path / path)
        assert result.returncode == 2
        assert reason in result.stderr
        assert "Traceback" not in result.stderr
    assert "exit status:" in command("--help").stdout


# ---- the real thing


async def test_a_service_with_workers_that_fail_is_replayed_from_its_recording(
    byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    workers = [FakeWorkerService(byte_tokenizer_directory, poison=99, num_device_blocks=16) for _ in range(2)]
    async with (
        serving(workers[0]) as first,
        serving(workers[1]) as second,
        running(first, second, record=path, scheduling_policy="fair") as engine,
    ):
        states = [await submit(engine, str(number), [5] * 20, max_tokens=30, n=1 + number % 2) for number in range(20)]
        states.append(await submit(engine, "poison", [5, 99]))
        await anext(aiter(states[1].stream))  # a worker is there
        streams = [asyncio.create_task(text_of(engine, state)) for state in states]
        for number in range(4):  # each new, so that it cannot have ended by itself
            aborted = await submit(engine, f"aborted {number}", [5] * 20, max_tokens=30)
            await until(lambda: any(worker.scheduler is not None for worker in engine.workers.all))
            assert engine.requests.abort(aborted.request.key)
            streams.append(asyncio.create_task(text_of(engine, aborted)))
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert isinstance(results[20], RequestError)
    result = await asyncio.to_thread(command, path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["requests"], report["workers"]) == (25, 2)
    assert report["steps"] > 30
    kinds = {read.event.WhichOneof("event") for read in read_events(path)}
    assert kinds >= {"header", "arrival", "session_start", "session_end", "plan", "answer", "finish"}


async def test_a_request_that_ends_while_no_worker_is_there_is_recorded_too(
    byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with running("127.0.0.1:1", record=path) as engine:
        async with serving(worker) as address:
            from scheduler_service.engine.worker_link.client import WorkerClient

            client = WorkerClient(address)
            await engine.fleet.agreement.accept(client, await client.get_info())
            await client.close()
        await submit(engine, "a", [5])
        assert engine.requests.abort("a")
    _, moments = replay(path)
    assert [moment.kind for moment in moments] == ["header", "arrival", "withdrawal"]
    assert moments[-1].groups[0].is_finished


async def test_a_killed_service_leaves_a_recording_that_can_be_replayed(
    byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address:
        arguments = ["--listen", "127.0.0.1:0", "--workers", address, "--model", "fake", "--record", str(path)]
        process = ServiceProcess("scheduler_service", arguments)
        try:
            listening = await asyncio.to_thread(process.wait_for, "listening", 60)
            async with asyncio.timeout(60), Client(str(listening["address"])) as client:

                async def generate() -> None:
                    while True:
                        async for _ in client.generate("hello", SamplingParams(max_tokens=50)):
                            pass

                generating = asyncio.create_task(generate())
                while not path.exists() or path.stat().st_size < 20_000:
                    assert not generating.done()
                    await asyncio.sleep(0.01)
                process.process.send_signal(signal.SIGKILL)
                generating.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await generating
        finally:
            process.process.kill()
            process.stop()
    result = await asyncio.to_thread(command, path)
    assert result.returncode == 0 or "is cut off" in result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["identical"]
    assert report["steps"] > 50


SENT = wire.PromptItem(digest=b"d", num_bytes=9)


@pytest.mark.parametrize(
    ("recorded", "replayed", "part"),
    [
        (wire.Fork(token_ids=[1]), wire.Fork(token_ids=[2]), "forks"),
        (wire.Fork(index=1), wire.Fork(index=2), "forks"),
        (wire.NewSequence(adapter_id="a"), wire.NewSequence(adapter_id="b"), "adapters of new sequences"),
        (
            wire.NewSequence(items=[SENT]),
            wire.NewSequence(items=[wire.PromptItem(digest=b"d")]),
            "items of new sequences",
        ),
        (
            wire.SchedulerOutput(items_to_encode=[wire.EncoderItem(digest=b"d")]),
            wire.SchedulerOutput(items_to_encode=[wire.EncoderItem(digest=b"d", part=1)]),
            "encodes",
        ),
    ],
)
def test_a_difference_in_any_field_has_words(
    recorded: wire.Fork | wire.NewSequence | wire.SchedulerOutput,
    replayed: wire.Fork | wire.NewSequence | wire.SchedulerOutput,
    part: str,
) -> None:
    def step(item: wire.Fork | wire.NewSequence | wire.SchedulerOutput) -> wire.SchedulerOutput:
        if isinstance(item, wire.SchedulerOutput):
            return item
        if isinstance(item, wire.Fork):
            return wire.SchedulerOutput(forks=[item])
        return wire.SchedulerOutput(new_sequences=[item])

    assert f"{part}: recorded" in compare_steps(step(recorded), step(replayed))
