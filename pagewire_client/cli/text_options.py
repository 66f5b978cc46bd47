"""The flags of `embed`, `score` and `transcribe`."""

import argparse
from pathlib import Path

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.flag_values import integer_of
from pagewire_client.cli.texts import POOLINGS
from pagewire_client.prompts import Sound


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
        choices=POOLINGS,
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
