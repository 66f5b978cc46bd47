"""The limits within which both services read a form: what the scheduler has accepted, a worker can follow."""

from llguidance import LLParserLimits

MAX_SECONDS = 0.3
"""Seconds of CPU time: for a front end to compile a form and find out what its texts may begin with, and for a worker
of one output's next token, compiling its form included. Of 300 schemas, 100 expressions and 20 grammars none took more
than 0.003 for either, with a vocabulary of 49,152."""


def parser_limits() -> LLParserLimits:
    """Below llguidance's defaults, because a form comes from a client. Errors do not quote the form's inside.

    Lexemes are not tried on every token beforehand: that would take longer for a worker, which knows the tokens, and
    fail there alone.
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
