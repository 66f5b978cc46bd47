"""The limits with which both services parse a form. Because the limits are equal, a worker accepts every form that the
scheduler accepts.
"""

from llguidance import LLParserLimits

MAX_SECONDS = 0.3
"""Time limit in seconds of CPU time.

In a front end the limit applies to compiling a form and finding the possible beginnings of its texts. In a worker the
limit applies to an output's next token, compilation included. 300 schemas, 100 expressions and 20 grammars took at most
0.003 s each, in a front end and in a worker. The vocabulary had 49,152 tokens.
"""


def parser_limits() -> LLParserLimits:
    """Limits below llguidance's defaults, because a client sends the form. Errors do not quote the form.

    Lexemes are not tested on every token in advance. Only a worker has the tokens, so the test would take longer in a
    worker and could fail only in a worker.
    """
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
