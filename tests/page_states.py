"""The state that a page builds from the frames of the feed, in the simplest way."""

from typing import Any

RATES = ("step_ms", "tokens_per_second", "layer_groups")
"""Fields of a worker that are measured once a second."""

State = dict[str, Any]


def new_state() -> State:
    return {"workers": {}, "pools": {}, "requests": {}, "totals": {}}


def apply_frame(state: State, frame: dict[str, Any]) -> None:
    if frame.get("snapshot"):
        state.update(new_state())
    state["at"] = frame["at"]
    for worker, fields in frame.get("workers", {}).items():
        if fields is None:
            del state["workers"][worker], state["pools"][worker]
            continue
        known = state["workers"].setdefault(worker, {})
        known |= fields
        pools = state["pools"].setdefault(worker, {})
        for pool, size in (("device", known["device_blocks"]), ("host", known["host_blocks"])):
            if pool not in pools or len(pools[pool]) != size:
                pools[pool] = ["0"] * size
    for worker, pools in frame.get("blocks", {}).items():
        for pool, runs in pools.items():
            for first, digits in runs:
                assert first + len(digits) <= len(state["pools"][worker][pool])
                state["pools"][worker][pool][first : first + len(digits)] = digits
    for request, fields in frame.get("requests", {}).items():
        if fields is None:
            del state["requests"][request]
            continue
        if "arrived" in fields:  # a request that is new to the page
            state["requests"][request] = {"tables": {}}
        known = state["requests"][request]
        known |= {name: value for name, value in fields.items() if name != "tables"}
        for output, (start, blocks) in fields.get("tables", {}).items():
            table = known["tables"].setdefault(output, [])
            table[start:] = blocks
            if not table:
                del known["tables"][output]
    state["totals"] |= frame.get("totals", {})


def state_of(frames: list[dict[str, Any]]) -> State:
    state = new_state()
    for frame in frames:
        apply_frame(state, frame)
    return state
