"""Images in a worker's steps: chunks, batches, preemption, the prefix cache, failures."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapted_worker import load
from image_worker import BLOCK, BLOCKS, Asked, ImageWorker
from slow_heads import write_head
from tiny_image_models import VOCABULARY, ImageOracle, Picture, Prompt, expand, make_model, picture

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_client import PromptEmbeds
from pagewire_common.calls.errors import RequestError
from worker_service.loading.adapter import AdapterError
from worker_service.models.images import pixels

SMALL, WIDE = picture(40, 60), picture(90, 33)
ONE: Prompt = [5, 9, SMALL, 14, 4, 77]
TWO: Prompt = [5, 9, WIDE, 6, SMALL, 7, 11]
LAST: Prompt = [13, WIDE]
COUNT = 4


class Case:
    """A worker, and the oracle's tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.oracle, self.worker = ImageOracle(path), ImageWorker(path)
        self.one, self.two, self.last = (self.oracle.greedy(prompt, COUNT)[0] for prompt in (ONE, TWO, LAST))


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Tiles; positions in three axes with hidden states that are added later; attention in both directions."""
    return Case(make_model(tmp_path_factory.mktemp("images"), request.param))


@pytest.fixture
def worker(case: Case) -> ImageWorker:
    case.worker.begin()
    return case.worker


def decode(worker: ImageWorker, asked: Asked, first: int) -> list[int]:
    """Tokens of one sequence, whose first token was sampled."""
    found, known = [first], len(asked.message.token_ids)
    while len(found) < COUNT:
        stop = known + len(found)
        found += worker.step((), [(asked, stop - 1, stop, True)]).token_ids
    return found


def test_log_probabilities_are_those_of_transformers(case: Case, worker: ImageWorker) -> None:
    size = worker.worker.limits.vocabulary_size
    asked = worker.ask(0, TWO, prompt_logprobs=size)
    token_ids, pictures = expand(TWO, worker.layouts)
    expected = case.oracle.logprobs(token_ids, [one for _, one in pictures])
    rows: list[list[float]] = []
    stop = 0
    while (start := stop) < len(token_ids):
        stop = worker.end(asked, min(start + 9, len(token_ids)))
        answer = worker.step([asked] if not start else [], [(asked, start, stop, False)])
        for report in answer.prompt_logprobs:
            for begin in range(0, len(report.token_ids), report.width):
                entries = slice(begin + 1, begin + 1 + size)
                by_id = sorted(zip(report.token_ids[entries], report.logprobs[entries], strict=True))
                rows.append([logprob for _, logprob in by_id])
    assert len(rows) == len(token_ids) - 1
    assert (torch.tensor(rows) - expected[:-1]).abs().max() < 1e-4


def test_tokens_before_a_chunk_are_not_encoded_again(case: Case, worker: ImageWorker) -> None:
    """A later prompt finds the first blocks in the cache: the first image is behind them, the second is not."""
    first = worker.ask(0, TWO)
    assert worker.generate([first], COUNT)[0] == case.two
    behind = next(item.start for item in first.message.items if item.digest != first.message.items[0].digest)
    computed = behind // BLOCK * BLOCK
    later = worker.ask(1, TWO, num_computed=computed, first_block=0)
    worker.encoded.clear()
    dropped = [pb.EncoderItem(digest=item.digest, part=item.image.part) for item in first.message.items]
    length = len(later.message.token_ids)
    answer = worker.step([later], [(later, computed, length, True)], dropped_embeddings=dropped, finished=[0])
    assert {digest for digest, _ in worker.encoded} <= {item.digest for item in first.message.items}
    assert decode(worker, later, answer.token_ids[0]) == case.two


def test_a_preempted_sequence_is_recomputed_with_images_that_are_held_or_encoded_again(
    case: Case, worker: ImageWorker
) -> None:
    asked = worker.ask(0, TWO)
    length = len(asked.message.token_ids)
    worker.step([asked], [(asked, 0, length - 3, False)])
    half = len(asked.message.items) // 2
    again = worker.ask(0, TWO, first_block=2 * BLOCKS)
    dropped = list(asked.message.items)[:half]
    for item in dropped:
        worker.encoded.discard((item.digest, item.image.part))
    names = [pb.EncoderItem(digest=item.digest, part=item.image.part) for item in dropped]
    answer = worker.step([again], [(again, 0, length, True)], preempted=[0], dropped_embeddings=names)
    assert decode(worker, again, answer.token_ids[0]) == case.two


def test_a_chunk_may_begin_but_not_end_inside_an_image_whose_tokens_attend_both_ways(
    case: Case, worker: ImageWorker
) -> None:
    """It begins inside an image of which the first blocks are cached."""
    if not worker.layouts.attends_both_ways:
        pytest.skip("its chunks may end anywhere")
    first = worker.ask(0, TWO)
    assert worker.generate([first], COUNT)[0] == case.two
    item = first.message.items[1]
    computed = (item.start + item.num_embeddings) // BLOCK * BLOCK
    assert computed > item.start
    later = worker.ask(1, TWO, num_computed=computed, first_block=0)
    answer = worker.step([later], [(later, computed, len(later.message.token_ids), True)], finished=[0])
    assert decode(worker, later, answer.token_ids[0]) == case.two
    cut = worker.ask(2, ONE)
    with pytest.raises(RequestError, match=r"computes tokens \d+ to \d+ of an image that ends with token"):
        worker.step([cut], [(cut, 0, cut.message.items[0].start + 3, False)])


def test_an_image_that_cannot_be_read_fails_and_others_live_on(case: Case, worker: ImageWorker) -> None:
    broken = worker.ask(0, [5, SMALL._replace(data=SMALL.data[:-40]), 6, 7])
    good = worker.ask(1, ONE)
    lengths = [len(one.message.token_ids) for one in (broken, good)]
    answer = worker.step([broken, good], [(broken, 0, lengths[0], True), (good, 0, lengths[1], True)])
    failed = {(item.digest, item.part) for item in answer.failed_items}
    assert failed == {(item.digest, item.image.part) for item in broken.message.items}
    assert answer.failed_sequence_ids == [0]
    assert answer.timing.encode_us > 0
    assert decode(worker, good, answer.token_ids[1]) == case.one


def test_a_file_of_another_size_than_its_tokens_fails_before_it_is_decoded(
    worker: ImageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(pixels, "decode_image", decoded.append)
    wrong = worker.ask(0, [5, Picture(SMALL.data, WIDE.width, WIDE.height), 6])
    length = len(wrong.message.token_ids)
    answer = worker.step([wrong], [(wrong, 0, length, True)])
    assert len(answer.failed_items) == len(wrong.message.items)
    assert not decoded


def test_an_image_is_read_and_encoded_once_for_all_sequences_that_hold_it(case: Case, worker: ImageWorker) -> None:
    tower = worker.worker.runner.images._tower  # type: ignore[union-attr]
    encoded, encode = [], tower.encode
    tower.encode = lambda pixels: encoded.append(pixels) or encode(pixels)  # type: ignore[func-returns-value, method-assign]
    try:
        asked = [worker.ask(number, ONE) for number in range(3)]
        assert worker.generate(asked, COUNT, 11) == dict.fromkeys(range(3), case.one)
    finally:
        tower.encode = encode  # type: ignore[method-assign]
    assert len(encoded) == len(asked[0].message.items)


def test_a_step_that_reads_an_image_without_encoding_it_ends_the_session(worker: ImageWorker) -> None:
    asked = worker.ask(0, ONE)
    with pytest.raises(RequestError, match="whose image is not encoded"):
        worker.step([asked], [(asked, 0, len(asked.message.token_ids), True)], items_to_encode=[])


def test_a_prompt_may_contain_images_and_embeddings(case: Case, worker: ImageWorker) -> None:
    asked = worker.ask(0, ONE)
    given = PromptEmbeds.of(case.oracle.embed([5, 9]))
    asked.message.items.insert(0, pb.PromptItem(digest=b"e", num_embeddings=2, data=given.data))
    asked.message.token_ids[:2] = [0, 0]
    assert worker.generate([asked], COUNT, 7)[0] == case.one


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_leave_the_tokens_as_they_are(case: Case, method: str, tmp_path: Path) -> None:
    speculation = {"method": method}
    if method == "draft_model":
        speculation["model"] = str(case.path)
    if method == "eagle3":
        states = {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}
        speculation["model"] = str(write_head(tmp_path / "head", hidden=32, vocabulary=VOCABULARY, **states))
    worker = ImageWorker(case.path, speculative_config=json.dumps(speculation))
    asked, room = worker.ask(0, TWO), 3
    known, found = len(asked.message.token_ids), list[int]()
    start, stop, drafts = 0, known, [0]
    while len(found) < COUNT:
        answer = worker.step([] if found else [asked], [(asked, start, stop, True)], num_draft_tokens=drafts)
        found += answer.token_ids
        start = known + len(found) - 1
        stop, drafts = start + 1 + room, [room]
    assert found[:COUNT] == case.two


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13, 4096])
def test_tokens_are_the_same_in_chunks_of_every_size(case: Case, worker: ImageWorker, chunk: int) -> None:
    """The last token of the second prompt is within an image."""
    asked = [worker.ask(0, TWO), worker.ask(1, LAST), worker.ask(2, ONE)]
    assert worker.generate(asked, COUNT, chunk) == {0: case.two, 1: case.last, 2: case.one}


def save_adapter(path: Path, model: Any, targets: str, **config: Any) -> Any:
    """PEFT's model with a random adapter, which is written to a folder as PEFT saves it."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **config))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(path)
    return adapted


