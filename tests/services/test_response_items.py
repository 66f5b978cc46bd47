"""Items of responses: the events of any message, the messages of any input, and the store of responses."""

import asyncio
import json
from collections import OrderedDict
from random import Random
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response
from responses_requests import checked, joined, read_event

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.model_files.generation_config import GenerationDefaults
from scheduler_service.access.caller import caller
from scheduler_service.access.keys import ApiKey
from scheduler_service.engine.front_ends.stored_entries import ENTRY_BYTES, StoredEntries
from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from scheduler_service.frontend.http.errors import HttpError
from scheduler_service.frontend.http.images.image_reader import ImageReader
from scheduler_service.frontend.http.responses.conversation import read_conversation
from scheduler_service.frontend.http.responses.fields import ResponseFields
from scheduler_service.frontend.http.responses.output_items import OutputItems
from scheduler_service.frontend.http.responses.response_object import ResponseObject, usage
from scheduler_service.frontend.link.stored_texts import StoredTexts

MANY = 40
TEXTS = ("a", " b\n", "é😀", '"', "</x>")
BASE = "0" * 32


def some_message(random: Random) -> list[Event]:
    """The events of one message, each character of a text alone. The last call may be cut."""
    events: list[Event] = [Reasoning(text) for text in random.choices(TEXTS, k=random.randrange(4))]
    number = 0
    for _ in range(random.randrange(4)):
        if random.random() < 0.5:
            events += [Content(text) for text in random.choices(TEXTS, k=random.randrange(1, 4))]
        else:
            arguments = json.dumps({"x": random.choice(TEXTS)})
            arguments = arguments if random.random() < 0.7 else arguments[: random.randrange(len(arguments))]
            call = [CallArguments(number, character) for character in arguments]
            events += [CallStarted(number, "f", random.choice((None, f"call-{number}"))), *call, CallEnded(number)]
            number += 1
    return events


def events_of(items: OutputItems, message: list[Event], random: Random, *, is_cut: bool) -> list[dict[str, Any]]:
    """The events of the stream, with the message cut at random places."""
    shown = []
    while message:
        number = random.randrange(1, 5)
        shown += list(items.add(message[:number], len(message[:number])))
        message = message[number:]
    shown += list(items.finish(is_cut=is_cut))
    return [
        {"type": kind, "sequence_number": number} | json.loads(f"{{{members}}}")
        for number, (kind, members) in enumerate(shown, 1)
    ]


def test_a_stream_has_the_items_of_the_whole_answer_for_every_message_and_cut() -> None:
    for seed in range(MANY):
        random = Random(seed)
        message, is_cut = some_message(random), random.random() < 0.3
        has_encrypted = random.random() < 0.5
        items = OutputItems(BASE, has_encrypted=has_encrypted)
        others = OutputItems(BASE, is_streamed=False, has_encrypted=has_encrypted)
        events = events_of(items, message, random, is_cut=is_cut)
        assert events_of(others, message, random, is_cut=is_cut) == []
        whole = [json.loads(item.json()) for item in items.items]
        assert whole == [json.loads(item.json()) for item in others.items]
        assert joined(json.loads(json.dumps(events))) == whole
        assert items.num_tokens == len(message)
        response = ResponseObject("resp_1", 1, "m", ResponseFields(), GenerationDefaults())
        begun = checked(json.loads(response.begun()))
        response.status = "incomplete" if is_cut else "completed"
        done = checked(json.loads(f'{response.head(usage(items, 3, 2, 0))}"output": {json.dumps(whole)}}}'))
        state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
        created = {"type": "response.created", "sequence_number": 0, "response": begun}
        last = {"type": f"response.{response.status}", "sequence_number": len(events) + 1, "response": done}
        for event in (created, *events, last):
            state.handle_event(read_event(event))
        if not is_cut:
            assert state._completed_response is not None
            assert [item.to_dict() for item in Response.model_validate(done).output] == whole
            assert whole[-1]["status"] == "completed" or whole[-1]["type"] == "function_call"
            assert {item["type"] for item in whole} & {"message", "function_call"}


