"""Asks the base model and every adapter the same question: pagewire serve --lora-modules NAME=FOLDER"""

import asyncio
import os

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect

TARGET = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051")
KEY = os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")


async def main() -> None:
    async with Client(TARGET, api_key=KEY) as client:
        names = ["", *(await client.get_model()).lora_names]
        sampling = SamplingParams(max_tokens=32, temperature=0)
        answers = await asyncio.gather(
            *(collect(client, "Once upon a time", sampling, lora_name=name) for name in names)
        )
        for name, answer in zip(names, answers, strict=True):
            print(f"{name or 'base model'}: {answer.outputs[0].text!r}")


asyncio.run(main())
