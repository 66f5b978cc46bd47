"""The limits with which both services parse a form. Because the limits are equal, a worker accepts every form that the
scheduler accepts.
"""

from llguidance import LLParserLimits

MAX_SECONDS = 0.3
"""Maximum CPU time in seconds for parsing an output form.

In a front end the limit applies to compiling a form and finding the possible beginnings of texts that match it. In a
worker the limit applies to the mask for one token of an output, including compiling the form. 300 schemas, 100 regular
expressions and 20 grammars took at most 0.003 s each, in a front end and in a worker. In this measurement the
vocabulary had 49,152 tokens.
"""


def parser_limits() -> LLParserLimits:
    """Limits below llguidance's defaults, because a client sends the form. The parser's errors do not quote the form.

    llguidance's test of the form's lexemes against every token of the vocabulary is switched off. Only workers have the
    vocabulary, so the test would cost time only in a worker, and a form could fail only there.
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
