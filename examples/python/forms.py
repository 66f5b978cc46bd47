"""Generates JSON that obeys a schema."""

import asyncio
import json
import os

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect

TARGET = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051")
KEY = os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
}


async def main() -> None:
    async with Client(TARGET, api_key=KEY) as client:
        sampling = SamplingParams(max_tokens=128, json_schema=json.dumps(SCHEMA), strict=True)
        completion = await collect(client, [{"role": "user", "content": "Describe Paris."}], sampling)
        print(json.loads(completion.outputs[0].text)["city"])


asyncio.run(main())
