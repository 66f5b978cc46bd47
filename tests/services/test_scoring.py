"""Scores are those of transformers: of a cross-encoder's classes, or cosines of vectors; the best come first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from embedding_helpers import SlowEncoder, encoder_settings, serving
from tiny_encoder import write_encoder, write_modules

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client

QUERY = "what?"
DOCUMENTS = ["this", "that one", "x" * 20, "no", "a longer one, perhaps", "that one"]
FORMAT = "Q: {query} A: {document}."


def slow_outputs(path: Path, *texts: Any) -> list[torch.Tensor]:
    """What the classifier makes of texts, or of pairs of texts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    network = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    found = []
    for text in texts:
        encoded = tokenizer(*text, return_tensors="pt", return_token_type_ids=network.config.model_type == "bert")
        with torch.inference_mode():
            found.append(network(**encoded).logits[0])
    return found


def ranked(scores: list[float]) -> list[tuple[int, float]]:
    return [(n, pytest.approx(scores[n], abs=1e-5)) for n in sorted(range(len(scores)), key=lambda n: -scores[n])]


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
async def test_a_cross_encoder_reads_pairs(family: str, num_labels: int, tmp_path: Path) -> None:
    """With types where it was trained with them. Equal documents stay in their order."""
    folder = write_encoder(tmp_path / "model", family, num_labels)
    outputs = slow_outputs(folder, *((QUERY, document) for document in DOCUMENTS))
    if num_labels == 1:
        expected = [torch.sigmoid(output[0]).item() for output in outputs]
    else:
        expected = [torch.softmax(output, 0)[1].item() for output in outputs]
    assert max(expected) - min(expected) > 0.01
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        model = await client.get_model()
        assert (list(model.tasks), model.embedding_size) == (["score"], 0)
        assert await client.score(QUERY, DOCUMENTS) == ranked(expected)
        assert await client.score(QUERY, DOCUMENTS, top_n=2) == ranked(expected)[:2]
        with pytest.raises(grpc.aio.AioRpcError, match="this model makes no vectors"):
            await client.embed(["a"])


async def test_a_cross_encoder_may_read_both_as_one_text(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", num_labels=2)
    texts = [(f"Q: {QUERY} A: {document}.",) for document in [*DOCUMENTS, "{query}"]]
    expected = [torch.softmax(output, 0)[1].item() for output in slow_outputs(folder, *texts)]
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        found = await client.score(QUERY, [*DOCUMENTS, "{query}"], pair_format=FORMAT)
        assert found == ranked(expected)
        for wrong in ("{query}", "{document}", "{query} {query} {document}"):
            with pytest.raises(grpc.aio.AioRpcError, match="pair_format must have"):
                await client.score(QUERY, DOCUMENTS, pair_format=wrong)


@pytest.mark.parametrize(
    "note", ["sentence_transformers", "sbert_ce_default_activation_function", "config_sentence_transformers.json"]
)
async def test_scores_are_as_the_classifier_has_them_where_its_configuration_says_so(note: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", num_labels=1)
    (plain,) = slow_outputs(folder, (QUERY, DOCUMENTS[0]))
    config = json.loads((folder / "config.json").read_text())
    identity = "torch.nn.modules.linear.Identity"
    if note.endswith(".json"):
        (folder / note).write_text(json.dumps({"activation_fn": identity}))
    else:
        config[note] = {"activation_fn": identity} if note == "sentence_transformers" else identity
    (folder / "config.json").write_text(json.dumps(config))
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        assert await client.score(QUERY, DOCUMENTS[:1]) == [(0, pytest.approx(plain.item(), abs=1e-5))]


@pytest.mark.parametrize("kind", ["encoder", "model that generates"])
async def test_without_a_classifier_scores_are_cosines(kind: str, tiny_model_directory: Path, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model") if kind == "encoder" else tiny_model_directory
    slow, pooling = SlowEncoder(folder), pb.POOLING_MEAN if kind == "encoder" else pb.POOLING_LAST
    query = slow.vectors(QUERY, pooling)[0]
    expected = [float(query @ slow.vectors(document, pooling)[0]) for document in DOCUMENTS]
    settings = encoder_settings() if kind == "encoder" else {}
    async with serving(folder, **settings) as (one, _), Client(one.target) as client:
        assert await client.score(QUERY, DOCUMENTS) == ranked(expected)
        with pytest.raises(grpc.aio.AioRpcError, match="pair_format is for cross-encoders"):
            await client.score(QUERY, DOCUMENTS, pair_format=FORMAT)


@pytest.mark.parametrize(
    ("similarity", "computed"),
    [
        ("dot", torch.dot),
        ("euclidean", lambda query, document: -torch.dist(query, document)),
        ("manhattan", lambda query, document: -torch.dist(query, document, p=1)),
    ],
)
async def test_scores_of_vectors_are_by_the_similarity_that_the_model_was_trained_for(
    similarity: str, computed: Callable[[Any, Any], Any], tmp_path: Path
) -> None:
    folder = write_modules(write_encoder(tmp_path / "model"), "mean_tokens")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": similarity}))
    slow = SlowEncoder(folder)
    query, *documents = (slow.vectors(text, pb.POOLING_MEAN, normalize=False)[0] for text in (QUERY, *DOCUMENTS))
    expected = [float(computed(query, document)) for document in documents]
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        found = await client.score(QUERY, DOCUMENTS)
    best_first = sorted(range(len(expected)), key=lambda n: -expected[n])
    assert found == [(n, pytest.approx(expected[n], rel=1e-4)) for n in best_first]


async def test_long_documents_are_refused_or_cut_and_the_query_is_whole(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", num_labels=1)  # of 66 tokens, 3 of them around a pair
    whole = slow_outputs(folder, (QUERY, "a" * (63 - len(QUERY))))[0]
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        for length in (64, 10_000):
            with pytest.raises(grpc.aio.AioRpcError, match=r"documents\[1\], with the query, has more tokens than"):
                await client.score(QUERY, ["a", "a" * length])
            ((_, score),) = await client.score(QUERY, ["a" * length], truncate=True)
            assert score == pytest.approx(torch.sigmoid(whole[0]).item(), abs=1e-5)
        for query in ("q" * 63, "q" * 10_000):
            with pytest.raises(grpc.aio.AioRpcError, match="the query alone is too long, and is not cut: shorten it"):
                await client.score(query, ["a"], truncate=True)


async def test_what_cannot_be_scored_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", num_labels=3)
    async with serving(folder, **encoder_settings()) as (one, _), Client(one.target) as client:
        assert not (await client.get_model()).tasks
        with pytest.raises(grpc.aio.AioRpcError, match="has 3 classes") as error:
            await client.score(QUERY, DOCUMENTS)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="documents is empty"):
            await client.score(QUERY, [])
        with pytest.raises(grpc.aio.AioRpcError, match="documents has 2049 entries"):
            await client.score(QUERY, ["a"] * 2049)
