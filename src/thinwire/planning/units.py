# SPDX-License-Identifier: Apache-2.0
"""Numbers as text: three significant digits and a fitting unit."""

_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))


def digits(value: float) -> str:
    """Three significant digits, never in powers of ten: 0.123, 12.3, 1230."""
    size = abs(value)
    # The limits are those at which rounding would give a fourth digit.
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0995 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Format a duration given in seconds: 120 µs, 41.2 ms, 3.40 s, 5 min 12 s, 2 h 05 min."""
    if abs(value) < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if abs(value) < 0.9995:
        return f"{digits(value * 1e3)} ms"
    if abs(value) < 119.5:
        return f"{digits(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def nbytes(value: float) -> str:
    """Format a number of bytes in decimal units: 812 B, 26.3 kB, 4.20 MB, 1.53 GB."""
    return _scaled(value, _BYTES, "B")


def rate(bits_per_second: float) -> str:
    """Format a link's speed: 100 Mbit/s, 1 Gbit/s."""
    for unit, size in _RATES:
        if bits_per_second >= size:
            return f"{bits_per_second / size:.4g} {unit}"
    return f"{bits_per_second:.4g} bit/s"


def score(value: float) -> str:
    """Format a loss or a metric, to four significant digits: 1.808, 24.10, 0.9312."""
    return f"{value:#.4g}" if abs(value) < 1000 else f"{value:.0f}"


def mark(value: float) -> str:
    """Format a chosen value, such as a target, without needless digits: 2.0, 1.75."""
    return f"{value:.1f}" if value == round(value, 1) else f"{value:g}"


def times(ratio: float) -> str:
    """Format a factor: 1.05×, 3.4×, 12×."""
    if ratio < 1.95:
        return f"{ratio:.2f}×"
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def tick(value: float, longest: float) -> str:
    """Format a duration on an axis that ends at `longest` seconds: the same unit for all marks, no needless zeros."""
    if value == 0:
        return "0"
    return f"{value * 1e3:.6g} ms" if longest < 2 else f"{value:.6g} s"


def share(part: float) -> str:
    """Format a fraction of one as a percentage; below 10 % with one decimal."""
    percent = 100 * part
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def count(value: float) -> str:
    """Format a whole number with thousands separators: 1,234,567."""
    return f"{round(value):,}"


def workers(number: int) -> str:
    """Format a number of workers: 1 worker, 4 workers."""
    return f"{number:,} worker{'s' * (number != 1)}"


def _scaled(value: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, size in units:
        if abs(value) >= 0.9995 * size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} {smallest}"
