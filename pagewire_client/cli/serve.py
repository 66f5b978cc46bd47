"""`pagewire serve`: a scheduler and a worker on this machine, with HTTP, until a signal arrives."""

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.running import DEFAULT_TARGET
from pagewire_client.cli.serve_options import DEFAULT_ADMIN_LISTEN
from pagewire_client.client import Client
from pagewire_client.local import LocalServer
from pagewire_common.connection.address import split_address

TRY_IT = """\
A page to try is at {url}; OpenAI's API at {url}/v1; gRPC at {target}; Ctrl-C ends both. Try:

{try_it}
{chat}
"""
CHAT = """\
curl {url}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'"""
TRANSCRIBE = "curl {url}/v1/audio/transcriptions -F model={model} -F file=@speech.wav"
EMBED = """\
curl {url}/v1/embeddings -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "input": ["What is the capital of France?", "Paris"]}}'"""
SCORE = """\
curl {url}/v1/rerank -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "query": "What is the capital of France?", "documents": ["Rome", "Paris"]}}'"""
EXAMPLES = {"transcribe": TRANSCRIBE, "generate": CHAT, "embed": EMBED, "score": SCORE}
"""An example request for each task of a model. The example of the model's first task is shown."""
REACHED = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # the address is only compared


def serve(arguments: argparse.Namespace) -> None:
    """Serve HTTP at `arguments.listen` until interrupted. Raises ServerError if a service does not start or ends."""
    sys.stderr.write("starting a scheduler and a worker …\n")
    addresses = [
        *("--http-listen", arguments.listen),
        *("--listen", arguments.grpc_listen or _free(DEFAULT_TARGET)),
        *("--admin-listen", arguments.admin_listen or _free(DEFAULT_ADMIN_LISTEN)),
        *(("--record", arguments.record) if arguments.record else ()),
    ]
    with LocalServer(
        arguments.model or "default", scheduler_arguments=addresses, describe=request_line, learns=True
    ) as server:
        model = asyncio.run(_served_model(server.target, arguments.api_key))
        scheme, _, address = server.http_url.partition("://")
        host, _, port = address.rpartition(":")
        url = f"{scheme}://{REACHED.get(host, host)}:{port}"
        example = next((EXAMPLES[task] for task in EXAMPLES if task in model.tasks), CHAT)
        try_it = example.format(url=url, model=model.name)
        target = "" if server.target == DEFAULT_TARGET else f" --target {server.target}"
        chat = f"pagewire chat{target}\n" if model.has_chat_template else ""
        sys.stderr.write(TRY_IT.format(url=url, target=server.target, try_it=try_it, chat=chat))
        server.wait()


def request_line(event: Mapping[str, object]) -> str:
    """A line about a request that has ended, with its reason if it failed; empty for other events of the log."""
    if event.get("event") != "request closed" and "route" not in event:
        return ""
    route, status = event.get("route", "gRPC"), event.get("http_status", event.get("status"))
    outputs = event.get("output_tokens")
    tokens = f", {sum(outputs)} tokens" if isinstance(outputs, list) and outputs else ""
    reason = f": {event['reason']}" if event.get("reason") else ""
    seconds = event.get("total_seconds")
    return f"{route} {status}{tokens}, {seconds:.2f} s{reason}" if isinstance(seconds, float) else ""


def _free(address: str) -> str:
    """The address if nothing listens there, else a free port of this machine."""
    host, port = split_address(address)
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return address
    return f"{host}:0"


async def _served_model(target: str, api_key: str) -> pb.GetModelResponse:
    async with Client(target, api_key=api_key) as client:
        return await client.get_model()