def test_a_call_whose_arguments_are_not_whole_is_incomplete() -> None:
    for arguments, status in (("{}", "completed"), ('{"a": [1', "incomplete"), ("", "incomplete"), ("}", "incomplete")):
        items = OutputItems(BASE)
        list(items.add([CallStarted(0, "f"), CallArguments(0, arguments), CallEnded(0)], 1))
        list(items.finish(is_cut=True))
        assert [item.status for item in items.items] == [status]


def test_log_probabilities_belong_to_the_text_of_the_answer() -> None:
    items = OutputItems(BASE)
    list(items.add([Reasoning("x")], 1, ["0"]))
    list(items.add([], 1, ["1"]))
    list(items.add([Content("y")], 1, ["2"]))
    list(items.add([CallStarted(0, "f")], 1, ["3"]))
    list(items.add([CallArguments(0, "{}"), CallEnded(0)], 1, ["4"]))
    list(items.add([Content("z")], 1, ["5"]))
    last = list(items.finish(is_cut=False))
    assert [item.logprobs for item in items.items] == [[], ["1", "2"], [], ["5"]]
    assert next(kind for kind, _ in last) == "response.output_text.done"


# ---- input


def messages_of(*items: dict[str, Any], instructions: str | None = None) -> list[Any]:
    placed = [(f"input[{number}]", item) for number, item in enumerate(items)]
    return asyncio.run(read_conversation(instructions, placed, ImageReader()))


USER = {"role": "user", "content": "u"}
SAID = {"type": "message", "role": "assistant", "id": "any/id", "status": "completed"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
TOLD = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
TEXT = {"type": "output_text", "text": "s", "annotations": [], "logprobs": []}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    turn = {"role": "assistant", "content": "s", "reasoning_content": "t", "tool_calls": [CALLED, CALLED]}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    found = messages_of(USER, THOUGHT, SAID | {"content": [TEXT]}, CALL, CALL, TOLD, TOLD, THOUGHT, CALL, TOLD)
    second = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [CALLED]}
    assert found == [USER, turn, result, result, second, result]
    assert messages_of(SAID | {"content": "a"}, SAID | {"content": [{"type": "refusal", "refusal": "b"}]}) == [
        {"role": "assistant", "content": "a\nb"}
    ]
    assert messages_of(THOUGHT | {"content": None, "summary": [{"type": "summary_text", "text": "t"}]}, USER) == [
        {"role": "assistant", "content": "", "reasoning_content": "t"},
        USER,
    ]
    assert messages_of(CALL, THOUGHT)[1]["reasoning_content"] == "t"


def test_reasoning_comes_back_from_its_encrypted_content_alone() -> None:
    items = OutputItems(BASE, has_encrypted=True)
    list(items.add([Reasoning("té"), Reasoning("\n<b>"), Content("s")], 1))
    thought, said = (json.loads(item.json()) for item in items.items)
    assert "encrypted_content" not in said
    kept = {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}
    for sent in (kept, kept | {"content": []}, thought):
        assert messages_of(USER, sent, USER)[1]["reasoning_content"] == "té\n<b>"


