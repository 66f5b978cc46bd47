"""A thin Python client: `Client` for asyncio, `LLM` for offline batches, and a command line."""

from pagewire.v1.inference_service_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    POOLING_ALL,
    POOLING_CLS,
    POOLING_LAST,
    POOLING_MEAN,
    FinishReason,
    GenerateResponse,
    SamplingParams,
    Usage,
)
from pagewire_client.client import Client
from pagewire_client.embedding import Embedding
from pagewire_client.llm import LLM, Completion, Output
from pagewire_client.local import LocalServer, ServerError
from pagewire_client.prompts import EncoderPrompt, Image, Prompt, PromptEmbeds, Sound

__all__ = [
    "FINISH_REASON_ABORT",
    "FINISH_REASON_ERROR",
    "FINISH_REASON_LENGTH",
    "FINISH_REASON_STOP",
    "LLM",
    "POOLING_ALL",
    "POOLING_CLS",
    "POOLING_LAST",
    "POOLING_MEAN",
    "Client",
    "Completion",
    "Embedding",
    "EncoderPrompt",
    "FinishReason",
    "GenerateResponse",
    "Image",
    "LocalServer",
    "Output",
    "Prompt",
    "PromptEmbeds",
    "SamplingParams",
    "ServerError",
    "Sound",
    "Usage",
]
