"""Converts a request's encoder prompt to token ids or features, for encoder-decoder models."""

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.core import EncoderInput
from scheduler_service.frontend.checking.checks import check_token_ids, invalid, require_tokenizer, take_token_ids
from scheduler_service.frontend.checking.sound_features import read_sound
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.encoding_errors import TooManyTokensError


async def read_encoder_prompt(message: pb.GenerateRequest, model: ServedModel) -> EncoderInput | None:
    """Read the encoder's input; None for a model without an encoder. Raises RequestError."""
    kind, most = message.WhichOneof("encoder_prompt"), model.max_encoder_len
    if not most:
        if kind is not None:
            invalid(f"{kind} is for models with an encoder beside the decoder, and {model.name} has none")
        return None
    wanted = "encoder_sound" if model.feature_bytes else "encoder_text or encoder_token_ids"
    if kind is None:
        invalid(f"{wanted} is missing: {model.name} has an encoder, and the prompt is what its decoder goes on from")
    if bool(model.feature_bytes) is not (kind == "encoder_sound"):
        invalid(f"{kind} is not what the encoder of {model.name} reads; set {wanted}")
    if kind == "encoder_sound":
        return await read_sound(message.encoder_sound, model)
    if kind == "encoder_text":
        tokenizer, text = require_tokenizer(kind, model), message.encoder_text
        if len(text) > most * tokenizer.longest_token:
            invalid(f"{kind} has {len(text)} characters; the encoder's {most} tokens hold fewer")
        try:
            token_ids = await take_token_ids(await tokenizer.encode(text, most=most))
        except TooManyTokensError:
            invalid(f"{kind} has more than {most} tokens, which is what the encoder reads")
    else:
        if len(message.encoder_token_ids.ids) > most:
            invalid(f"{kind} has {len(message.encoder_token_ids.ids)} tokens; the encoder reads up to {most}")
        token_ids = await take_token_ids(message.encoder_token_ids.ids)
    if not token_ids:
        invalid(f"{kind} is empty; the encoder needs at least one token")
    if len(token_ids) > most:
        invalid(f"{kind} has {len(token_ids)} tokens; the encoder reads up to {most}")
    check_token_ids(kind, token_ids, model)
    return EncoderInput(num_tokens=len(token_ids), token_ids=token_ids)
