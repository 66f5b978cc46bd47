"""Prints subtitles of a sound file, for a server with a Whisper model: python transcripts.py FILE"""

import asyncio
import os
import sys
from pathlib import Path

from pagewire_client import Client, Sound

TARGET = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051")
KEY = os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")


async def main(path: Path) -> None:
    async with Client(TARGET, api_key=KEY) as client:
        async for message in client.transcribe(Sound.read(path)):
            if message.HasField("segment"):
                segment = message.segment
                print(f"{segment.start_seconds:7.2f} {segment.end_seconds:7.2f} {segment.text}")


asyncio.run(main(Path(sys.argv[1])))
