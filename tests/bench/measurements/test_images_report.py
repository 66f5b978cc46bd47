"""The report about images says how much better pagewire is, whichever way a figure counts."""

from bench.serving.images import table


def test_a_ratio_above_one_is_better() -> None:
    shown = table({
        "pagewire": {"images/s": 3.0, "first token, ms": 10.0, "only ours": 1.0},
        "vLLM": {"images/s": 2.0, "first token, ms": 40.0},
        "transformers": {"error": "it does not start"},
    })  # fmt: skip
    assert shown.startswith("| figure | pagewire | vLLM | transformers | ratio to vLLM | ratio to transformers |")
    assert "| images/s | 3 | 2 |  | 1.50 |  |" in shown
    assert "| first token, ms | 10 | 40 |  | 4.00 |  |" in shown
    assert "| error |  |  | it does not start |  |  |" in shown
