"""Numbers as short text: any value there is, huge, tiny, NaN or missing, in a width that is known beforehand."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Sequence

MISSING = "-"
"""Not measured. What was measured and is not finite says so."""
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans({**dict(zip(_SPARKS, "_.-=+*%#", strict=True)), "…": "~", "·": ".", "→": ">", "│": "|", "─": "-"})
_FILL = "\0"
"""Stands behind a letter of two columns while lines are measured in letters."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, *, width: int = 6, decimals: int = 3) -> str:
    """As many decimals as fit, an exponent for what is tiny or huge; `#` where nothing fits."""
    if value is None or not math.isfinite(value):
        return _special(value)
    plain = next((text for digits in range(decimals, -1, -1) if len(text := f"{value:.{digits}f}") <= width), "")
    vanishes = bool(plain) and value != 0 and not plain.strip("-0.")
    if plain and not vanishes:
        return plain
    short = next((text for digits in (1, 0) if len(text := f"{value:.{digits}e}") <= width), "")
    return short or ("0" if vanishes else "#" * width)


def count(value: float | None, *, width: int = 5) -> str:
    """A whole number, with k, M, G or T where it is large."""
    if value is None or not math.isfinite(value):
        return _special(value)
    if len(text := f"{value:.0f}") <= min(width, 4):
        return text
    for unit, prefix in _PREFIXES:
        if abs(value) >= unit:
            texts = (f"{value / unit:.{digits}f}{prefix}" for digits in (1, 0))
            return next((text for text in texts if len(text) <= width), number(value, width=width))
    return text


def percent(value: float | None) -> str:
    """A share in percent, in at most 5 characters; what is far from one is a plain number."""
    if value is None or not math.isfinite(value):
        return _special(value)
    if 0 < abs(value) < 0.0005:
        return "<0.1%" if value > 0 else ">-.1%"
    texts = (f"{100 * value:.{digits}f}%" for digits in (1, 0))
    return next((text for text in texts if len(text) <= 5), number(value, width=5))


def duration(seconds: float | None) -> str:
    """In at most 6 characters: 45s, 3m05s, 2h14m, 3d04h."""
    if seconds is None or not math.isfinite(seconds):
        return _special(seconds)
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    for below, unit, per, rest, per_rest in ((3600, "m", 60, "s", 1), (86400, "h", 3600, "m", 60), (8640000, "d", 86400, "h", 3600)):
        if whole < below:
            return f"{whole // per}{unit}{whole % per // per_rest:02d}{rest}"
    return ">99d"


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest of them; a space for one that is not finite."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (high - low) or 1.0
    return "".join(_SPARKS[_level((value - low) / scale)] if math.isfinite(value) else " " for value in values)


def _level(share: float) -> int:
    return min(len(_SPARKS) - 1, int(share * len(_SPARKS))) if math.isfinite(share) else 0


def columns(text: str) -> int:
    """How many columns a terminal gives it: East Asian letters and pictures take two."""
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def shorten(text: str, width: int) -> str:
    """At most `width` columns of it on one line."""
    flat = printable(" ".join(text.split()))
    if columns(flat) <= width:
        return flat
    while columns(flat) >= width:
        flat = flat[:-1]
    return flat + "…"


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """A sentence in lines of at most `width` columns, those after the first indented. Line ends stay."""
    def wide(letter: str) -> str:
        return letter + _FILL * (columns(letter) - 1)

    lines = ["".join(map(wide, line)) for line in printable(text).split("\n")]
    wrapper = _Wrapper(width, subsequent_indent=indent, break_on_hyphens=False)
    pieces = [wrapper.wrap(line) or [""] for line in lines]
    return [piece.replace(_FILL, "") for line in pieces for piece in line]


class _Wrapper(textwrap.TextWrapper):
    """Cuts no wide letter from the filling that stands for its second column."""

    def _handle_long_word(self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int) -> None:
        room = width - cur_len
        is_wide = reversed_chunks[-1][room:room + 1] == _FILL
        super()._handle_long_word(reversed_chunks, cur_line, cur_len, width - is_wide)


def printable(text: str) -> str:
    """The text without what would move a cursor; line ends stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def encodable(text: str, encoding: str) -> str:
    """The text as a terminal of this encoding can show it, of the same length."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def _special(value: float | None) -> str:
    return MISSING if value is None else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
