"""Loads the proposer of drafts that the settings name: an n-gram search, a draft model or a head."""

from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.drafting.draft_model import DraftModel, with_vocabulary
from worker_service.execution.drafting.head_files import HeadFiles, open_head
from worker_service.execution.drafting.head_runner import HeadRunner
from worker_service.execution.startup.network import Network
from worker_service.execution.startup.profiling import measure_prefill
from worker_service.execution.steps.decode_graphs import capture
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.tokenizer_files import vocabulary
from worker_service.models.causal_model import CausalModel
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.head_layer import Head
from worker_service.models.layer_needs import has_one_kind, needs_of
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Proposer
from worker_service.speculation.ngram import Ngrams


class ProposerLoader:
    """Loads a proposer. This base class serves the n-gram search and workers without speculation, which need no
    weights."""

    def __init__(self, settings: WorkerSettings, max_model_len: int) -> None:
        self._settings = settings
        self._max_model_len = max_model_len

    @property
    def shapes(self) -> list[CacheShape]:
        """The shape of a block in the proposer's cache; empty without a cache."""
        return []

    def check(self) -> list[int]:
        """The maximum bytes of each weight, see `Network.check`."""
        return []

    def load(self, target: CausalModel) -> None:
        """Load the proposer, after the target's network. Raises StartError."""

    def measure(self, speed: int) -> None:
        """Find the proposer's prefill speed. speed: the target's prefill tokens a second, which a head uses."""

    def attach(self, cache: CacheEngine) -> None:
        """Give the proposer its KV cache, before the target's CUDA graphs are captured: they may store hidden states in
        it. Raises StartError."""

    def proposer(self) -> Proposer | None:
        """Create the proposer, after the target's CUDA graphs are captured."""
        speculation = self._settings.speculation
        return Ngrams(speculation.fewest, speculation.longest) if speculation is not None else None


def open_proposer_loader(
    settings: WorkerSettings, target: Network, max_model_len: int, sliding_window: int
) -> ProposerLoader:
    """The loader that `--speculative-config` names. Raises StartError if the proposer cannot draft for the target."""
    speculation = settings.speculation
    if speculation is None or speculation.method == "ngram":
        return ProposerLoader(settings, max_model_len)
    flag = speculation.flag
    if target.max_encoder_len:
        raise StartError(f"{flag}: {target.model_id} has an encoder, and a draft model would have none")
    if sliding_window:
        raise StartError(
            f"{flag}: blocks behind the sliding window of {target.model_id} are given back, and a draft "
            'model would still need them; use the method "ngram"'
        )
    if speculation.model is None or speculation.method != "draft_model":
        return _HeadLoader(settings, max_model_len, open_head(speculation, settings, target))
    without_images = settings.model_copy(update={"encoder_cache_size": 0})
    draft = Network.open(speculation.model, without_images, target.device, target.ranks)
    if (needs := needs_of(draft.config, draft.shape.num_kv_heads)) and not has_one_kind(needs):
        raise StartError(f"{flag}: layers of the draft model {speculation.model} keep caches of different kinds")
    ours, theirs = (vocabulary(network.tokenizer_files) for network in (target, draft))
    if ours != theirs:
        raise StartError(f"the draft model {speculation.model} has another vocabulary than {target.model_id}")
    return _DraftModelLoader(settings, max_model_len, draft, target.config.vocabulary_size)


class _DraftModelLoader(ProposerLoader):
    def __init__(self, settings: WorkerSettings, max_model_len: int, draft: Network, vocabulary_size: int) -> None:
        super().__init__(settings, min(max_model_len, draft.config.max_model_len))
        self._draft = draft
        self._vocabulary_size = vocabulary_size
        self._model: CausalModel
        self._speed: int
        self._cache: CacheEngine

    @property
    def shapes(self) -> list[CacheShape]:
        return [self._draft.shape]

    def check(self) -> list[int]:
        return self._draft.check()

    def load(self, target: CausalModel) -> None:  # noqa: ARG002  # a draft model does not use the target's network
        self._model = with_vocabulary(self._draft.load()[0], self._vocabulary_size)

    def measure(self, speed: int) -> None:  # noqa: ARG002  # a draft model measures its own speed
        settings, draft = self._settings, self._draft
        self._speed = measure_prefill(
            self._model, draft.shape, draft.device, settings.max_num_batched_tokens, settings.max_num_seqs
        )

    def attach(self, cache: CacheEngine) -> None:
        self._cache = cache

    def proposer(self) -> Proposer:
        graphs = capture(self._draft.config, self._model, self._cache, self._settings, self._max_model_len)
        runner = ModelRunner(self._model, self._cache, graphs)
        return DraftModel(runner, self._max_model_len, self._settings.max_num_batched_tokens, self._speed)


class _HeadLoader(ProposerLoader):
    def __init__(self, settings: WorkerSettings, max_model_len: int, files: HeadFiles) -> None:
        super().__init__(settings, min(max_model_len, files.max_model_len))
        self._files = files
        self._target: Decoder
        self._speed: int
        self._head: Head
        self._runner: HeadRunner

    @property
    def shapes(self) -> list[CacheShape]:
        return [self._files.shape]

    def check(self) -> list[int]:
        return self._files.check()

    def load(self, target: CausalModel) -> None:
        assert isinstance(target, Decoder)  # `open_head` has checked the target's type
        self._target, self._head = target, self._files.load(target)

    def measure(self, speed: int) -> None:
        self._speed = speed

    def attach(self, cache: CacheEngine) -> None:
        self._runner = HeadRunner(self._head, cache, self._target)

    def proposer(self) -> Proposer:
        most = self._settings.max_num_batched_tokens
        return DraftModel(self._runner, self._max_model_len, most, self._speed, reads_next=True)
