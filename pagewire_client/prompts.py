"""The input of a request: text, token ids, chat messages, parts of several kinds, or an encoder's input."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.files import read_file

MAX_SOUND_BYTES = MAX_IMAGE_BYTES = 16 << 20
"""Bytes of a sound or image file: the largest gRPC message of a server."""


@dataclass(frozen=True)
class Sound:
    """A sound file, whose format the server detects. `content_type` is forwarded and not used."""

    data: bytes
    content_type: str = ""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError if the file cannot be read or is too large."""
        return cls(read_file(path, MAX_SOUND_BYTES))


@dataclass(frozen=True)
class Image:
    """An image file: PNG, JPEG, WebP, or GIF, whose first frame is read."""

    data: bytes

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError if the file cannot be read or is too large."""
        return cls(read_file(path, MAX_IMAGE_BYTES))


@dataclass(frozen=True)
class EncoderPrompt:
    """Input of an encoder-decoder model: a text, token ids, or a sound of at most 30 seconds. `decoder` defaults to the
    model's start tokens."""

    encoder: str | Sequence[int] | Sound
    decoder: Sequence[int] = ()


@dataclass(frozen=True)
class PromptEmbeds:
    """Embeddings of consecutive tokens, which the model reads in place of token ids: a safetensors file with one tensor
    [number of tokens, size]."""

    data: bytes

    @classmethod
    def of(cls, embeddings: Any) -> Self:
        """embeddings: [number of tokens, size], a torch tensor or a numpy array of float32, float16 or bfloat16.

        Raises KeyError for another type."""
        kind = _DTYPES[str(embeddings.dtype).removeprefix("torch.")]
        if hasattr(embeddings, "detach"):
            import torch

            rows = embeddings.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            rows = embeddings.tobytes()
        tensor = {"dtype": kind, "shape": [*embeddings.shape], "data_offsets": [0, len(rows)]}
        header = json.dumps({"embeddings": tensor}).encode()
        return cls(len(header).to_bytes(8, "little") + header + rows)


_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
Part = str | Sequence[int] | PromptEmbeds | Image | Sound
Messages = Sequence[Mapping[str, Any]]
"""Chat messages with "role" and "content": a text, or a list of texts, images and sounds."""
Prompt = str | Sequence[int] | Messages | PromptEmbeds | Image | Sound | Sequence[Part] | EncoderPrompt
"""Text, token ids, chat messages, embeddings, an image, a sound, a list of such parts, or an encoder's input."""

Text = str | Sequence[int]


def set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, EncoderPrompt):
        if isinstance(prompt.encoder, str):
            request.encoder_text = prompt.encoder
        elif isinstance(prompt.encoder, Sound):
            request.encoder_sound.data = prompt.encoder.data
            request.encoder_sound.content_type = prompt.encoder.content_type
        else:
            request.encoder_token_ids.ids.extend(prompt.encoder)
            request.encoder_token_ids.SetInParent()
        if prompt.decoder:
            request.token_ids.ids.extend(prompt.decoder)
    elif isinstance(prompt, PromptEmbeds | Image | Sound):
        _add_parts(request.parts, [prompt])
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(to_chat(prompt))  # type: ignore[arg-type]
    elif prompt and isinstance(prompt[0], str | PromptEmbeds | Image | Sound | Sequence):
        _add_parts(request.parts, prompt)  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()


def _add_parts(message: pb.PromptParts, parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part, str):
            message.parts.add(text=part)
        elif isinstance(part, PromptEmbeds):
            message.parts.add(prompt_embeds=part.data)
        elif isinstance(part, Image):
            message.parts.add(image=pb.Image(data=part.data))
        elif isinstance(part, Sound):
            message.parts.add(sound=pb.Sound(data=part.data, content_type=part.content_type))
        else:
            message.parts.add(token_ids=pb.TokenIds(ids=part))


def to_chat(messages: Messages) -> pb.Chat:
    return pb.Chat(messages=map(_message, messages))


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    found, content = pb.ChatMessage(role=message["role"]), message["content"]
    if isinstance(content, str):
        found.content = content
        return found
    for part in content:
        if isinstance(part, Image):
            found.parts.add(image=pb.Image(data=part.data))
        elif isinstance(part, Sound):
            found.parts.add(sound=pb.Sound(data=part.data, content_type=part.content_type))
        else:
            found.parts.add(text=part)
    return found
