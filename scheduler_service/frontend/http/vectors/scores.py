"""Scores of documents for a query: /v1/rerank in the format of Jina, Cohere and vLLM, and vLLM's /v1/score."""

import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.calls.together import run_together
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid, of_part
from scheduler_service.frontend.http.vectors.fields import RerankFields, ScoreFields, kept_tokens
from scheduler_service.frontend.model import ServedModel

MAX_PAIRS = 256
"""Pairs of a request. Each counts as a request against the key's quotas."""


async def rerank(call: Call) -> web.StreamResponse:
    fields = await call.fields(RerankFields)
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    model = await call.model()
    scored = await _scores(call, fields, model, fields.query, documents, fields.top_n or 0)
    results = [
        {"index": score.index, "relevance_score": score.score}
        | ({"document": {"text": documents[score.index]}} if fields.return_documents else {})
        for score in scored.scores
    ]
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": fields.model or model.name}
    return web.json_response(answer | {"usage": _usage(scored.usage.prompt_tokens), "results": results})


async def score(call: Call) -> web.StreamResponse:
    """Answer with the scores of a query's documents, or of pairs."""
    fields = await call.fields(ScoreFields)
    queries = fields.side(("queries", "text_1", "data_1"))
    documents = fields.side(("documents", "items", "text_2", "data_2"))
    if not queries or not documents:
        raise invalid("a score needs at least one query and one document", "documents" if queries else "queries")
    if len(queries) not in (1, len(documents)):
        raise invalid(f"there are {len(queries)} queries and {len(documents)} documents; pairs need as many", "queries")
    model = await call.model()
    if len(queries) == 1:
        scored = [await _scores(call, fields, model, queries[0], documents, 0)]
    else:
        scored = await _score_pairs(call, fields, model, queries, documents)
    values = [one.score for answer in scored for one in sorted(answer.scores, key=lambda one: one.index)]
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
    usage = _usage(sum(answer.usage.prompt_tokens for answer in scored)) | {"completion_tokens": 0}
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "data": data}
    return web.json_response(answer | {"model": fields.model or model.name, "usage": usage})


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def _score_pairs(
    call: Call, fields: ScoreFields, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
) -> list[pb.ScoreResponse]:
    """Score each pair in a call of its own. If a call is refused, the others end."""
    if len(queries) > MAX_PAIRS:
        raise invalid(f"there are {len(queries)} pairs; there may be {MAX_PAIRS}", "queries")

    async def scores(number: int) -> pb.ScoreResponse:
        try:
            return await _scores(call, fields, model, queries[number], [documents[number]], 0)
        except RequestError as error:
            raise of_part(f"pair {number}", error) from None

    return await run_together(map(scores, range(len(queries))))


async def _scores(
    call: Call, fields: RerankFields | ScoreFields, model: ServedModel, query: str, documents: Sequence[str], top_n: int
) -> pb.ScoreResponse:
    asked = pb.ScoreRequest(
        query=query,
        documents=documents,
        top_n=top_n,
        pair_format=fields.pair_format,
        truncate=fields.truncate,
        truncate_prompt_tokens=kept_tokens(fields.truncate_prompt_tokens, model),
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        lora_name=call.adapter(fields.model, model),
    )
    return await call.service.score(asked, call.metadata)
