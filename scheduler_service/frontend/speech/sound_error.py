"""Errors about sounds that clients send."""


class SoundError(Exception):
    """A client's sound cannot be decoded. The error message is a sentence for the client."""


HEARD = "WAV, FLAC, MP3, OGG, MP4 and WebM are heard"


def unreadable() -> SoundError:
    """The error for a file whose header libsndfile or FFmpeg cannot read.

    The library's message is not shown, because messages such as "Operation not permitted" would mislead a client.
    """
    return SoundError(f"data is no sound file that can be read; {HEARD}")


def broken(seconds: float) -> SoundError:
    """The error for a file that becomes unreadable after `seconds` seconds of sound."""
    return SoundError(f"data is damaged or cut off after {seconds:.1f} s")
