import math
import re
from dataclasses import replace

import grpc
import pytest
from sampler_numbers import BEYOND, OTHERS

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.model_files.generation_config import GenerationConfig, GenerationDefaults
from pagewire_common.sampling import NUMBERS
from scheduler_service.core import BlockManager, SequenceGroup, TranscriptParams
from scheduler_service.frontend.calls.generation import check_request
from scheduler_service.frontend.checking.checks import check_names, check_sizes
from scheduler_service.frontend.checking.prompt import decode_tokens, encode_prompt
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.wire.sampling import RequestSampling


def request(text: str = "hello", **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]


def defaults_of(generation: dict[str, object]) -> GenerationDefaults:
    return GenerationDefaults.of(GenerationConfig.read({}, generation, 259))


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages]))


INVALID = {
    "no prompt": (pb.GenerateRequest(), "prompt is missing"),
    "empty text": (request(""), "text is empty"),
    "empty token ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids is empty"),
    "empty chat": (chat(), "chat.messages is empty"),
    "unknown role": (chat(("wizard", "hi")), r"chat.messages\[0\].role is 'wizard'"),
    "template refuses": (chat(("assistant", "hi")), "the user must speak last"),
    "prompt of the whole context": (request("x" * 100), "100 tokens; the context has 100"),
    "a 5 MB prompt": (request("x" * 5_000_000), "text has 5000000 characters"),
    "a 5 MB chat": (chat(("user", "x" * 5_000_000)), "chat has 5000000 characters"),
    "token outside the vocabulary": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 259])),
        "token_ids contains 259; the vocabulary has 259",
    ),
    "priority without the policy": (
        pb.GenerateRequest(text="a", priority=1),
        "priority is 1; this server does not run with --scheduling-policy priority",
    ),
    "long salt": (pb.GenerateRequest(text="a", cache_salt="t" * 257), "cache_salt has 257 characters"),
    "too many empty messages": (chat(*[("user", "")] * 4097), "chat.messages has 4097 entries; at most 4096"),
    "token ids past the context": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 1_000_000)),
        "token_ids has 1000000 tokens; the context has 100",
    ),
    "outputs that together exceed the pool": (
        request("x" * 50, n=8, max_tokens=49),
        "50 tokens, sampling.n is 8 and sampling.max_tokens 49; together they exceed the 400 tokens of cache",
    ),
    "no outputs": (request(n=0), r"sampling.n is 0; it must be in \[1, 8\]"),
    "a million outputs": (request(n=10**6), "sampling.n is 1000000; it must be at most 128"),
    "more messages than tokens": (chat(*[("user", "")] * 101), "chat.messages has 101 entries; at most 100"),
    "no tokens": (request(max_tokens=0), "max_tokens is 0; it must be at least 1"),
    "more tokens than the context": (request(max_tokens=96), "5 tokens and sampling.max_tokens is 96.*100"),
    "min over max": (request(min_tokens=5, max_tokens=4), "min_tokens is 5; it must be at most max_tokens"),
    "top_p of zero": (request(top_p=0), r"top_p is 0; it must be in \(0, 1\]"),
    "stop strings": (request(stop=["x"] * 10_000), "sampling.stop has 10000 entries; at most 16"),
    "empty stop string": (request(stop=["a", ""]), r"sampling.stop\[1\] has 0 characters"),
    "long stop string": (request(stop=["x" * 257]), r"sampling.stop\[0\] has 257 characters"),
    "stop tokens": (request(stop_token_ids=[1] * 65), "stop_token_ids has 65 entries"),
    "stop token outside": (request(stop_token_ids=[300]), "stop_token_ids contains 300"),
    "logprobs": (request(logprobs=21), r"logprobs is 21; it must be in \[0, 20\]"),
    "prompt logprobs": (request(prompt_logprobs=21), "prompt_logprobs is 21"),
    "bias outside": (request(logit_bias={300: 1.0}), "logit_bias contains 300"),
    "large bias": (request(logit_bias={1: 101.0}), r"logit_bias\[1\] is 101"),
    "allowed outside": (request(allowed_token_ids=[259]), "allowed_token_ids contains 259"),
    "allowed are bad words": (request(allowed_token_ids=[69], bad_words=["c"]), "allowed_token_ids, .* allow no token"),
    "allowed ends the prompt's bad word": (
        request("ab", allowed_token_ids=[69], bad_words=["abc"]),
        "allowed_token_ids, .* allow no token",
    ),
    "nothing but ends before min tokens": (
        request(allowed_token_ids=[2, 70], stop_token_ids=[70], min_tokens=1),
        "allowed_token_ids, .* allow no token",
    ),
    "bad words": (request(bad_words=["x"] * 65), "bad_words has 65 entries"),
    "best of fewer": (request(n=3, best_of=2), r"best_of is 2; it must be in \[3, "),
    "best of many": (request(best_of=100_000), "best_of is 100000; it must be"),
    "no beams": (request(beam_width=0), r"beam_width is 0; it must be in \[1, "),
    "many beams": (request(beam_width=100_000), "beam_width is 100000; it must be"),
    "more outputs than beams": (request(n=3, beam_width=2), r"beam_width is 2; it must be in \[3, "),
    "a penalty without beams": (request(length_penalty=1), "length_penalty is for beam search"),
    "early stopping without beams": (request(early_stopping=True), "early_stopping is for beam search"),
    "no number as penalty": (request(beam_width=2, length_penalty=math.nan), "length_penalty is nan"),
    "a temperature of no number": (
        request(temperature=math.nan),
        r"^sampling.temperature is nan; it must be in \[0, 100\]$",
    ),
    **{
        f"beams with {name}": (request(beam_width=2, **{name: value}), f"sampling.{name} cannot be combined with sampl")
        for name, value in OTHERS.items()
    },
    "beams with stop strings": (request(beam_width=2, stop=["a"]), "stop cannot be combined with sampling.beam_width"),
    "beams and best of": (request(beam_width=2, best_of=2), "best_of cannot be combined"),
}


