"""Thirty-two prompts of every kind: short, long, code, other scripts, emoji."""

_PARAGRAPH = (
    "The lighthouse keeper had counted the ships for thirty years, and in all that time no two evenings had been "
    "alike. Some nights the fog came in so thick that the lamp lit only itself; on others the sea lay flat as glass. "
)

PROMPTS = [
    "Hello",
    "1 2 3 4 5",
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '#include <stdio.h>\n\nint main(void) {\n    printf("',
    "import numpy as np\n\nclass KalmanFilter:\n    def __init__(self, dim):",
    "<html>\n  <head>\n    <title>",
    '{"name": "Ada", "born": 1815, "fields": [',
    "Q: What is photosynthesis?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Die Würde des Menschen ist",
    "El cambio climático es uno de los",
    "Il était une fois une petite fille qui",
    "Съешь ещё этих мягких французских булок,",
    "春は、曙。やうやう白くなりゆく山際、",
    "人工智能的未来在于",
    "인공지능은 우리 삶을",
    "الذكاء الاصطناعي هو",
    "Η ζωή είναι",
    "🎉🎊 Congratulations! 🥳",
    "👩‍🚀 went to the 🌕 and saw",
    "x² + y² = z² means that",
    "A\tB\tC\n1\t2\t3\n4\t",
    "   leading spaces and    gaps   ",
    "\n\n\n",
    "Repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox",
    "List the planets in order from the sun:\n1.",
    _PARAGRAPH * 4 + "That night,",
    _PARAGRAPH * 12 + "In the end,",
    "Summarise the following text.\n\n" + _PARAGRAPH * 20 + "\n\nSummary:",
]
