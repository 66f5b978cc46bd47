"""Fields of a chat that bypass the gateway: an adapter's name, logit biases, and token ids.

Token ids replace the gateway's token ids if the gateway would parse the chat differently.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pagewire_client.http.errors import HttpError, invalid
from pagewire_common.vllm_metadata import LORA_NAME

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
MAX_NAME = 256
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Unread:
    """The fields that bypass the gateway. The object is empty if the gateway forwards all fields that matter."""

    lora_name: str = ""
    logit_bias: dict[int, float] = field(default_factory=dict)
    token_ids: Sequence[int] = ()

    def metadata(self) -> list[tuple[str, bytes]]:
        return [(LORA_NAME, self.lora_name.encode())] if self.lora_name else []

    def named_in(self, answer: bytes, model: str) -> tuple[bytes, bytes]:
        """Replace the `model` name by the adapter's name in the next bytes of an answer.

        Returns the bytes to send, and the bytes at the end that may be the beginning of the model's name. The caller
        puts the unsent bytes before the next bytes. Generated texts cannot match the JSON member "model", because
        quotes within texts are escaped.
        """
        if not self.lora_name:
            return answer, b""
        member = _member(model)
        answer = answer.replace(member, _member(self.lora_name))
        begun = next((n for n in range(len(member) - 1, 0, -1) if answer.endswith(member[:n])), 0)
        return answer[: len(answer) - begun], answer[len(answer) - begun :]

    def put_into(self, message: bytes) -> bytes:
        """Add the fields that bypass the gateway to a serialized vllm.GenerateRequest."""
        if not self.logit_bias and not self.token_ids:
            return message
        request = vllm.GenerateRequest.FromString(message)
        if self.token_ids:
            request.tokenized.input_ids[:] = self.token_ids
        request.sampling_params.logit_bias.update(self.logit_bias)
        return request.SerializeToString()


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises HttpError if the body is not a JSON object.

    The gateway receives the parsed object in a new serialization. If this process and the gateway parsed the same bytes
    differently, a client could evade the checks of this process.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid("the body is no JSON that can be read") from None
    if not isinstance(fields, dict):
        raise invalid("the body is JSON, but no object")
    return fields


def write_object(fields: dict[str, Any]) -> bytes:
    """Serialize an object. Raises HttpError."""
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise invalid("the body has a number that is not finite, or is nested too deeply") from None


def take_out(fields: dict[str, Any], model: str) -> Unread:
    """Remove the fields that bypass the gateway from a body. If the body names an adapter, the name is replaced by
    `model`. Raises HttpError.
    """
    bias = read_bias(fields.get("logit_bias"))
    name = fields.get("model")
    if not isinstance(name, str) or name in ("", model):
        return Unread(logit_bias=bias)
    if len(name) > MAX_NAME or not is_unicode(name):
        raise HttpError(404, "model_not_found", f"there is no model of this name; the model is {model!r}")
    fields["model"] = model
    return Unread(name, bias)


def _member(model: str) -> bytes:
    """The JSON member "model" as the bytes that the gateway writes."""
    return f'"model":{json.dumps(model, ensure_ascii=False)}'.encode()


def read_bias(given: Any) -> dict[int, float]:
    """Parse a body's `logit_bias`. Raises HttpError."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise invalid("logit_bias must be an object of token ids and biases")
    if len(given) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(given)} entries; it may have {MAX_BIASES}")
    for key, bias in given.items():
        if not _TOKEN_ID.fullmatch(key) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid(f"logit_bias has {key[:20]!r}: {str(bias)[:20]}; it must have token ids and numbers")
    try:
        return {int(key): float(bias) for key, bias in given.items()}
    except OverflowError:
        raise invalid("logit_bias has a number that is too large") from None


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded in UTF-8. JSON can spell a lone surrogate, but UTF-8 cannot encode a lone
    surrogate.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)
