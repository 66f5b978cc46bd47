"""SageMaker's route /invocations, which has one address for all models: the body's fields tell which route is meant."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.chat import chat
from scheduler_service.frontend.http.openai.completions import complete
from scheduler_service.frontend.http.vectors.embeddings import embeddings
from scheduler_service.frontend.http.vectors.scores import rerank, score

_ROUTES: dict[str, Callable[[Call], Awaitable[web.StreamResponse]]] = {
    "messages": chat,
    "prompt": complete,
    "input": embeddings,
    "query": rerank,
    "queries": score,
    "text_1": score,
}
"""The field that tells the route."""


async def invoke(call: Call) -> web.StreamResponse:
    names = await call.field_names()
    for name, route in _ROUTES.items():
        if name in names:
            return await route(call)
    raise invalid(f"set one of {', '.join(_ROUTES)}")
