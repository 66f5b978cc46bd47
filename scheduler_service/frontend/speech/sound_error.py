"""Errors about sounds."""


class SoundError(Exception):
    """Why a sound cannot be decoded: a sentence for the client."""


HEARD = "WAV, FLAC, MP3, OGG, MP4 and WebM are heard"


def unreadable() -> SoundError:
    """The error for a file whose head a library cannot read. A library's own messages, such as "Operation not
    permitted", mislead.
    """
    return SoundError(f"data is no sound file that can be read; {HEARD}")


def broken(seconds: float) -> SoundError:
    """The error for a file that cannot be read further."""
    return SoundError(f"data is damaged or cut off after {seconds:.1f} s")
