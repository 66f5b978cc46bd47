"""What the gateway does not pass on of a chat, and goes around it: the name of an adapter, biases, and the token ids of
a chat that the gateway would read otherwise than it is meant."""

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
    """Where nothing is set, the gateway passes on all that matters."""

    lora_name: str = ""
    logit_bias: dict[int, float] = field(default_factory=dict)
    token_ids: Sequence[int] = ()

    def metadata(self) -> list[tuple[str, bytes]]:
        return [(LORA_NAME, self.lora_name.encode())] if self.lora_name else []

    def named_in(self, answer: bytes, model: str) -> tuple[bytes, bytes]:
        """The next bytes of an answer, which has the `model` where the client said the adapter, and what of them has to
        wait for those behind it. (The quotes of what is text there are escaped.)"""
        if not self.lora_name:
            return answer, b""
        member = _member(model)
        answer = answer.replace(member, _member(self.lora_name))
        begun = next((n for n in range(len(member) - 1, 0, -1) if answer.endswith(member[:n])), 0)
        return answer[: len(answer) - begun], answer[len(answer) - begun :]

    def put_into(self, message: bytes) -> bytes:
        """A vllm.GenerateRequest with it."""
        if not self.logit_bias and not self.token_ids:
            return message
        request = vllm.GenerateRequest.FromString(message)
        if self.token_ids:
            request.tokenized.input_ids[:] = self.token_ids
        request.sampling_params.logit_bias.update(self.logit_bias)
        return request.SerializeToString()


def read_object(body: bytes) -> dict[str, Any]:
    """Raises HttpError where it is none. The gateway is given what was read, and not what came: what two readers
    understand differently would go around the checks of the first."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid("the body is no JSON that can be read") from None
    if not isinstance(fields, dict):
        raise invalid("the body is JSON, but no object")
    return fields


def write_object(fields: dict[str, Any]) -> bytes:
    """Raises HttpError."""
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise invalid("the body has a number that is not finite, or is nested too deeply") from None


def take_out(fields: dict[str, Any], model: str) -> Unread:
    """What a body has of it; where it names an adapter, it then names the `model`. Raises HttpError."""
    bias = read_bias(fields.get("logit_bias"))
    name = fields.get("model")
    if not isinstance(name, str) or name in ("", model):
        return Unread(logit_bias=bias)
    if len(name) > MAX_NAME or not is_unicode(name):
        raise HttpError(404, "model_not_found", f"there is no model of this name; the model is {model!r}")
    fields["model"] = model
    return Unread(name, bias)


def _member(model: str) -> bytes:
    """As the gateway writes it."""
    return f'"model":{json.dumps(model, ensure_ascii=False)}'.encode()


def read_bias(given: Any) -> dict[int, float]:
    """From a body's `logit_bias`. Raises HttpError."""
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
    """Not with half of a character, which JSON can spell and nothing can encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
