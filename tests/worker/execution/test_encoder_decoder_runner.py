"""Encoders beside decoders: tokens are those of transformers, to the last, whatever else is in the steps."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_worker import DEVICE, SteppedWorker, make_nan
from tiny_encoder_decoder import FAMILIES as FAMILY_SIZES
from tiny_encoder_decoder import SPEECH, START, SlowEncoderDecoder, write_encoder_decoder
from worker_helpers import tokens

from worker_service.errors import InvalidStepError
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.steps.encoder_decoder_runner import EncoderDecoderRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import build_encoder_decoder, read_config
from worker_service.session.step import BlockMapping, BlockTableUpdate, Fork, Limits, NewSequence, SamplingParams

FAMILIES = ["t5", "bart"]
LIMITS = Limits(
    block_size=4,
    num_device_blocks=96,
    num_host_blocks=16,
    vocabulary_size=261,
    max_model_len=96,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    max_encoder_len=96,
    max_num_encoder_tokens=256,
)
INPUTS = [[1, *((7 * n * n + 3 * n + number) % 250 + 5 for n in range(length)), 2] for number, length in
          enumerate([1, 30, 7, 94])]  # fmt: skip
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_decoder(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def slow(checkpoint: Path) -> SlowEncoderDecoder:
    return SlowEncoderDecoder(checkpoint)


@pytest.fixture
def worker(checkpoint: Path) -> SteppedWorker:
    return stepped(checkpoint, torch.float32)


def stepped(checkpoint: Path, cache_dtype: torch.dtype) -> SteppedWorker:
    """Over a pool that is NaN wherever nothing was stored."""
    files = Checkpoint(checkpoint)
    config: Any = read_config(files.config)
    config = config.untied(files.own(config.tied))
    model = build_encoder_decoder(config, torch.float32, DEVICE)
    files.load_into(model.checkpoint_tensors())
    files.check_none_left({*model.checkpoint_tensors(), *config.tied}, config.ignored_tensors)
    model.pack()
    shape = CacheShape(config.num_layers, LIMITS.block_size, config.num_kv_heads, config.head_dim, cache_dtype)
    engine = CacheEngine(shape, LIMITS.num_device_blocks, LIMITS.num_host_blocks, DEVICE)
    make_nan(engine.device_blocks)
    make_nan(engine.host_blocks)
    return SteppedWorker(EncoderDecoderRunner(model, engine), LIMITS)


def encoder_of(number: int, first_block: int = 0, *, num_computed_tokens: int = 0) -> NewSequence:
    """What the encoder reads of the input of this number, in blocks from there on."""
    token_ids = INPUTS[number]
    blocks = range(first_block, first_block + -(-len(token_ids) // LIMITS.block_size))
    table, params = tokens(blocks), SamplingParams()
    given = (tokens(token_ids), len(token_ids), num_computed_tokens, table, params)
    return NewSequence(100 + number, *given, is_encoder=True)


def decoder_of(number: int, first_block: int, prompt: tuple[int, ...] = (START,), **sampling: Any) -> NewSequence:
    blocks = tokens(range(first_block, first_block + 10))
    params = SamplingParams(**sampling)
    return NewSequence(number, tokens(prompt), len(prompt), 0, blocks, params, encoder_id=100 + number)


@pytest.mark.parametrize(
    ("family", "ties", "has_head"),
    [("t5", True, True), ("t5", False, True), ("t5", False, False), ("bart", True, True)],
)
def test_a_head_is_the_one_that_is_there(family: str, ties: bool, has_head: bool, tmp_path: Path) -> None:
    """T5 scales states by what its config says of tying, and ties its head if there is none."""
    path = write_encoder_decoder(tmp_path / "model", family)
    config = json.loads((path / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)  # a key of newer files, beside tie_word_embeddings
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": ties}))
    if has_head:
        tensors = load_file(path / "model.safetensors")
        head = torch.randn((config["vocab_size"], config["d_model"]), generator=torch.manual_seed(3))
        save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors")
    worker = stepped(path, torch.float32)
    new = (encoder_of(0, 0), decoder_of(0, 1, temperature=4.0, seed=7))
    found = [*worker.step((100, len(INPUTS[0]), False), (0, 1, True), new_sequences=new).token_ids]
    found += worker.generate(0, 9)
    assert len(set(found)) > 2
    assert SlowEncoderDecoder(path).drawn(INPUTS[0], found, 0, 7, 4.0) == found


def test_greedy_tokens_of_a_batch_of_mixed_lengths_are_those_of_transformers(
    worker: SteppedWorker, slow: SlowEncoderDecoder
) -> None:
    """Two inputs come first, two more join while the others decode, one of these with a prompt of its own."""
    prompt = (START, 17, 99, 42, 8)
    outputs: list[list[int]] = [[], [], [], []]

    def gain(numbers: list[int], answer: Any) -> None:
        for number, token_id in zip(numbers, answer.token_ids, strict=True):
            outputs[number].append(token_id)

    new = [encoder_of(0, 0), decoder_of(0, 1), encoder_of(1, 11), decoder_of(1, 19)]
    lengths = [len(token_ids) for token_ids in INPUTS]
    first = [(100, lengths[0], False), (0, 1, True), (101, lengths[1], False), (1, 1, True)]
    gain([0, 1], worker.step(*first, new_sequences=tuple(new)))
    for _ in range(3):
        gain([0, 1], worker.step((0, 1, True), (1, 1, True)))
    new = [encoder_of(2, 29), decoder_of(2, 32, prompt), encoder_of(3, 42), decoder_of(3, 66)]
    steps = [(0, 1, True), (102, lengths[2], False), (2, len(prompt), True), (1, 1, True)]
    gain([0, 2, 1, 3], worker.step(*steps, (103, lengths[3], False), (3, 1, True), new_sequences=tuple(new)))
    for _ in range(NUM_TOKENS):
        gain([3, 2, 1, 0], worker.step((3, 1, True), (2, 1, True), (1, 1, True), (0, 1, True)))

    for number, found in enumerate(outputs):
        (expected,) = slow.outputs(INPUTS[number], NUM_TOKENS, prompt if number == 2 else (START,))
        assert found[: len(expected)] == expected


def test_a_prompt_in_chunks_and_swapped_out_between_them_goes_on_as_if_whole(
    worker: SteppedWorker, slow: SlowEncoderDecoder
) -> None:
    """And so do its fork, and a sequence that finds what its encoder has read computed."""
    prompt = (START, 17, 99, 42, 8, 55, 54)
    new = (encoder_of(1, 0), decoder_of(1, 8, prompt))
    worker.step((101, len(INPUTS[1]), False), (1, 5, False), new_sequences=new)
    held = (*range(8), 8, 9)
    worker.step(blocks_to_swap_out=BlockMapping(held, tuple(range(len(held)))))
    worker.runner.cache_engine.device_blocks[list(held)] = float("nan")
    outputs = [worker.step((1, 2, True), blocks_to_swap_in=BlockMapping(tuple(range(len(held))), held)).token_ids[0]]
    fork = Fork(1, 5, len(prompt), len(prompt), tokens([8, 20, 21, 22, 23, 24, 25, 26]), 1, array("q", outputs))
    copy = BlockMapping((9,), (20,))
    second = NewSequence(6, tokens(prompt), 7, 0, tokens(range(30, 40)), SamplingParams(), encoder_id=101)
    answer = worker.step(
        (1, 1, True), (5, 1, True), (6, 7, True), forks=(fork,), new_sequences=(second,), blocks_to_copy=copy
    )
    one, forked, again = answer.token_ids
    outputs.append(one)
    assert forked == one
    assert again == outputs[0]
    outputs += [worker.step((1, 1, True)).token_ids[0] for _ in range(NUM_TOKENS)]
    (expected,) = slow.outputs(INPUTS[1], NUM_TOKENS, prompt)
    assert outputs[: len(expected)] == expected


def test_what_an_encoder_makes_of_an_input_is_the_same_to_the_bit_whatever_is_beside_it(worker: SteppedWorker) -> None:
    pool = worker.runner.cache_engine.device_blocks
    worker.step((101, len(INPUTS[1]), False), new_sequences=(encoder_of(1, 0),))
    alone = pool[:8].clone()
    new = (encoder_of(3, 40), NewSequence(7, *_parts(encoder_of(1, 20)), is_encoder=True))
    worker.step((103, len(INPUTS[3]), False), (7, len(INPUTS[1]), False), new_sequences=new)
    assert torch.equal(torch.nan_to_num(pool[20:28]), torch.nan_to_num(alone))


def _parts(new: NewSequence) -> tuple[Any, ...]:
    return new.token_ids, new.num_prompt_tokens, new.num_computed_tokens, new.block_ids, new.sampling


def test_tokens_do_not_read_behind_a_table_that_has_become_too_short(worker: SteppedWorker) -> None:
    new = (encoder_of(1, 0), decoder_of(1, 50))
    worker.step((101, len(INPUTS[1]), False), (1, 1, True), new_sequences=new)
    shorter = BlockTableUpdate(101, 3, tokens([]))
    with pytest.raises(InvalidStepError, match="attends to sequence 101, which is not computed"):
        worker.step((1, 1, True), block_table_updates=(shorter,))


def test_encoders_read_no_more_in_a_step_than_there_is_room_for(worker: SteppedWorker) -> None:
    new = [NewSequence(number, *_parts(encoder_of(3, 24 * number)), is_encoder=True) for number in range(3)]
    with pytest.raises(InvalidStepError, match="288 tokens of encoder inputs; the limit is 256"):
        worker.step(*((number, len(INPUTS[3]), False) for number in range(3)), new_sequences=tuple(new))


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("t5", {"relative_attention_max_distance": 0}, "relative_attention_max_distance 0"),
        ("t5", {"relative_attention_max_distance": 10**9}, "relative_attention_max_distance 1000000000"),
        ("t5", {"relative_attention_num_buckets": 2}, "relative_attention_num_buckets is 2"),
        ("t5", {"n_positions": 10**12}, "n_positions is 1000000000000; it must be a whole number from 1 to"),
        (
            "whisper",
            {"max_source_positions": 100},
            "max_source_positions is 100; it must be the tokens of 30 s of sound, 1500",
        ),
    ],
)
def test_configurations_that_make_no_sense_are_refused_in_a_sentence(
    family: str, config: dict[str, Any], words: str
) -> None:
    sizes = SPEECH if family == "whisper" else FAMILY_SIZES[family]
    with pytest.raises(ValueError, match=re.escape(words)):
        read_config({"model_type": family, **sizes, **config})


@pytest.mark.parametrize(
    ("scheduled", "new", "words"),
    [
        ([(101, 5, False)], [encoder_of(1)], "not computed whole"),
        ([(101, len(INPUTS[1]), True)], [encoder_of(1)], "not computed whole"),
        ([(1, 1, True)], [encoder_of(1), decoder_of(1, 50)], "attends to sequence 101, which is not computed"),
        ([(1, 1, True)], [decoder_of(1, 50)], "sequence 101 is not known"),
    ],
    ids=["a part", "sampled after", "not computed", "without one"],
)
def test_steps_in_which_tokens_would_read_what_no_encoder_wrote_are_refused(
    worker: SteppedWorker, scheduled: Any, new: Any, words: str
) -> None:
    with pytest.raises(InvalidStepError, match=words):
        worker.step(*scheduled, new_sequences=tuple(new))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels of GPUs have no cache in 8 bits")
def test_with_a_cache_in_8_bits_tokens_are_the_same_alone_and_beside_others(checkpoint: Path) -> None:
    lengths = [len(token_ids) for token_ids in INPUTS]
    alone = []
    for number in (0, 1):
        worker = stepped(checkpoint, torch.int8)
        new = (encoder_of(number, 0), decoder_of(number, 20, temperature=1.0, seed=number))
        found = [worker.step((100 + number, lengths[number], False), (number, 1, True), new_sequences=new).token_ids[0]]
        alone.append(found + [worker.step((number, 1, True)).token_ids[0] for _ in range(NUM_TOKENS)])
    worker = stepped(checkpoint, torch.int8)
    worker.step((100, lengths[0], False), new_sequences=(encoder_of(0, 0),))
    drawn = [decoder_of(number, block, temperature=1.0, seed=number) for number, block in ((0, 1), (1, 19))]
    new = (drawn[0], encoder_of(1, 11), drawn[1])
    steps = [worker.step((0, 1, True), (101, lengths[1], False), (1, 1, True), new_sequences=new).token_ids]
    steps += (worker.step((0, 1, True), (1, 1, True)).token_ids for _ in range(NUM_TOKENS))
    assert [list(found) for found in zip(*steps, strict=True)] == alone
    assert len(set(alone[0])) > 1