# peft asks transformers for something by an older name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_of_the_whole_network_change_its_decoder_and_those_of_its_tower_are_refused(
    case: Case, tmp_path: Path
) -> None:
    oracle, worker = ImageOracle(case.path), ImageWorker(case.path, max_loras=1)
    decoder = "text_model" if oracle.layouts.family == "smolvlm" else "language_model"
    alphas = {f"{decoder}.layers.1.mlp.down_proj": 3}
    targets = rf".*{decoder}\.layers.*(q_proj|down_proj)"
    oracle._model = save_adapter(tmp_path / "decoder", oracle._model, targets, alpha_pattern=alphas)
    adapters = worker.worker.runner.adapters
    adapters.fingerprints.append(load(adapters, tmp_path / "decoder", tmp_path / "received"))
    asked = worker.ask(0, TWO)
    asked.message.adapter_id = "decoder"
    expected = oracle.greedy(TWO, COUNT)[0]
    assert expected != case.two
    assert worker.generate([asked, worker.ask(1, TWO)], COUNT, 11) == {0: expected, 1: case.two}
    save_adapter(tmp_path / "tower", ImageOracle(case.path)._model, r".*(vision_(model|tower).*q_proj|visual.*qkv)")
    with pytest.raises(AdapterError, match=r"this model has no adapters for 'model\.vis"):
        load(adapters, tmp_path / "tower", tmp_path / "received too")
