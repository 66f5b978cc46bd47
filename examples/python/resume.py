"""Stops reading a stream, and goes on in another process from a file: python resume.py FILE; python resume.py FILE

Within one process, `Client` resumes a broken stream itself.
"""

import asyncio
import os
import sys
from pathlib import Path

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import connect, key_metadata


async def main(path: Path) -> None:
    request = pb.GenerateRequest(
        request_id=path.stem, text="Once upon a time", sampling=pb.SamplingParams(max_tokens=32)
    )
    is_resumed = path.exists()
    if is_resumed:
        request.resume.ParseFromString(path.read_bytes())
    output = pb.ResumedOutput(token_ids=request.resume.outputs[0].token_ids if is_resumed else [])
    state = pb.ResumeState(seed=request.resume.seed, model_fingerprint=request.resume.model_fingerprint)
    async with connect(os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051"), None) as channel:
        metadata = key_metadata(os.environ.get("PAGEWIRE_CLIENT_API_KEY", ""))
        async for message in InferenceServiceStub(channel).Generate(request, metadata=metadata):
            print(message.text, end="", flush=True)
            if message.HasField("seed"):
                state.seed, state.model_fingerprint = message.seed, message.model_fingerprint
            output.token_ids.extend(message.token_ids)
            if not is_resumed and len(output.token_ids) >= 8 and not message.finish_reason:
                break  # as if this process were killed here
    del state.outputs[:]
    state.outputs.append(output)
    path.write_bytes(state.SerializeToString())


asyncio.run(main(Path(sys.argv[1])))
