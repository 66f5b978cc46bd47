"""`embed`, `score` and `transcribe`: their flags, and the commands, which print a line for each result."""

import argparse
import json
import sys
from pathlib import Path

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.flag_values import access, integer_of
from pagewire_client.cli.request_options import request_options
from pagewire_client.client import Client
from pagewire_client.prompts import Sound

POOLINGS = {"cls": pb.POOLING_CLS, "mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST, "all": pb.POOLING_ALL}


def _sound(text: str) -> Sound:
    """Read a sound file before any server is started. Raises ArgumentTypeError."""
    try:
        return Sound.read(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_texts(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", request: argparse.ArgumentParser
) -> None:
    embed = commands.add_parser(
        "embed", parents=[request], help="compute vectors of texts, printed as one JSON list a line"
    )
    embed.add_argument("texts", metavar="TEXT", nargs="+")
    embed.add_argument(
        "--pooling",
        choices=list(POOLINGS),
        help="how the states of a text's tokens become its vector (default: the model's); all: a vector for each token",
    )
    embed.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1 (default: the model's)"
    )
    embed.add_argument(
        "--dimensions",
        type=integer_of(pb.EmbedRequest, "dimensions"),
        default=0,
        help="leading numbers of each vector to keep; 0 for all",
    )
    embed.add_argument("--truncate", action="store_true", help="cut texts that are too long for the model")
    embed.add_argument(
        "--truncate-prompt-tokens",
        type=integer_of(pb.EmbedRequest, "truncate_prompt_tokens"),
        help="number of last tokens of each text to keep (default: all)",
    )
    score = commands.add_parser(
        "score", parents=[request], help="score how well documents answer a query, the best first"
    )
    score.add_argument("query")
    score.add_argument("documents", metavar="DOCUMENT", nargs="+")
    score.add_argument(
        "--pair-format",
        default="",
        metavar="TEXT",
        help="for models that were trained on single texts: the text of both, with {query} and {document} in it",
    )
    score.add_argument(
        "--top-n",
        type=integer_of(pb.ScoreRequest, "top_n"),
        default=0,
        help="how many of the best to show; 0 for all (default)",
    )
    score.add_argument("--truncate", action="store_true", help="cut documents that are too long for the model")
    score.add_argument(
        "--truncate-prompt-tokens",
        type=integer_of(pb.ScoreRequest, "truncate_prompt_tokens"),
        help="number of last tokens of each document to keep (default: all)",
    )
    transcribe = commands.add_parser("transcribe", parents=[request], help="transcribe a sound file")
    transcribe.add_argument(
        "file", type=_sound, help="WAV, FLAC, MP3, OGG, MP4 or WebM, whatever its name; at most 16 MiB"
    )
    transcribe.add_argument(
        "--language", default="", metavar="LANGUAGE", help='such as "en" or "english" (default: detected)'
    )
    transcribe.add_argument("--prompt", default="", help="the text before the sound, or an example of names and style")
    transcribe.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    transcribe.add_argument(
        "--seed",
        type=integer_of(pb.TranscribeRequest, "seed"),
        help="makes sampling repeatable",
    )
    transcribe.add_argument("--translate", action="store_true", help="translate the text to English")
    transcribe.add_argument("--words", action="store_true", help="print a line for each word, not for each segment")


async def embed(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        for embedding in await client.embed(
            arguments.texts,
            pooling=POOLINGS.get(arguments.pooling, pb.POOLING_UNSPECIFIED),
            normalize=arguments.normalize,
            dimensions=arguments.dimensions,
            truncate=arguments.truncate,
            truncate_prompt_tokens=arguments.truncate_prompt_tokens,
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
            truncate_prompt_tokens=arguments.truncate_prompt_tokens,
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
