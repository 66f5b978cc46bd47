"""Serves Score calls: how well documents answer a query, by a cross-encoder or by the vectors of query and document."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import mul, sub

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import PoolingParams, PoolingType
from scheduler_service.frontend.calls.embedding import read_pooling
from scheduler_service.frontend.calls.generation import Context
from scheduler_service.frontend.calls.text_calls import TextCall
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.checking.text_items import encode_texts, most_tokens
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import MAX_SCORED
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.text.tokenization import Text
from scheduler_service.wire.messages import floats

QUERY, DOCUMENT = "{query}", "{document}"


async def score(link: EngineLink, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
    async with TextCall(link, request, context) as call:
        if call.model.num_labels:
            scores = await _scores_of_pairs(call, request)
        elif call.model.embedding_size:
            scores = await _similarities(call, request)
        else:
            raise RequestError(grpc.StatusCode.UNIMPLEMENTED, "this model neither scores pairs nor makes vectors")
    best_first = sorted(range(len(scores)), key=lambda number: -scores[number])
    response = pb.ScoreResponse(usage=pb.Usage(prompt_tokens=call.num_tokens, cached_tokens=call.num_cached_tokens))
    for number in best_first[: request.top_n or None]:
        response.scores.add(index=number, score=scores[number])
    return response


# ---- cross-encoders


async def _scores_of_pairs(call: TextCall, request: pb.ScoreRequest) -> list[float]:
    model, scores = call.model, [0.0] * len(request.documents)
    if model.num_labels > MAX_SCORED:
        reason = f"this model has {model.num_labels} classes; a score needs one or two"
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, reason)

    async def take(number: int, state: RequestState) -> None:
        scores[number] = _score(floats(await _vector(state)), plain=model.scores_plainly)

    pooling = PoolingParams(type=PoolingType.SCORE, dimensions=model.num_labels)
    named = ((f"documents[{number}], with the query,", pair) for number, pair in enumerate(_pairs(request)))
    around = len(request.query) + len(request.pair_format)
    await call.run(encode_texts(named, model, request), pooling, take, _longest(request, around))
    return scores


def _longest(request: pb.ScoreRequest, num_characters: int) -> int:
    return most_tokens(max(map(len, request.documents)) + num_characters)


def _pairs(request: pb.ScoreRequest) -> Iterator[Text]:
    pattern, query = request.pair_format, request.query
    if not pattern:
        return ((query, document) for document in request.documents)
    if pattern.count(QUERY) != 1 or pattern.count(DOCUMENT) != 1:
        invalid(f"pair_format must have {QUERY} and {DOCUMENT} once each")
    before, _, after = pattern.partition(DOCUMENT)  # split first: the query may contain `{document}`
    before, after = before.replace(QUERY, query), after.replace(QUERY, query)
    return (f"{before}{document}{after}" for document in request.documents)


def _score(outputs: Sequence[float], *, plain: bool) -> float:
    """One class: the logistic function of the output or, with `plain`, the output. Two: the softmax of the second."""
    if plain and len(outputs) == 1:
        return outputs[0]
    margin = outputs[0] if len(outputs) == 1 else outputs[1] - outputs[0]
    return 0.5 * (1 + math.tanh(margin / 2))  # the logistic function, without overflow


# ---- vectors


_SIMILARITIES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "cosine": lambda query, document: sum(map(mul, query, document)),  # vectors have length 1
    "dot": lambda query, document: sum(map(mul, query, document)),
    "euclidean": lambda query, document: -math.dist(query, document),
    "manhattan": lambda query, document: -sum(map(abs, map(sub, query, document))),
}
"""Similarity of two vectors, by sentence-transformers' names. Distances are negated: similar texts have high scores."""


async def _similarities(call: TextCall, request: pb.ScoreRequest) -> list[float]:
    model, scores = call.model, [0.0] * len(request.documents)
    if request.pair_format:
        invalid("pair_format is for cross-encoders; this model makes a vector of each text")
    similar = _SIMILARITIES[model.similarity]
    pooling = read_pooling(pb.EmbedRequest(normalize=True if model.similarity == "cosine" else None), model)
    query: list[float] = []

    async def take(number: int, state: RequestState) -> None:
        vector = floats(await _vector(state))
        if number == 0:
            query.extend(vector)
        else:
            scores[number - 1] = similar(query, vector)

    named = [("query", request.query), *((f"documents[{n}]", text) for n, text in enumerate(request.documents))]
    longest = max(most_tokens(len(request.query)), _longest(request, 0))
    await call.run(encode_texts(named, model, request), pooling, take, longest)
    return scores


async def _vector(state: RequestState) -> bytes:
    return b"".join([delta.vectors async for delta in state.stream])