async def check(message: pb.GenerateRequest, model: ServedModel) -> GenerationRequest:
    check_sizes(message)
    return await check_request(message, "id", model)


@pytest.mark.parametrize("message", [pb.GenerateRequest, pb.AbortRequest])
def test_long_names_are_refused(message: type[pb.GenerateRequest] | type[pb.AbortRequest]) -> None:
    check_names(message(request_id="x" * 128, tenant="t" * 256))
    with pytest.raises(RequestError, match="request_id has 129 characters; at most 128"):
        check_names(message(request_id="x" * 129))
    with pytest.raises(RequestError, match="tenant has 257 characters; at most 256"):
        check_names(message(tenant="t" * 257))


@pytest.mark.parametrize(("message", "reason"), INVALID.values(), ids=INVALID)
async def test_bad_input_is_refused_with_the_field_and_its_limit(
    message: pb.GenerateRequest, reason: str, byte_model: ServedModel
) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        await check(message, byte_model)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("name", "value"), BEYOND)
async def test_numbers_beyond_their_bounds_are_refused(name: str, value: float, byte_model: ServedModel) -> None:
    sentence = f"sampling.{name} is {value:g}; it must be {NUMBERS[name].bounds}"
    with pytest.raises(RequestError, match=f"^{re.escape(sentence)}$") as error:
        await check(request(**{name: value}), byte_model)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", NUMBERS)
async def test_the_bounds_of_a_number_are_allowed(name: str, byte_model: ServedModel) -> None:
    """A message has 32 bits, in which 0.01 is less than it is in 64."""
    low, high, excludes_low = NUMBERS[name].bounds
    for value in (high,) if excludes_low else (low, high):
        checked = await check(request(**{name: value}), byte_model)
        assert getattr(checked.sampling, name) == pytest.approx(value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_biases_that_are_no_number_are_refused(value: float, byte_model: ServedModel) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[1\] is"):
        await check(request(logit_bias={1: value}), byte_model)


async def test_a_long_name_of_an_adapter_is_refused(byte_model: ServedModel) -> None:
    with pytest.raises(RequestError, match=r"^lora_name has 257 characters; at most 256 are allowed"):
        await check(pb.GenerateRequest(text="a", lora_name="l" * 257), byte_model)


async def test_forms_are_refused_where_workers_follow_none(byte_model: ServedModel) -> None:
    model = replace(byte_model, has_forms=False)
    assert (await check(request(regex="a"), byte_model)).sampling.form
    assert not (await check(request(), model)).sampling.form
    with pytest.raises(RequestError, match=r"sampling.regex is not possible here: .* --forms"):
        await check(request(regex="a"), model)


async def test_what_is_not_set_is_the_models_own_generation_config(byte_model: ServedModel) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 7}
    model = replace(byte_model, defaults=defaults_of(config))
    sampling = (await check(request(), model)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.9, 40, 7)
    sampling = (await check(request(temperature=0, top_p=1, top_k=0, max_tokens=9), model)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 1.0, 0, 9)


