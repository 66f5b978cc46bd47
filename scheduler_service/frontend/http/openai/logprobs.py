"""Log-probabilities in OpenAI's form."""

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


async def shown_columns(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[pb.TokenLogprobs],
    offset: int,
    *,
    as_token_ids: bool,
) -> tuple[str, int]:
    """The log-probabilities of a completion as JSON, and the offset behind its tokens. `offset`: characters before
    them. If several tokens have the same text, only the likeliest token is kept.
    """
    none = "null"

    def named(token_id: int) -> str:
        return f"token_id:{token_id}" if as_token_ids else texts[token_id]

    columns: list[list[str]] = [[], [], [], []]
    for start in range(0, len(token_ids), POSITIONS_A_TURN):
        stop = start + POSITIONS_A_TURN
        for token_id, position in zip(token_ids[start:stop], logprobs[start:stop], strict=True):
            text, own, top = texts[token_id], none, none
            if position.HasField("chosen"):  # the first token of a prompt has no log-probability
                own = json.dumps(max(position.chosen.logprob, MIN_LOGPROB))
                likeliest_last = (position.chosen, *reversed(position.top))
                top = json.dumps({named(one.token_id): max(one.logprob, MIN_LOGPROB) for one in likeliest_last})
            row = (json.dumps(named(token_id)), own, top, str(offset))
            for column, cell in zip(columns, row, strict=True):
                column.append(cell)
            offset += len(text)
        await asyncio.sleep(0)  # lets other tasks run
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    members = (f'"{name}": [{", ".join(cells)}]' for name, cells in zip(names, columns, strict=True))
    return f"{{{', '.join(members)}}}", offset


def _ranked(one: pb.TokenLogprob, texts: TokenTexts) -> dict[str, object]:
    return {"logprob": max(one.logprob, MIN_LOGPROB), "rank": one.rank, "decoded_token": texts[one.token_id]}


def token_ids_of(positions: Iterable[pb.TokenLogprobs]) -> Iterable[int]:
    return (one.token_id for position in positions for one in (position.chosen, *position.top))
