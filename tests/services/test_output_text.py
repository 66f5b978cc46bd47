from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.text.output_text import OutputText
from scheduler_service.frontend.text.tokenization import Tokenizer

# Bytes of characters of one to four, some of which form none, and stop strings that are often there in part.
TOKENS = st.lists(st.integers(0, 258), max_size=40) | st.lists(st.sampled_from([67, 68, 69, 131, 199]), max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(TOKENS, STOPS, st.integers(0, 5), st.integers(0, 40))
def test_wherever_an_output_is_taken_up_its_text_is_the_same(
    byte_tokenizer: Tokenizer, token_ids: list[int], stop: list[str], min_tokens: int, length: int
) -> None:
    def text() -> OutputText:
        return OutputText(byte_tokenizer, [70, 71], stop=stop, min_tokens=min_tokens)

    whole = text()
    steps = []
    for token_id in token_ids:
        steps.append(whole.step(token_id))
        if steps[-1][1] is not None:
            break
    else:
        steps.append((whole.flush(), None))
    resumed = text()
    length = min(length, len(steps) - 1)
    assert resumed.replay(token_ids[:length]) is None
    for token_id, (shown, found) in zip(token_ids[length:], steps[length:], strict=False):
        assert resumed.step(token_id) == (shown, found)
    if not steps[-1][1]:
        assert resumed.flush() == steps[-1][0]


def test_a_stop_string_among_what_came_before_is_told(byte_tokenizer: Tokenizer) -> None:
    assert OutputText(byte_tokenizer, [70], stop=["gg"]).replay([73, 73, 73]) == "gg"
    assert OutputText(byte_tokenizer, [70], stop=["gg"], min_tokens=2).replay([73, 73, 73]) is None
    assert OutputText(None, [70], stop=["gg"]).replay([73, 73, 73]) is None