async def test_lengths_of_the_generation_config_count_the_prompt_or_not_and_a_request_may_say_otherwise(
    byte_model: ServedModel,
) -> None:
    """As transformers has them: "hello" has 5 tokens, `length` counts them, and `new_tokens` does not."""

    async def lengths(config: dict[str, object], **sampling: object) -> tuple[int, int]:
        checked = await check(request(**sampling), replace(byte_model, defaults=defaults_of(config)))
        return checked.sampling.min_tokens, checked.sampling.max_tokens

    assert await lengths({"min_length": 9, "max_length": 12}) == (4, 7)
    assert await lengths({"min_length": 3, "max_length": 4096}) == (0, 95)
    assert await lengths({"min_new_tokens": 2, "min_length": 9, "max_new_tokens": 3, "max_length": 9}) == (2, 3)
    assert await lengths({"min_length": 9, "max_length": 12}, min_tokens=0, max_tokens=20) == (0, 20)
    assert await lengths({"min_new_tokens": 9}, max_tokens=2) == (2, 2)
    assert await lengths({"min_length": 9}, beam_width=2) == (4, 95)
    with pytest.raises(
        RequestError, match=r"the prompt has 5 tokens, .* to max_length 5 together; set sampling.max_tokens"
    ):
        await lengths({"max_length": 5})


async def test_bans_and_stops_of_the_generation_config_hold_unless_a_request_names_its_own(
    byte_model: ServedModel,
) -> None:
    model = replace(
        byte_model,
        defaults=defaults_of(
            {
                "eos_token_id": 2,
                "bad_words_ids": [[2], [5], [6, 7]],
                "sequence_bias": [[[8], -1.5], [[9], 2]],
                "stop_strings": "END",
                "suppress_tokens": [10, 11],
                "begin_suppress_tokens": [12],
            }
        ),
    )
    checked = await check(request(), model)
    banned = TranscriptParams(suppressed=(10, 11), begin_suppressed=(12,))
    assert (checked.sampling.bad_words, checked.sampling.transcript) == (((5,), (6, 7)), banned)
    assert (checked.sampling.logit_bias, checked.stop) == ({8: -1.5, 9: 2}, ("END",))
    own = await check(request(bad_words=["x"], logit_bias={3: 1}, stop=["."]), model)
    assert not {*map(tuple, own.sampling.bad_words)} & {(5,), (6, 7)}
    assert own.sampling.transcript == banned
    assert (own.sampling.logit_bias, own.stop) == ({3: 1}, (".",))
    with pytest.raises(RequestError, match="beam_width cannot be combined with suppress_tokens, which the model's gen"):
        await check(request(beam_width=2), model)
    for allowed in (10, 12, 5):
        with pytest.raises(RequestError, match="the tokens that the model's generation config bans together allow no"):
            await check(request(allowed_token_ids=[allowed]), model)


async def test_a_model_without_a_generation_config_is_greedy_and_fills_the_context(byte_model: ServedModel) -> None:
    checked = await check(request("hello"), byte_model)
    assert checked.sampling.temperature == 0.0
    assert checked.sampling.max_tokens == 95
    assert checked.sampling.eos_token_ids == {2}
    assert checked.skip_special_tokens
    assert checked.request_id == "id"


async def test_several_outputs_run_as_far_as_the_pool_allows_all_of_them(byte_model: ServedModel) -> None:
    """50 tokens of prompt fill 12 blocks of 4 that are shared; of the other 88 each of 8 outputs has 11.

    An output's last token is in none of them.
    """
    sampling = (await check(request("x" * 50, n=8), byte_model)).sampling
    assert sampling.max_tokens == 12 * 4 + 11 * 4 + 1 - 50


@pytest.mark.parametrize("kind", ["n", "beam_width"])
@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 48, 49])
async def test_several_outputs_are_promised_what_a_worker_of_that_pool_has_room_for_and_no_token_more(
    byte_model: ServedModel, kind: str, num_prompt_tokens: int
) -> None:
    model = replace(byte_model, context_length=1000)
    promised = (await check(request("x" * num_prompt_tokens, **{kind: 7}), model)).sampling
    blocks = BlockManager(model.block_size, model.pool_tokens // model.block_size)
    for more, fits in ((0, True), (1, False)):
        sampling = replace(promised, max_tokens=promised.max_tokens + more)
        group = SequenceGroup("id", [5] * num_prompt_tokens, sampling)
        assert blocks.never_fits(group) is not fits


async def test_beams_search_the_models_own_distribution_whatever_its_generation_config_says(
    byte_model: ServedModel,
) -> None:
    config = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.2}
    model = replace(byte_model, defaults=defaults_of(config))
    sampling = (await check(request(beam_width=4, n=2, length_penalty=0.5, max_tokens=5), model)).sampling
    assert sampling == RequestSampling(
        n=2, beam_width=4, length_penalty=0.5, max_tokens=5, eos_token_ids=frozenset({2}), seed=sampling.seed
    )


