"""The command line's flags for the fields of requests.

A field has a flag of the same name, is the command's input, or is listed in `WITHOUT_FLAG`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.flag_values import integer_of
from pagewire_client.files import read_text
from pagewire_common.sampling import NUMBERS

MAX_TOKENS = 512

SAMPLING = {
    "best_of": "how many outputs to generate, of which the likeliest is shown",
    "beam_width": "beam search with this many beams",
    "max_tokens": f"most tokens to generate (default {MAX_TOKENS}; with --encoder, what the context leaves)",
    "min_tokens": "end-of-sequence tokens and stop texts do not count before this many tokens",
    **{name: number.help for name, number in NUMBERS.items()},
    "seed": "makes sampling repeatable",
    "stop": "text that ends the output; may be repeated",
    "stop_token_ids": "token that ends the output; may be repeated",
    "ignore_eos": "go on past the model's end-of-sequence tokens",
    "include_stop_str_in_output": "keep the text of the stop that was hit",
    "skip_special_tokens": "leave special tokens out of the text",
    "logit_bias": "TOKEN_ID=BIAS, added to the token's logit; may be repeated",
    "allowed_token_ids": "token that may be chosen, if not every token may; may be repeated",
    "bad_words": "text that may not appear in the output; may be repeated",
    "json_schema": "JSON schema that the output must fit; @FILE reads it from a file",
    "strict": "JSON schema: allow only keys that the schema names; overrides the server's setting",
    "regex": "regular expression that the whole output must match",
    "choice": "text that the output must equal; may be repeated for several choices",
    "grammar": "grammar, in Lark's syntax or as GBNF, that the output must fit; @FILE reads it from a file",
    "length_penalty": "beam search: scores are divided by length to this power",
    "early_stopping": "beam search: stop as soon as --beam-width outputs are complete",
}
"""The --help text of each field of SamplingParams that has a flag."""

WITHOUT_FLAG: Mapping[str, Mapping[str, str]] = {
    "GenerateRequest": {
        "request_id": "the request ends with its command, so its id is never needed",
        "parts": "--image adds images to the text",
        "token_ids": "the prompt is text",
        "encoder_token_ids": "the prompt is text",
        "encoder_sound": "`transcribe` hears sounds",
        "resume": "the client resumes a stream itself",
        "truncate_prompt_tokens": "a command sends a whole prompt",
    },
    "SamplingParams": {
        "n": "one output is shown, as it comes",
        "logprobs": "the text is shown, not its tokens",
        "prompt_logprobs": "the text is shown, not its tokens",
    },
    "EmbedRequest": {"number_type": "vectors are shown as decimal numbers"},
    "ScoreRequest": {},
    "TranscribeRequest": {"scores": "the text is shown with its times alone"},
}
"""The fields of requests that no flag sets, each with the reason."""

_METAVARS = {
    FieldDescriptor.CPPTYPE_STRING: "TEXT",
    FieldDescriptor.CPPTYPE_UINT32: "NUMBER",
    FieldDescriptor.CPPTYPE_UINT64: "NUMBER",
    FieldDescriptor.CPPTYPE_FLOAT: "NUMBER",
}


def request_parser(*parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=parents)
    parser.add_argument("--lora-name", metavar="NAME", default="", help="the low-rank adapter to apply")
    parser.add_argument("--tenant", metavar="NAME", default="", help="the tenant that the request belongs to")
    parser.add_argument(
        "--priority",
        type=integer_of(pb.GenerateRequest, "priority"),
        default=0,
        help="lower runs first; for a server with --scheduling-policy priority (default 0)",
    )
    parser.add_argument(
        "--cache-salt",
        metavar="TEXT",
        default="",
        help="share cached prefixes only with requests of the same salt",
    )
    return parser


def request_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of `request_parser`, as arguments of the client's methods."""
    return {name: getattr(arguments, name) for name in ("lora_name", "tenant", "priority", "cache_salt")}


def sampling_parser(*parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=parents)
    group = parser.add_argument_group("how tokens are chosen (defaults: the model's)")
    for name, text in SAMPLING.items():
        field = pb.SamplingParams.DESCRIPTOR.fields_by_name[name]
        flag = f"--{name.replace('_', '-')}"
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif field.message_type is not None:  # logit_bias, choice
            metavar = "TOKEN_ID=BIAS" if name == "logit_bias" else "TEXT"
            group.add_argument(flag, metavar=metavar, type=_parser(name), action="append", help=text)
        else:
            action = "append" if field.is_repeated else "store"
            metavar = _METAVARS[field.cpp_type]
            group.add_argument(flag, metavar=metavar, type=_parser(name), action=action, help=text)
    return parser


def sampling_params(arguments: argparse.Namespace) -> pb.SamplingParams:
    """Raises ValueError if flags contradict each other or a number is out of range."""
    given = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if not getattr(arguments, "encoder", False):
        given.setdefault("max_tokens", MAX_TOKENS)
    forms = [name for name in given if name in _FORMS]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(_flag(name) for name in forms)}: an output has one form at most")
    sampling = pb.SamplingParams()
    for name, value in given.items():
        try:
            if name == "choice":
                sampling.choice.options.extend(value)
            elif isinstance(value, list):
                getattr(sampling, name).update(value) if name == "logit_bias" else getattr(sampling, name).extend(value)
            else:
                setattr(sampling, name, value)
        except ValueError as error:
            raise ValueError(f"{_flag(name)} is {value}, which its field cannot hold: {error}") from None
    return sampling


_FORMS = [field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(name: str) -> Any:
    field = pb.SamplingParams.DESCRIPTOR.fields_by_name[name]
    if name in ("json_schema", "grammar"):
        return _text_or_file
    if name == "logit_bias":
        return _bias
    if field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return integer_of(pb.SamplingParams, name)
    return float if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else str


def _text_or_file(text: str) -> str:
    """Read a text or @FILE. Raises ArgumentTypeError for a file that cannot be read."""
    if not text.startswith("@"):
        return text
    try:
        return read_text(Path(text[1:]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    """Parse TOKEN_ID=BIAS. Raises ArgumentTypeError."""
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS, as 42=-3.5") from None
