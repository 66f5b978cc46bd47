"""The commands `embed`, `score` and `transcribe`, which print a line for each result."""

import argparse
import json
import sys

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.flag_values import access
from pagewire_client.cli.request_options import request_options
from pagewire_client.client import Client

POOLINGS = {"cls": pb.POOLING_CLS, "mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST, "all": pb.POOLING_ALL}


async def embed(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        for embedding in await client.embed(
            arguments.texts,
            pooling=POOLINGS.get(arguments.pooling, pb.POOLING_UNSPECIFIED),
            normalize=arguments.normalize,
            dimensions=arguments.dimensions,
            truncate=arguments.truncate,
            **request_options(arguments),
        ):
            vectors = [[round(number, 7) for number in vector] for vector in embedding.vectors]
            sys.stdout.write(f"{json.dumps(vectors if arguments.pooling == 'all' else vectors[0])}\n")


async def score(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        for number, found in await client.score(
            arguments.query,
            arguments.documents,
            top_n=arguments.top_n,
            pair_format=arguments.pair_format,
            truncate=arguments.truncate,
            **request_options(arguments),
        ):
            sys.stdout.write(f"{found:.4f}  {arguments.documents[number]}\n")


async def transcribe(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        names = ("language", "prompt", "translate", "temperature", "seed", "words")
        options = request_options(arguments) | {name: getattr(arguments, name) for name in names}
        async for event in client.transcribe(arguments.file, **options):
            if event.HasField("segment"):
                for said in event.segment.words if arguments.words else [event.segment]:
                    times = f"{said.start_seconds:7.2f} - {said.end_seconds:7.2f}"
                    sys.stdout.write(f"{times}  {said.text.strip()}\n")
                sys.stdout.flush()
