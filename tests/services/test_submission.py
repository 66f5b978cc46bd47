"""A request is in the engine what it was in the front end."""

from pathlib import Path

from engines import running, submit
from fake_worker_service import FakeWorkerService, serving
from sampler_numbers import OTHERS

from scheduler_service.frontend.output.request import GenerationRequest, Resumption
from scheduler_service.wire.sampling import RequestSampling

SAMPLING = RequestSampling(
    **OTHERS,
    max_tokens=30,
    n=3,
    min_tokens=2,
    seed=2**63,
    eos_token_ids=frozenset((2, 3)),
    stop_token_ids=frozenset((4,)),
    logprobs=2,
    prompt_logprobs=0,
    logit_bias={5: -1.5, 6: 2.0},
    allowed_token_ids=(5, 6, 7),
    bad_words=((8, 9), (10,)),
    form="a grammar",
)


async def test_nothing_of_a_request_is_lost_between_front_end_and_engine(byte_tokenizer_directory: Path) -> None:
    request = GenerationRequest(
        request_id="a",
        tenant="gold",
        cache_salt="salt",
        priority=-3,
        prompt_token_ids=[5, 6, 7],
        sampling=SAMPLING,
        resumption=Resumption(token_ids=((5, 6), (), ()), finished=frozenset((1,))),
    )
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.runs.clear()
    async with serving(worker) as address, running(address, scheduling_policy="priority") as one:
        state = await one.submit(request)
        group = one.group(state)
        assert (group.request_id, group.tenant, group.priority) == (request.key, "gold", -3)
        assert list(group.prompt_token_ids) == [5, 6, 7]
        assert group.ended == {1}
        assert [list(sequence.output_token_ids) for sequence in group.sequences] == [[5, 6], [], []]
        for name in RequestSampling.__dataclass_fields__:
            asked, came = getattr(SAMPLING, name), getattr(group.sampling, name)
            if name == "allowed_token_ids":
                came = tuple(came)
            if name == "bad_words":
                came = tuple(tuple(word) for word in came)
            assert came == asked, name
        roots = {group.cache_root}
        for number, owner in enumerate(({}, {"tenant": "gold"}, {"cache_salt": "salt"})):
            other = GenerationRequest(
                request_id=str(number), prompt_token_ids=[5], sampling=RequestSampling(max_tokens=1), **owner
            )
            other_state = await one.submit(other)
            roots.add(one.group(other_state).cache_root)
            await one.close(other_state)
        assert len(roots) == 4
        await one.close(state)
        worker.runs.set()


async def test_servers_have_keys_of_their_own(byte_tokenizer_directory: Path) -> None:
    """What is cached cannot be guessed from outside."""
    roots = set()
    for _ in range(2):
        async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as one:
            state = await submit(one, "a", [5], max_tokens=500)
            roots.add(one.group(state).cache_root)
            await one.close(state)
    assert len(roots) == 2
