"""A checked request, the part of a broken stream that its client has received, and the error of a failed output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import EncoderInput, PromptItem, SamplingParams, SequenceStatus
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.output_text import OutputText, ReasoningMarks
from scheduler_service.frontend.text.tokenization import Tokenizer
from scheduler_service.wire.sampling import RequestSampling

NOTHING_ALLOWED = (
    "sampling.allowed_token_ids, sampling.bad_words, sampling.min_tokens and the tokens that the model's generation "
    "config bans together allow no token; allow more tokens, or ban fewer"
)
_FORM_ENDED = (
    "no token could follow: the requested form and the other sampling parameters together allow none, or parsing the "
    "form takes too long"
)


def request_key(tenant: str, request_id: str) -> str:
    """The percent-encoded name of a request inside the server: two tenants may use the same request id."""
    name = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{name}" if tenant else name


def served_fingerprint(model: ServedModel, adapter: str) -> str:
    """The fingerprint of a model, together with the adapter's if there is one."""
    return f"{model.fingerprint}+{adapter}" if adapter else model.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The part of a broken stream that the client has received.

    `token_ids`: received tokens of each output, or empty.
    `begun`: tokens of outputs that the server generates again, because they are sent whole (best_of, beam search).
    `texts`: text of each output that has tokens in `token_ids`.
    `finished`: indices of outputs that the client has in full.
    `num_prompt_logprobs`: positions of the prompt whose log-probabilities the client has.
    """

    token_ids: tuple[Sequence[int], ...] = ()
    begun: Mapping[int, Sequence[int]] = field(default_factory=dict)
    texts: Mapping[int, OutputText] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has been checked against the model's limits, with every default filled in.

    `n`: number of the likeliest outputs to send; None: send all.
    `hides_logprobs`: log-probabilities only rank the outputs.
    `items`: parts of the prompt that are not text.
    `prompt_end`: the last characters of a rendered chat; empty for other prompts.
    `reasoning`: marks of the reasoning, in which stop strings have no effect.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: RequestSampling
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    n: int | None = None
    hides_logprobs: bool = False
    resumption: Resumption = Resumption()
    resumes: bool = False
    adapter_id: str = ""
    encoder_input: EncoderInput | None = None
    items: tuple[PromptItem, ...] = ()
    prompt_end: str = ""
    reasoning: ReasoningMarks | None = None

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and of the encoder's input together."""
        return len(self.prompt_token_ids) + (self.encoder_input.num_tokens if self.encoder_input else 0)

    @property
    def num_outputs(self) -> int:
        return self.sampling.n if self.n is None else self.n

    @property
    def comes_whole(self) -> bool:
        return self.n is not None or self.sampling.beam_width > 0

    @property
    def is_plain(self) -> bool:
        """Whether an output gains in each step only a token and its text, without stop strings or ranking."""
        return not (self.sampling.reports or self.stop or self.comes_whole)

    @property
    def is_complete(self) -> bool:
        return len(self.resumption.finished) == self.num_outputs

    def text(self, tokenizer: Tokenizer | None) -> OutputText:
        return OutputText(
            tokenizer if self.sampling.pooling is None else None,
            self.prompt_token_ids[self.items[-1].stop :] if self.items else self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.sampling.min_tokens,
            reasoning=self.reasoning,
        )


def failure(sampling: SamplingParams, status: SequenceStatus | None) -> RequestError | None:
    """The error of an output that failed with `status`, which depends only on this output's tokens."""
    if status is SequenceStatus.FINISHED_BARRED:
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, _FORM_ENDED if sampling.form else NOTHING_ALLOWED)
    if status is SequenceStatus.FINISHED_FAILED:
        what = "the model's output was not finite"
        return RequestError(
            grpc.StatusCode.INTERNAL, what if sampling.pooling is not None else f"no token could be chosen: {what}"
        )
    return None
