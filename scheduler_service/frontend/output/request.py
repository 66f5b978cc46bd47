"""A checked request, and the part of a broken stream that its client holds already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from scheduler_service.core import EncoderInput
from scheduler_service.frontend.text.output_text import OutputText
from scheduler_service.frontend.text.tokenization import Tokenizer
from scheduler_service.wire.sampling import RequestSampling


def request_key(tenant: str, request_id: str) -> str:
    """The name of a request inside the server. Every tenant has request ids of its own.

    Both parts are percent-encoded, so no two pairs have the same name, and most request ids stay as they are.
    """
    name = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{name}" if tenant else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The part of a stream that the client holds: tokens of each index, or of none; whole outputs; and the number of
    the prompt's log-probabilities. `texts` has the text of each output that has tokens.

    `begun` has tokens of outputs that are sent when all have ended; such outputs are generated again.
    """

    token_ids: tuple[Sequence[int], ...] = ()
    begun: Mapping[int, Sequence[int]] = field(default_factory=dict)
    texts: Mapping[int, OutputText] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has been checked against the model's limits, with every default filled in.

    `n` is how many outputs are wanted, None for as many as there are sequences; if it is less, the likeliest are given.
    `hides_logprobs` when log-probabilities serve that ranking alone. `resumes` if it goes on with a broken stream.
    `is_whole` if its client is sent each output once it has ended. `adapter_id` is the fingerprint of a low-rank
    adapter; `encoder_input` what an encoder beside the decoder reads.
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
        """Tokens of the prompt, and those of the encoder's input."""
        return len(self.prompt_token_ids) + (self.encoder_input.num_tokens if self.encoder_input else 0)

    @property
    def num_outputs(self) -> int:
        return self.sampling.n if self.n is None else self.n

    @property
    def comes_whole(self) -> bool:
        """Whether no output is sent before all have ended, because only the best are sent."""
        return self.n is not None or self.sampling.beam_width > 0

    @property
    def is_plain(self) -> bool:
        """Whether an output that goes on gains a token and its text, and nothing else.

        The engine's notion, `SequenceGroup.is_plain`, and what only the front end knows: text may end at a stop string,
        and outputs may have to be ranked.
        """
        return not (self.sampling.reports or self.stop or self.comes_whole)

    @property
    def is_complete(self) -> bool:
        """Whether the client holds everything already."""
        return len(self.resumption.finished) == self.num_outputs

    def text(self, tokenizer: Tokenizer | None) -> OutputText:
        """The text of an output without tokens."""
        return OutputText(
            tokenizer if self.sampling.pooling is None else None,
            self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.sampling.min_tokens,
        )
