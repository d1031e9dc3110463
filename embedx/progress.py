"""How far the work is: a bar on a terminal, a plain log line now and then elsewhere."""

import logging
import sys
import time
from types import TracebackType

log = logging.getLogger("embedx")

LINE_EVERY_S = 10.0
shows_bars = True  # on a terminal; not where several processes share it


class Progress:
    """Counts samples of a long loop; a ``with`` block.

    Args:
        total: Samples in all.
        done: Samples that were done before, when resuming.
        what: What is being done, one word.
        unit: What a sample is, several of them.
    """

    def __init__(self, total: int, *, what: str, done: int = 0, unit: str = "images") -> None:
        self._total = total
        self._done = self._first = done
        self._what = what
        self._unit = unit
        self._started = self._logged = time.monotonic()
        self._bar = None
        if shows_bars and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=what,
                unit=f" {unit}",
                dynamic_ncols=True,
                leave=False,
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def rate(self) -> float:
        """Samples a second since the start of this loop."""
        return (self._done - self._first) / max(time.monotonic() - self._started, 1e-9)

    def advance(self, n: int) -> None:
        """Count ``n`` more samples."""
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
            return
        now = time.monotonic()
        if now - self._logged >= LINE_EVERY_S and self._done < self._total:
            self._logged = now
            left_s = (self._total - self._done) / max(self.rate, 1e-9)
            log.info(
                "%s: %s of %s %s, %.1f a second, %.0f s left",
                self._what,
                f"{self._done:,}",
                f"{self._total:,}",
                self._unit,
                self.rate,
                left_s,
            )
