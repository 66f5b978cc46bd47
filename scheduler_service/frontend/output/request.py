"""A checked request, and the part of a broken stream that the client has already received."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from scheduler_service.core import EncoderInput
from scheduler_service.frontend.text.output_text import OutputText
from scheduler_service.frontend.text.tokenization import Tokenizer
from scheduler_service.wire.sampling import RequestSampling


def request_key(tenant: str, request_id: str) -> str:
    """The name of a request inside the server. Two tenants may use the same request id.

    Tenant and request id are percent-encoded, so that different pairs have different names. Encoding leaves most
    request ids unchanged.
    """
    name = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{name}" if tenant else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The part of a broken stream that the client has received.

    `token_ids`: received tokens of each output; empty if the client has received no tokens.
    `begun`: received tokens of outputs that are sent after all outputs have ended (best_of, beam search). The server
      generates such outputs again from the start.
    `texts`: text of each output that has at least one token in `token_ids`.
    `finished`: indices of outputs that the client has received in full.
    `num_prompt_logprobs`: number of the prompt's positions whose log-probabilities the client has received.
    """

    token_ids: tuple[Sequence[int], ...] = ()
    begun: Mapping[int, Sequence[int]] = field(default_factory=dict)
    texts: Mapping[int, OutputText] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has been checked against the model's limits, with every default filled in.

    `n`: number of outputs to send; None means that every sequence is sent. If `n` is less than the number of sequences,
      the `n` likeliest sequences are sent.
    `hides_logprobs`: log-probabilities only rank the outputs and are not sent.
    `resumes`: the request continues a broken stream.
    `is_whole`: an output is sent only after it has ended.
    `adapter_id`: the fingerprint of a low-rank adapter.
    `encoder_input`: the encoder's input, for an encoder-decoder model.
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
    is_whole: bool = False
    adapter_id: str = ""
    encoder_input: EncoderInput | None = None

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt and of the encoder's input together."""
        return len(self.prompt_token_ids) + (self.encoder_input.num_tokens if self.encoder_input else 0)

    @property
    def num_outputs(self) -> int:
        return self.sampling.n if self.n is None else self.n

    @property
    def comes_whole(self) -> bool:
        """Whether the best outputs are sent after all outputs have ended."""
        return self.n is not None or self.sampling.beam_width > 0

    @property
    def is_plain(self) -> bool:
        """Whether, in each step, an unfinished output gains only a token and the token's text.

        The engine's `SequenceGroup.is_plain` has the same meaning, but here requests with stop strings and requests
        with ranked outputs do not count as plain either.
        """
        return not (self.sampling.reports or self.stop or self.comes_whole)

    @property
    def is_complete(self) -> bool:
        """Whether the client has already received all outputs in full."""
        return len(self.resumption.finished) == self.num_outputs

    def text(self, tokenizer: Tokenizer | None) -> OutputText:
        """Create the object that collects the text of an output; the text is still empty."""
        return OutputText(
            tokenizer if self.sampling.pooling is None else None,
            self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.sampling.min_tokens,
        )
