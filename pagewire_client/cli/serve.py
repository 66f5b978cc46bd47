"""`pagewire_client serve`: a scheduler and a worker on this machine, with HTTP, until a signal arrives."""

import argparse
import asyncio
import sys

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.client import Client
from pagewire_client.local import LocalServer

TRY_IT = """\
OpenAI's API is at {url}/v1; gRPC at {target}; Ctrl-C ends both. Try:

{try_it}

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
    with LocalServer(arguments.model or "default", scheduler_arguments=["--http-listen", arguments.listen]) as server:
        model = asyncio.run(_served_model(server.target, arguments.api_key))
        host, _, port = server.http_url.removeprefix("http://").rpartition(":")
        url = f"http://{REACHED.get(host, host)}:{port}"
        example = next((EXAMPLES[task] for task in EXAMPLES if task in model.tasks), CHAT)
        try_it = example.format(url=url, model=model.name)
        sys.stderr.write(TRY_IT.format(url=url, target=server.target, try_it=try_it))
        server.wait()


async def _served_model(target: str, api_key: str) -> pb.GetModelResponse:
    async with Client(target, api_key=api_key) as client:
        return await client.get_model()
