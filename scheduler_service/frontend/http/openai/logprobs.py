"""Log-probabilities of a chat in OpenAI's form: one entry for each generated token."""

import asyncio
import json
from collections.abc import Iterable, Sequence

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.model import ServedModel

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express, as in vLLM."""
POSITIONS_A_TURN = 64
"""Positions that are converted in one turn of the event loop."""


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
    """The prompt's entries as JSON texts in vLLM's form. The first token has no log-probability.

    The entries are made in turns of the event loop: those of 8,192 tokens, 21 each, take 0.3 s.
    """
    found = ["null"]
    for start in range(0, len(positions), POSITIONS_A_TURN):
        part = positions[start : start + POSITIONS_A_TURN]
        await texts.learn(model, token_ids_of(part))
        found += [json.dumps({one.token_id: _ranked(one, texts) for one in (*it.top, it.chosen)}) for it in part]
        await asyncio.sleep(0)
    return found


def _ranked(one: pb.TokenLogprob, texts: TokenTexts) -> dict[str, object]:
    return {"logprob": max(one.logprob, MIN_LOGPROB), "rank": one.rank, "decoded_token": texts[one.token_id]}


def token_ids_of(positions: Iterable[pb.TokenLogprobs]) -> Iterable[int]:
    return (one.token_id for position in positions for one in (position.chosen, *position.top))
