"""Why vLLM's tests do not pass here: a table of reasons, and the page that counts tests by them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Result(NamedTuple):
    """`kind`: "passed", "failed", "skipped" or "not collected". `reason`: the error of the test."""

    test: str
    kind: str
    reason: str


REASONS: list[tuple[str, str, str]] = [
    ("pictures, videos, or sounds as input", r"multimodal|vision|_vlm|speech_to_text|test_image", r"image_url|'image"),
    (
        "routes between vLLM's own processes (render, derender, generate of tokens, weights, remote calls)",
        r"scale_out|entrypoints/rl/|dev/rpc|render|launchers|profile|stateful_sessions|test_structured_decisions",
        r"",
    ),
]
"""What a reason is, and regular expressions of the tests and of the errors that have it. The first that fits counts."""
OTHER = "other"


def reason_of(result: Result) -> str:
    for reason, tests, errors in REASONS:
        if (tests and re.search(tests, result.test)) or (errors and re.search(errors, result.reason)):
            return reason
    return OTHER


def report(results: Iterable[Result], version: str, models: Mapping[str, str]) -> str:
    """The page: counts of results, of reasons, and each file's counts."""
    results = list(results)
    kinds = Counter(result.kind for result in results)
    reasons = Counter(reason_of(result) for result in results if result.kind != "passed")
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        files[result.test.partition("::")[0]]["passed" if result.kind == "passed" else reason_of(result)] += 1
    names = ", ".join(f"{name}: {model}" for name, model in models.items())
    lines = [f"vLLM {version}; {names}.", "", "| result | tests |", "|---|---|"]
    lines += [f"| {kind} | {number} |" for kind, number in kinds.most_common()]
    lines += ["", "| reason | tests |", "|---|---|"]
    lines += [f"| {reason} | {number} |" for reason, number in reasons.most_common()]
    lines += ["", "| file | passed | not passed, by reason |", "|---|---|---|"]
    for file, counts in sorted(files.items()):
        others = "; ".join(f"{number} {reason}" for reason, number in counts.most_common() if reason != "passed")
        lines.append(f"| `{file}` | {counts['passed']} | {others} |")
    other = [result for result in results if result.kind != "passed" and reason_of(result) == OTHER]
    lines += ["", *(f"- `{result.test}`: {result.reason[:160]}" for result in other)]
    return "\n".join(lines) + "\n"
