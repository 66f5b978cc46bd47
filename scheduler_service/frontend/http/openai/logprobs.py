"""Log-probabilities of a chat in OpenAI's form: one entry for each generated token."""

import json
from collections.abc import Iterable, Sequence

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.model import ServedModel

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express, as in vLLM."""


async def shown_logprobs(
    positions: Sequence[pb.TokenLogprobs], texts: TokenTexts, model: ServedModel, *, as_token_ids: bool
) -> list[str]:
    """The entries of tokens as JSON texts. `as_token_ids`: tokens are shown as `token_id:ID`, as in vLLM."""
    if not as_token_ids:
        await texts.learn(model, token_ids_of(positions))

    def shown(one: pb.TokenLogprob) -> dict[str, object]:
        token = f"token_id:{one.token_id}" if as_token_ids else texts[one.token_id]
        return {"token": token, "logprob": max(one.logprob, MIN_LOGPROB), "bytes": list(token.encode())}

    return [
        json.dumps(shown(position.chosen) | {"top_logprobs": list(map(shown, position.top))}) for position in positions
    ]


async def shown_prompt_logprobs(
    positions: Sequence[pb.TokenLogprobs], texts: TokenTexts, model: ServedModel
) -> list[str]:
    """The prompt's entries as JSON texts in vLLM's form. The first token has no log-probability."""
    await texts.learn(model, token_ids_of(positions))
    return ["null"] + [
        json.dumps(
            {
                one.token_id: {
                    "logprob": max(one.logprob, MIN_LOGPROB),
                    "rank": one.rank,
                    "decoded_token": texts[one.token_id],
                }
                for one in (*position.top, position.chosen)
            }
        )
        for position in positions
    ]


def token_ids_of(positions: Iterable[pb.TokenLogprobs]) -> Iterable[int]:
    return (one.token_id for position in positions for one in (position.chosen, *position.top))
