"""The limits within which both services read a form: what the scheduler has accepted, a worker can follow."""

from llguidance import LLParserLimits


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
