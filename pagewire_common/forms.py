"""The limits with which both services parse a form, so that a worker accepts every form that the scheduler accepts."""

from llguidance import LLParserLimits

MAX_SECONDS = 0.3
"""CPU seconds for compiling a form, and in a worker also the mask for one token.

300 schemas, 100 regular expressions and 20 grammars took at most 0.003 s each, with a vocabulary of 49,152 tokens.
"""


def parser_limits() -> LLParserLimits:
    """Limits below llguidance's defaults, because clients send forms. The parser's errors do not quote the form.

    The test of lexemes against every token is off: only workers have the vocabulary.
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
