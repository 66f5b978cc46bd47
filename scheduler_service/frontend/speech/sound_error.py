"""Errors about sounds that clients send."""


class SoundError(Exception):
    """A client's sound cannot be decoded. The message is a sentence for the client."""


HEARD = "WAV, FLAC, MP3, OGG, MP4 and WebM are supported"


def unreadable() -> SoundError:
    """The error for an unreadable header. Libraries' messages, such as "Operation not permitted", mislead clients."""
    return SoundError(f"data is not a readable sound file; {HEARD}")


def broken(seconds: float) -> SoundError:
    return SoundError(f"data is damaged or cut off after {seconds:.1f} s")
