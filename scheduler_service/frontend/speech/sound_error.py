"""The error of sounds."""


class SoundError(Exception):
    """Why a sound cannot be heard: a sentence for its sender."""
