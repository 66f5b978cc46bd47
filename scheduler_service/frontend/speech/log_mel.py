"""Log-mel spectrogram, Whisper's input: the loudness of a sound in frequency bands, 100 times a second.

A frame is the power spectrum of 25 ms, every 10 ms, in 80 or 128 bands of equal width on Slaney's mel scale. Values are
logarithms of base 10, raised to at least the largest value minus 8 (Radford et al., 2023). Computing a window of 30 s
takes 8 ms with numpy (AMD EPYC), here rather than on workers, which need their CPU time for steps.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from scheduler_service.frontend.speech.sound import SAMPLE_RATE, Samples

WINDOW = 30 * SAMPLE_RATE
"""Samples of a window of 30 s."""
FRAME, HOP = 400, 160
"""Samples of a frame, and between the starts of two frames."""
NUM_FRAMES = WINDOW // HOP
FRAMES_AT_ONCE = 500
"""Frames whose spectra are computed together. For all 3,000 at once, numpy would take 23 MB."""

Matrix = npt.NDArray[np.float32]


def log_mel(samples: Samples, num_bands: int) -> Matrix:
    """The spectrogram of a window, [num_bands, 3000] float32. Silence fills up a shorter window."""
    padded = np.zeros(WINDOW + FRAME, dtype=np.float32)
    padded[FRAME // 2 : FRAME // 2 + len(samples)] = samples
    # Mirrored samples at both ends centre the first frame on the first sample.
    padded[: FRAME // 2] = padded[FRAME : FRAME // 2 : -1]
    padded[-FRAME // 2 :] = padded[-FRAME // 2 - 2 : -FRAME - 2 : -1]
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[: NUM_FRAMES * HOP : HOP]
    power = np.empty((NUM_FRAMES, FRAME // 2 + 1), dtype=np.float32)
    for start in range(0, NUM_FRAMES, FRAMES_AT_ONCE):
        some = slice(start, start + FRAMES_AT_ONCE)
        spectrum = np.fft.rfft(frames[some] * _hann())
        power[some] = spectrum.real**2 + spectrum.imag**2
    levels = np.log10(np.maximum(_bands(num_bands) @ power.T, 1e-10))
    levels = np.maximum(levels, levels.max() - 8.0)
    return np.ascontiguousarray((levels + 4.0) / 4.0, dtype=np.float32)


@cache
def _hann() -> Matrix:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32)


@cache
def _bands(num_bands: int) -> Matrix:
    """Weights of the frequencies in each band, [num_bands, FRAME / 2 + 1]: triangles of equal area between the centres
    of the neighbouring bands.
    """
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), num_bands + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return (np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)).astype(np.float32)


_LINEAR_HERTZ, _LINEAR_MEL = 1000.0, 15.0
"""Slaney's mel scale is linear up to this frequency, in hertz and in mel. Above, a factor of 6.4 is 27 mel."""
_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    assert hertz >= _LINEAR_HERTZ
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HERTZ) / _STEP)


def _hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    linear = mel * (_LINEAR_HERTZ / _LINEAR_MEL)
    return np.where(mel < _LINEAR_MEL, linear, _LINEAR_HERTZ * np.exp(_STEP * (mel - _LINEAR_MEL)))