def test_instructions_and_the_first_messages_of_the_system_are_one_message() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]}
    assert messages_of(developer, USER, developer, instructions="i") == [
        {"role": "system", "content": "i\n\nd"},
        USER,
        {"role": "developer", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"type": "web_search_call", "id": "1"}, "web_search_call"),
        ({"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"}, "custom_tool_call"),
        (USER | {"content": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
        (USER | {"content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {}}]}, "prompt_cache"),
        (USER | {"content": [{"type": "input_text"}]}, "text"),
        (USER | {"weight": 1}, "weight"),
        (USER | {"role": "critic"}, "role"),
        (THOUGHT | {"encrypted_content": "gAAAAABo"}, "encrypted_content does not come from this server"),
        (THOUGHT | {"encrypted_content": "pagewire-1._w="}, "encrypted_content does not come from this server"),
        (CALL | {"namespace": "x"}, "namespace"),
        ({"type": "function_call", "name": "f"}, "call_id"),
        (TOLD | {"output": {}}, "output"),
        ({"type": ["message"]}, "type"),
        ({"type": "item_reference", "id": "msg_1"}, "msg_1"),
        ({"id": "msg_1"}, "msg_1"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_by_its_name(item: dict[str, Any], named: str) -> None:
    with pytest.raises(HttpError, match=rf"^input\[1\].*{named}") as refused:
        messages_of(USER, item)
    assert refused.value.status == 400


# ---- the store


class _Slow:
    """What `StoredEntries` promises, as a list of all uses: the newest last."""

    def __init__(self, most: int, tenant_most: int, tenant_entries: int) -> None:
        self.limits = most, tenant_most, tenant_entries
        self.entries: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def bytes_of(self, tenant: str | None = None) -> int:
        return sum(len(data) + ENTRY_BYTES for (one, _), data in self.entries.items() if tenant in (None, one))

    def drop_oldest(self, tenant: str) -> None:
        del self.entries[next(key for key in self.entries if key[0] == tenant)]

    def store(self, tenant: str, name: str, data: bytes) -> None:
        most, tenant_most, tenant_entries = self.limits
        self.entries.pop((tenant, name), None)
        self.entries[tenant, name] = data
        while self.bytes_of(tenant) > tenant_most or sum(one == tenant for one, _ in self.entries) > tenant_entries:
            self.drop_oldest(tenant)
        while self.bytes_of() > most:
            sizes = {one: self.bytes_of(one) for one, _ in self.entries}
            self.drop_oldest(max(sizes, key=sizes.__getitem__))


def test_the_store_keeps_what_was_used_last_within_its_limits() -> None:
    for seed in range(10):
        random, limits = Random(seed), (4000, 2500, 5)
        store, slow = StoredEntries(*limits), _Slow(*limits)
        for _ in range(200):
            tenant, name = random.choice("abc"), random.choice("12345678")
            match random.randrange(4):
                case 0:
                    assert store.delete(tenant, name) is (slow.entries.pop((tenant, name), None) is not None)
                case 1 | 2:
                    data = bytes(random.choice((0, 100, 700, 2600)) + random.randrange(50))
                    store.store(tenant, name, data)
                    slow.store(tenant, name, data)
                case _:
                    expected = slow.entries.get((tenant, name))
                    if expected is not None:
                        slow.entries.move_to_end((tenant, name))
                    assert store.read(tenant, name) == expected


class _Engine:
    """Answers a front end's questions for stored texts, as the engine does."""

    def __init__(self) -> None:
        self.entries = StoredEntries()

    def new_number(self) -> int:
        return 1

    async def ask(self, call: int, **event: Any) -> pb.Answer:
        ((kind, given),) = event.items()
        match kind:
            case "store_entry":
                self.entries.store(given.tenant, given.id, given.data)
            case "read_entry":
                data = self.entries.read(given.tenant, given.id)
                return pb.Answer(found=data is not None, data=data or b"")
            case "delete_entry":
                return pb.Answer(found=self.entries.delete(given.tenant, given.id))
        return pb.Answer()


async def test_only_the_tenant_of_a_text_reads_or_deletes_it() -> None:
    connection: Any = _Engine()
    texts = StoredTexts(connection)
    caller.set(ApiKey(id="1", digest=b"", tenant="a"))
    await texts.store("1", b"x")
    caller.set(ApiKey(id="2", digest=b"", tenant="b"))
    assert await texts.read("1") is None
    assert not await texts.delete("1")
    caller.set(ApiKey(id="1", digest=b"", tenant="a"))
    assert await texts.read("1") == b"x"
    assert await texts.delete("1")
    assert await texts.read("1") is None
