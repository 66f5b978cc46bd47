"""Refuses pickled weights, because reading a pickle can run its author's code."""

from pathlib import Path

from pagewire_common.start_error import StartError
from worker_service.wording import named

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")
_CONVERSION = (
    'convert them once, with a config.json in FOLDER and transformers 5: python -c "from transformers import '
    "AutoModelForCausalLM as M; M.from_pretrained('FOLDER', dtype='auto').save_pretrained('FOLDER')\" (for encoders "
    "AutoModel, for encoder-decoders AutoModelForSeq2SeqLM, for Whisper AutoModelForSpeechSeq2Seq)"
)


def refuse_missing_weights(file: Path, named_by: str) -> None:
    """Raise StartError. named_by: the index that lists the missing file, or "". The message always mentions pickles:
    pickles are not downloaded, so the folder may not show them."""
    by = f", which {named_by} names," if named_by else ""
    pickles = sorted(
        found.name
        for found in file.parent.glob("*")
        if found.suffix in _SUFFIXES and not found.name.startswith(_OF_TRAINING)
    )
    if pickles and not named_by:
        more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
        raise StartError(
            f"the weights of {named(str(file.parent))} are pickles ({named(pickles[0])}{more}), which can run code "
            f"when they are read; the weights must be safetensors: {_CONVERSION}"
        )
    raise StartError(
        f"{named(str(file))}{by} does not exist; the weights must be safetensors. If the model has .bin or .pt files "
        f"alone, {_CONVERSION}"
    )
