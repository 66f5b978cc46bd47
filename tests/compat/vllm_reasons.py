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
    (
        "pictures, videos or sounds",
        r"multimodal|vision|_vlm|test_image|speech_to_text|image_extra",
        r"image_url|vllm-public-assets",
    ),
    (
        "routes between vLLM's processes, and those of its experiments",
        r"scale_out|/rl/|/dev/|launchers|/generate/|decisions|sagemaker|profile|namespace_tool|test_mcp",
        r"",
    ),
    (
        "packages or files that the run has not",
        r"llm/|correctness",
        r"ModuleNotFound|ImportError|ConnectionError|LocalEntry|hf_hub|could not import|torchvision|\[Errno 2\]",
    ),
    ("models of other families: their tokens, vectors or marks", r"late_interaction|late_chunk|chunking|long_text", ""),
    ("chats to a model without a chat template", r"pooling/embed/test_online.py::test_(invocations_)?chat_request", ""),
    (
        "models of other families: their tokens, vectors or marks",
        r"bi_encoder_online.*::test_score_api_max_model_len",
        r"At index 0 diff|16 == 17|160 ==|384 == 768|156 == 128",
    ),
    ("models of other families: their tokens, vectors or marks", r"mistral", r"Skipping config|GPU|GSM"),
    ("vLLM skips the test, or expects it to fail", r"", r"^Skipped|flaky|XFailed"),
    ("Cohere's chats", r"cohere/", r""),
    ("classes of texts and rewards of tokens (/classify, tasks of /pooling)", r"classif|/reward/|pooling_not", r""),
    ("adapters from paths: operators load adapters over gRPC", r"serve/lora|models/test_models", r""),
    (
        "responses are stored with store: true alone, and not in the background",
        r"",
        r"no stored response|^.{0,60}background",
    ),
    ("responses are stored with store: true alone, and not in the background", r"background|test_cancel", r""),
    (
        "fields of vLLM that are refused by name",
        r"prompt_embeds|extra_fields_allowed|custom_role|chat_echo|max_tokens_per_doc",
        r"not supported here|no field|runs no tools of its own",
    ),
    ("sizes that are refused by vLLM and taken here", r"bigger_truncation|matryoshka", r""),
    ("a longer context than that of the run", r"", r"10000; together"),
    ("levels of reasoning, which the model's chat template lacks", r"", r"no levels of reasoning"),
    (
        "vLLM's words or names for an error",
        r"max_model_len|validation",
        r"BadRequestError'|literal_error|than_equal|Regex pattern|reduce the length",
    ),
    (
        "flags of vLLM's server",
        r"id_header|root_path|unit_tests|tensorizer|force_include|orca|per_request|as_token_ids|use_activation|remote_vllm",
        "",
    ),
    (
        "a usage without details or of other events, or content beside the end of a stream",
        r"chat_streaming",
        r"CompletionUsa|Usage\(cache|= MessageDeltaUsage",
    ),
    ("counters of vLLM, from 0, and its version", r"test_metrics|show_version", r""),
    (
        "the words of another model: with thinking, with calls, longer or shorter",
        r"reasoning|tool|function_call|thinking|test_chat|test_basic|structured_output|harmony|return_token_ids|rerank",
        r"'stop' == 'length'|'completed' == 'incomplete'|2 = len\(\{'",
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
    numbers = {reason: number for number, (reason, _) in enumerate(reasons.most_common(), 1)}
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        files[result.test.partition("::")[0]]["" if result.kind == "passed" else reason_of(result)] += 1
    names = ", ".join(f"{name} {model}" for name, model in models.items())
    lines = ["# vLLM's HTTP tests", "", f"`make compat CLIENT=vllm`; vLLM {version}; {names}.", ""]
    lines += ["| result | tests |", "|---|---|", *(f"| {kind} | {number} |" for kind, number in kinds.most_common())]
    lines += ["", "| | reason | tests |", "|---|---|---|"]
    lines += [f"| {numbers[reason]} | {reason} | {number} |" for reason, number in reasons.most_common()]
    lines += ["", "| file | passed | not passed, each with the number of its reason |", "|---|---|---|"]
    for file, counts in sorted(files.items()):
        others = ", ".join(f"{count} ({numbers[reason]})" for reason, count in counts.most_common() if reason)
        lines.append(f"| `{file}` | {counts['']} | {others} |")
    other = [result for result in results if result.kind != "passed" and reason_of(result) == OTHER]
    lines += ["", *(f"- `{result.test}`: {result.reason[:160]}" for result in other)]
    return "\n".join(lines).rstrip() + "\n"
