"""The limits with which both services parse a form: a form that the scheduler accepts, a worker accepts too."""

from llguidance import LLParserLimits

MAX_SECONDS = 0.3
"""Seconds of CPU time.

In a front end it limits compiling a form and finding the possible beginnings of its texts. In a worker it limits an
output's next token, compilation included. Of 300 schemas, 100 expressions and 20 grammars none took more than
0.003 for either, with a vocabulary of 49,152.
"""


def parser_limits() -> LLParserLimits:
    """Limits below llguidance's defaults, because a form comes from a client. Errors do not quote the form.

    Lexemes are not tested on every token in advance. That would take longer in a worker, which knows the tokens, and
    could fail only there.
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
