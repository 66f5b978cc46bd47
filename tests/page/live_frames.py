"""Frames of the feed and of a recording that the tests of the live view show."""

from typing import Any

Frame = dict[str, Any]

WORKER = {
    "state": "serving",
    "device_blocks": 40,
    "host_blocks": 8,
    "free_device": 34,
    "running": 1,
    "swapped": 1,
    "step_ms": 30.0,
    "tokens_per_second": 55.0,
    "losses": 0,
    "preemptions": 1,
    "error": "",
}


def request(state: str, **fields: Any) -> Frame:
    return {
        "tenant": "acme",
        "priority": 0,
        "adapter": "",
        "arrived": 1.0,
        "worker": "w1",
        "prompt_tokens": 100,
        "cached_tokens": 16,
        "computed_tokens": 100,
        "output_tokens": 7,
        "state": state,
        "preemptions": 0,
        "recomputes": 0,
        "moves": 0,
        "place": None,
        "reason": "",
    } | fields


SNAPSHOT: Frame = {
    "snapshot": True,
    "at": 2.0,
    "workers": {"w1": WORKER},
    "blocks": {"w1": {"device": [[0, "1112"], [10, "33"]], "host": [[5, "11"]]}},
    "requests": {
        "running": request("decode", tables={"0": [0, [0, 1, 3]]}),
        "sharing": request("prefill", tables={"0": [0, [2, 3]]}),
        "swapped": request("swapped", tables={"0": [0, [5, 6]]}),
        "behind": request("waiting", worker=None, place=1, tenant="blue", reason="requests before it wait"),
        "head": request("waiting", worker=None, place=0, priority=1, reason="it needs 7 blocks, and 3 are free"),
    },
    "totals": {"waiting": 2, "running": 2, "swapped": 1, "prompt_tokens": 500, "cached_tokens": 80}
    | {"output_tokens": 20, "preemptions": 1, "losses": 0},
    "events": [{"at": 1.5, "kind": "preempted", "text": "swapped preempted: its blocks were swapped to the host"}],
}


NEXT: Frame = {"snapshot": True, "at": 0.5, "workers": {"w1": WORKER}, "totals": {"running": 0, "waiting": 0}}
"""Of the engine that follows: its clock begins anew, and it knows no request."""

CHUNKS: list[Frame] = [
    {
        "from": start,
        "frames": [
            {
                "step": step,
                "at": step / 10,
                "decisions": [f"decision of step {step}"],
                "blocks": {"w1": {"device": [[0, "1" * step + "0" * (40 - step)]]}},
            }
            | ({"snapshot": True, "workers": {"w1": WORKER}, "totals": {}} if step == start else {})
            for step in range(start, start + 10)
        ],
    }
    for start in (1, 11, 21)
]