async def test_token_ids_of_any_number_are_taken_in_order_and_once_each(byte_model: ServedModel) -> None:
    model = replace(byte_model, vocabulary_size=70_000)
    allowed = [*range(69_999, 0, -3), *range(0, 70_000, 7)]
    checked = await check(request(allowed_token_ids=allowed), model)
    assert list(checked.sampling.allowed_token_ids) == sorted(set(allowed))
    prompt = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(40_000)))
    checked = await check(prompt, replace(model, context_length=50_000, pool_tokens=50_000))
    assert list(checked.prompt_token_ids) == list(range(40_000))


async def test_tokenize_and_detokenize_are_bounded(byte_model: ServedModel) -> None:
    model = replace(byte_model, context_length=200_000)
    assert len((await encode_prompt(pb.TokenizeRequest(text="x" * 150_000), model)).token_ids) == 150_000
    for num_characters in (200_001, 1_000_000):
        with pytest.raises(RequestError, match="text has more than 200000 tokens; at most 200000 are returned"):
            await encode_prompt(pb.TokenizeRequest(text="x" * num_characters), model)
    with pytest.raises(RequestError, match="text has more than 200000 tokens; the context has 200000"):
        await encode_prompt(pb.GenerateRequest(text="x" * 1_000_000), model)
    with pytest.raises(RequestError, match="chat has more than 200000 tokens"):
        await encode_prompt(chat(("user", "<|im_end|>" * 200_001)), model)
    with pytest.raises(RequestError, match="token_ids has 131073 entries; at most 131072"):
        await decode_tokens(pb.DetokenizeRequest(token_ids=[70] * 131_073), model)
    with pytest.raises(RequestError, match="token_ids has 4097 entries; at most 4096"):
        await decode_tokens(pb.DetokenizeRequest(token_ids=[70] * 4097, separately=True), model)
    assert len((await decode_tokens(pb.DetokenizeRequest(token_ids=[70] * 100_000), model)).text) == 100_000
    assert len((await decode_tokens(pb.DetokenizeRequest(token_ids=[70] * 4096, separately=True), model)).texts) == 4096


async def test_the_best_of_several_are_ranked_by_log_probabilities_that_the_client_does_not_see(
    byte_model: ServedModel,
) -> None:
    checked = await check(request(n=2, best_of=5), byte_model)
    assert (checked.sampling.n, checked.num_outputs, checked.sampling.logprobs) == (5, 2, 0)
    assert checked.hides_logprobs
    checked = await check(request(best_of=5, logprobs=3), byte_model)
    assert (checked.num_outputs, checked.sampling.logprobs, checked.hides_logprobs) == (1, 3, False)


async def test_ignore_eos_keeps_only_the_requests_own_stop_tokens(byte_model: ServedModel) -> None:
    sampling = (await check(request(ignore_eos=True, stop_token_ids=[7]), byte_model)).sampling
    assert (sampling.eos_token_ids, sampling.stop_token_ids) == (frozenset(), {7})


async def test_priorities_are_bounded_where_they_count(byte_model: ServedModel) -> None:
    model = replace(byte_model, has_priorities=True)
    assert (await check(pb.GenerateRequest(text="a", priority=-1000), model)).priority == -1000
    with pytest.raises(RequestError, match=r"priority is 1001; it must be in \[-1000, 1000\]"):
        await check(pb.GenerateRequest(text="a", priority=1001), model)


async def test_tokens_that_only_the_tokenizer_knows_are_refused(byte_model: ServedModel) -> None:
    smaller = replace(byte_model, vocabulary_size=60)
    for message in (request("~"), request("!", bad_words=["~"]), chat(("user", "~"))):
        with pytest.raises(RequestError, match="the vocabulary has 60 tokens"):
            await check(message, smaller)


async def test_requests_without_a_seed_get_different_ones(byte_model: ServedModel) -> None:
    seeds = {(await check(request(), byte_model)).sampling.seed for _ in range(10)}
    assert len(seeds) == 10
    assert (await check(request(seed=0), byte_model)).sampling.seed == 0
