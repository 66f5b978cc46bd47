"""Asks a question and prints the answer while it is generated: python chat.py [QUESTION]"""

import asyncio
import os
import sys
from pathlib import Path

from pagewire_client import Client, SamplingParams

TARGET = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051")
KEY = os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")
TLS = os.environ.get("PAGEWIRE_CLIENT_TLS")  # a folder with ca.crt


async def main(question: str) -> None:
    async with Client(TARGET, api_key=KEY, tls=Path(TLS) if TLS else None) as client:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        async for message in client.generate(messages, SamplingParams(max_tokens=64)):
            print(message.text, end="", flush=True)
        print()


asyncio.run(main(" ".join(sys.argv[1:]) or "What is the capital of France?"))
