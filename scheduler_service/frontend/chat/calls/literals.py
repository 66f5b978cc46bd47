"""Converts values that are written almost as in JSON to JSON: Python's literals, and values with marks around strings.

Brackets and strings are logged as they come, numbers and words when they are complete.
"""

import json
import re

from scheduler_service.frontend.chat.calls.call_reader import MAX_NAME, Reading
from scheduler_service.frontend.chat.tape import Reader, mark_finder

_MAX_DEPTH = 32
_MAX_WORD = 400
_WORD_ENDS = ",:)]} \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
            "\\": "\\", "'": "'", '"': '"', "/": "/"}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def json_of(text: str) -> str:
    """A text between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class LiteralReader:
    """Reads values. `quote`: the mark around strings; "" for Python's quotes and escapes."""

    def __init__(self, reading: Reading, quote: str) -> None:
        self._reading, self._tape, self._quote = reading, reading.tape, quote

    def value(self, depth: int = 0) -> Reader:
        """Log the next value as JSON. Returns whether the value is complete."""
        tape, log = self._tape, self._reading.log
        character = yield from tape.peek()
        quotes = (self._quote,) if self._quote else ('"', "'")
        for quote in quotes:
            if character == quote[0] and (yield from tape.literal(quote)):
                return (yield from self._string(quote))
        if character not in _CLOSING or not character:
            word = yield from tape.until(_WORD_ENDS, _MAX_WORD)
            text = None if not word else self._word(word)
            if text is None:
                return False
            log.arguments(text)
            return True
        if depth >= _MAX_DEPTH:
            return False
        tape.at += 1
        is_object, closing = character == "{", _CLOSING[character]
        log.arguments("{" if is_object else "[")
        return (yield from self.items(closing, depth + 1, is_object=is_object))

    def items(self, closing: str, depth: int, *, is_object: bool) -> Reader:
        """Log the items of a list or an object, and the bracket that closes them."""
        tape, log = self._tape, self._reading.log
        is_first = True
        while True:
            yield from tape.space()
            if (yield from tape.literal(closing)):
                log.arguments("}" if is_object else "]")
                return True
            if not is_first:
                if not (yield from tape.literal(",")):
                    return False
                yield from tape.space()
                if (yield from tape.literal(closing)):  # Python allows a comma behind the last item
                    log.arguments("}" if is_object else "]")
                    return True
                if not (yield from tape.peek()):
                    return False
                log.arguments(", ")
            if is_object and not (yield from self._key()):
                return False
            if not (yield from self.value(depth)):
                return False
            is_first = False

    def _key(self) -> Reader:
        tape, log = self._tape, self._reading.log
        character = yield from tape.peek()
        if character in ('"', "'", self._quote[:1]) and character:
            if not (yield from self.value()):
                return False
        else:
            key = yield from tape.until(_WORD_ENDS, MAX_NAME)
            if not key:
                return False
            log.arguments(f'"{json_of(key)}"')
        yield from tape.space()
        if not (yield from tape.literal(":")):
            return False
        log.arguments(": ")
        yield from tape.space()
        return True

    def _word(self, word: str) -> str | None:
        if word in _WORDS:
            return _WORDS[word]
        if _JSON_NUMBER.fullmatch(word):
            return word
        try:
            return str(int(word, 0))
        except ValueError:
            pass
        try:
            number = float(word)
        except ValueError:
            return f'"{json_of(word)}"' if self._quote else None
        return json.dumps(number) if number - number == 0 else None

    def _string(self, quote: str) -> Reader:
        """Log a string without its opening quote."""
        tape, log = self._tape, self._reading.log
        log.arguments('"')
        finder = mark_finder(frozenset((quote,) if self._quote else (quote, "\\")))
        while True:
            end, mark = finder.find(tape.text, tape.at, is_whole=False)
            log.arguments(json_of(tape.text[tape.at : end]))
            tape.at = end + len(mark)
            if mark == quote:
                log.arguments('"')
                return True
            if mark and not (yield from self._escape()):
                return False
            if not mark:
                if tape.is_whole:
                    tape.skip_rest()
                    return False
                yield

    def _escape(self) -> Reader:
        """Log a character that is escaped with a backslash in Python."""
        tape, log = self._tape, self._reading.log
        character = yield from tape.peek()
        if not character:
            return False
        tape.at += 1
        if character in _ESCAPES:
            log.arguments(json_of(_ESCAPES[character]))
        elif character in _HEX:
            digits = ""
            while len(digits) < _HEX[character]:
                digit = yield from tape.peek()
                if not digit:
                    return False
                if digit not in "0123456789abcdefABCDEF":
                    break
                digits += digit
                tape.at += 1
            code = int(digits, 16) if len(digits) == _HEX[character] else -1
            if not 0 <= code <= 0x10FFFF:
                log.arguments(json_of(f"\\{character}{digits}"))
            else:
                log.arguments(f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else json_of(chr(code)))
        else:
            log.arguments(json_of(f"\\{character}"))
        return True
