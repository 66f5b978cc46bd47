"""`pagewire_client serve`: runs the gateway and the proxies around it until a signal arrives."""

import argparse
import asyncio
import sys
from pathlib import Path

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.client import Client
from pagewire_client.http.edge import Edge
from pagewire_client.http.gateway import Gateway, check_free, free_address, url_of
from pagewire_client.http.limits import Limits
from pagewire_client.local import ServerError
from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.serving.open_files import raise_open_files_limit
from pagewire_common.start_error import StartError
from pagewire_common.telemetry.logs import configure_logging

READY_SECONDS = 600.0
SOUND_BODY_BYTES = 17 << 20
MIN_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 12
"""Bytes of an HTTP body for each token of context. The scheduler allows a gRPC request the same number of bytes for
each token.
"""

TRY_IT = """\
OpenAI's API is at {url}/v1; Ctrl-C ends it. Try:

{try_it}

"""
CHAT = """\
curl {url}/v1/chat/completions -H 'content-type: application/json' {key}\\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'"""
TRANSCRIBE = "curl {url}/v1/audio/transcriptions {key}-F model={model} -F file=@speech.wav"
EMBED = """\
curl {url}/v1/embeddings -H 'content-type: application/json' {key}\\
  -d '{{"model": "{model}", "input": ["What is the capital of France?", "Paris"]}}'"""
SCORE = """\
curl {url}/v1/rerank -H 'content-type: application/json' {key}\\
  -d '{{"model": "{model}", "query": "What is the capital of France?", "documents": ["Rome", "Paris"]}}'"""
EXAMPLES = {"transcribe": TRANSCRIBE, "generate": CHAT, "embed": EMBED, "score": SCORE}
"""An example request for each task of a model. At the start, the example of the first task that the model supports is
shown.
"""
KEY_LINE = '-H "authorization: Bearer $PAGEWIRE_CLIENT_API_KEY" '


async def serve(arguments: argparse.Namespace, target: str, *, api_key: str = "", tls: Path | None = None) -> None:
    """Serve `arguments.listen` for the scheduler at `target`. Raises ServerError when the gateway ends."""
    if arguments.http_mutual_tls and not arguments.http_tls:
        raise ServerError("--http-mutual-tls needs --http-tls, whose ca.crt clients' certificates are checked with")
    # tracebacks contain no local variables, because variables may contain keys and prompts
    configure_logging("info", "auto")
    raise_open_files_limit()
    model = await _served_model(target, api_key, tls)
    host, port = check_free(arguments.listen)
    most_bytes = max(MIN_BODY_BYTES, model.context_length * BODY_BYTES_PER_TOKEN)
    limits = Limits(
        most_bytes,
        max(most_bytes, SOUND_BODY_BYTES if "transcribe" in model.tasks else 0),
        arguments.max_connections,
        arguments.receive_timeout,
    )
    try:
        edge = Edge(target, model.name, limits, api_key=api_key, tls=tls)
    except StartError as error:
        raise ServerError(str(error)) from None
    await edge.start()
    try:
        http_tls = TlsFolder(arguments.http_tls) if arguments.http_tls else None
        security = Security(http_tls, arguments.http_mutual_tls)
        with Gateway(edge.target, free_address(), arguments.otlp_traces_endpoint) as gateway:
            await asyncio.to_thread(gateway.wait_until_ready, READY_SECONDS)
            await edge.serve_http(host, port, gateway.url, security)
            url = url_of("https" if http_tls else "http", "localhost" if http_tls else host, port)
            sys.stderr.write(_try_it(url, model, KEY_LINE if api_key or tls else ""))
            status = await asyncio.to_thread(gateway.process.wait)
    except (StartError, OSError) as error:
        raise ServerError(str(error)) from None
    finally:
        await edge.close()
    raise ServerError(f"the gateway ended with status {status}")


async def _served_model(target: str, api_key: str, tls: Path | None) -> pb.GetModelResponse:
    """Wait for the model's description, because the gateway requests the description only at its start."""
    async with Client(target, api_key=api_key, tls=tls) as client:
        await client.wait_until_serving()
        return await client.get_model()


def _try_it(url: str, model: pb.GetModelResponse, key: str) -> str:
    example = next((EXAMPLES[task] for task in EXAMPLES if task in model.tasks), CHAT)
    return TRY_IT.format(url=url, try_it=example.format(url=url, model=model.name, key=key))
