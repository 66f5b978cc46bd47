"""Finds the text that is nearest to a question, by the cosine of their vectors."""

import asyncio
import os

from pagewire_client import Client

TARGET = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051")
KEY = os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")
TEXTS = ["Paris is the capital of France.", "Berlin is the capital of Germany.", "France has good cheese."]


async def main(question: str) -> None:
    async with Client(TARGET, api_key=KEY) as client:
        query, *found = [one.vector for one in await client.embed([question, *TEXTS], normalize=True)]
        scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in found]
        for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
            print(f"{score:.3f}  {text}")


asyncio.run(main("What is the capital of France?"))
