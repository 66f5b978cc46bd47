"""An EAGLE-3 head in a draft model's place: its files, and its passes.

Its slot of a token has the keys and values that it computes of the *next* token and of the token's own state. So it can
compute one slot less than there are tokens, and the last slot of a block depends on the first token behind the block:
where sequences that share a block go on differently, one of them guesses from another's slot, which costs no more than
a guess.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload
from pagewire_common.start_error import StartError
from worker_service.execution.batch import build_batch
from worker_service.execution.cache_engine import CacheEngine, CacheShape
from worker_service.execution.network import Network
from worker_service.execution.sampler import FAILED, sample
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.loading.model_store import find_model
from worker_service.loading.weight_files import WeightFiles
from worker_service.models.decoder import Decoder
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.eagle import EagleHead, num_state_layers
from worker_service.models.eagle_config import EagleConfig
from worker_service.session.session import ScheduledChunk
from worker_service.session.step import TOKENS, ModelOutput, SchedulerOutput, StepTiming
from worker_service.settings import WorkerSettings

LAYER_NAMES = ("midlayer", "layers.0")
"""Of the head's layer in a checkpoint of its authors' form, and of speculators'."""


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder; nothing of it is in memory until `load`."""

    checkpoint: Checkpoint
    weights: WeightFiles | None
    """None for random ones."""
    config: EagleConfig
    target: Network

    @classmethod
    def open(cls, name: str, settings: WorkerSettings, target: Network) -> "HeadFiles":
        """Find it, downloading it where needed. Raises StartError where it is no head for this target."""
        if not isinstance(target.config, DecoderConfig):
            raise StartError(f"--speculate eagle is for the families that run natively; {target.model_id} does not")
        is_dummy = settings.load_format == "dummy"
        path = find_model(name, settings.cache.expanduser(), with_weights=not is_dummy).path
        weights = None if is_dummy else WeightFiles(path)
        checkpoint = Checkpoint(path, weights or DummyWeights(target.device))
        try:
            config = EagleConfig.from_json(checkpoint.config, target.config)
        except KeyError as error:
            raise StartError(f"{path / 'config.json'}: {error.args[0]} is missing") from error
        except Exception as error:  # a config is untrusted, and the code that reads it may raise anything
            raise StartError(f"{path / 'config.json'}: {str(error) or type(error).__name__}") from error
        if (size := config.layer.hidden_size) != target.config.hidden_size and not _has(weights, "embed_tokens.weight"):
            raise StartError(
                f"{path}: it has no embed_tokens, and the embeddings of {target.model_id} have "
                f"{target.config.hidden_size} numbers where it needs {size}"
            )
        return cls(checkpoint, weights, config, target)

    @property
    def shape(self) -> CacheShape:
        """Of a block of its cache."""
        layer, of_target = self.config.layer, self.target
        block_size = of_target.shape.block_size
        num_layers = 1 + num_state_layers(self.config)
        return CacheShape(num_layers, block_size, layer.num_kv_heads, layer.head_dim, of_target.dtype)

    def check(self) -> list[int]:
        """As `Network.check`."""
        blueprint = self._allocate(torch.device("meta")).checkpoint_tensors(self._layer_name)
        self.checkpoint.check(blueprint)
        self._token_ids()
        return [tensor.nbytes for tensor in blueprint.values()]

    def load(self, target: Decoder) -> EagleHead:
        """The head, beside the target's loaded network. Raises StartError."""
        head = self._allocate(self.target.device)
        self.checkpoint.load_into(head.checkpoint_tensors(self._layer_name))
        token_ids = self._token_ids()
        head.pack(None if token_ids is None else token_ids.to(self.target.device), target.embedding)
        return head

    def _allocate(self, device: torch.device) -> EagleHead:
        has_embedding = _has(self.weights, "embed_tokens.weight")
        return EagleHead(self.config, self.target.dtype, device, has_embedding=has_embedding)

    @property
    def _layer_name(self) -> str:
        names = LAYER_NAMES if self.weights is None else [*self.weights.dtypes]
        return next((layer for layer in LAYER_NAMES if any(name.startswith(f"{layer}.") for name in names)), "midlayer")

    def _token_ids(self) -> Tensor | None:
        """The token of each logit; None for all in order. `d2t` has how much further on each is than its logit."""
        number, size = self.config.num_guessable, self.config.layer.vocabulary_size
        if not _has(self.weights, "d2t"):
            if number < size and self.weights is not None:
                raise StartError(f"{self.checkpoint.path}: draft_vocab_size is {number}, and d2t is missing")
            return None if number == size else torch.arange(number)
        assert self.weights is not None
        offsets = self.weights.read("d2t")
        token_ids = torch.arange(number) + offsets if offsets.shape == (number,) else offsets
        if offsets.dtype is not torch.int64 or offsets.shape != (number,) or len(set(token_ids.tolist())) < number:
            raise StartError(f"{self.checkpoint.path}: d2t does not say which token each of {number} logits is of")
        if token_ids.min() < 0 or token_ids.max() >= size:
            raise StartError(f"{self.checkpoint.path}: d2t leads beyond the {size} tokens of the model")
        return token_ids


def _has(weights: WeightFiles | None, name: str) -> bool:
    return weights is not None and name in weights.dtypes


class EagleRunner:
    """What a `DraftModel` computes with."""

    def __init__(self, head: EagleHead, cache_engine: CacheEngine, target: Decoder) -> None:
        """From now on the target's states are kept in the head's cache."""
        self.cache_engine = cache_engine
        self._head = head
        cache = cache_engine.device_blocks
        target.show_states(head.config.states_before, lambda states, slots: head.read(states, slots, cache))

    @torch.inference_mode()
    def execute(self, _: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Compute slots [start, stop) of each chunk, and guess the token behind the one after them.

        Where one is guessed, the head's state of the token that it guesses from is kept in the next slot, for a guess
        after that: the target's takes its place when it has computed that token.
        """
        cache = self.cache_engine.device_blocks
        block_size = cache.shape[3]
        batch = build_batch(chunks, block_size, cache.device)
        token_ids = array(TOKENS)
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start + 1 : chunk.stop + 1]
        states = self._head.forward(
            upload(token_ids, torch.int64, cache.device), batch.positions, batch.slots, batch.attention, cache
        )
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return ModelOutput([], StepTiming(0, 0, 0))
        stops = accumulate(chunk.stop - chunk.start for chunk in chunks)
        last = [stop - 1 for stop, chunk in zip(stops, chunks, strict=True) if chunk.samples]
        states = states[upload(last, torch.int64, cache.device)]
        # A step that runs ahead may have the target's states there already.
        keeping = [
            (row, chunk.sequence.block_ids[chunk.stop // block_size] * block_size + chunk.stop % block_size)
            for row, chunk in enumerate(sampling)
            if chunk.stop >= chunk.sequence.num_computed_tokens
        ]
        if keeping:
            rows, slots = upload(keeping, torch.int64, cache.device).T
            self._head.keep(states[rows], slots.contiguous(), cache)
        found = sample(self._head.compute_logits(states), [chunk.sequence for chunk in sampling]).tolist()
        failed = [chunk.sequence.sequence_id for chunk, one in zip(sampling, found, strict=True) if one == FAILED]
        return ModelOutput(found, StepTiming(0, 0, 0), failed_sequence_ids=failed)
