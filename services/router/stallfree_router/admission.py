"""Who is let in. Refuses at once what this router has no room for; called by generation.py alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stallfree_router.settings import AdmissionSettings
from stallfree_shared.drain import Drain
from stallfree_shared.errors import OverloadedError

_RETRY_AFTER_SECONDS = 1.0


class Admission:
    """Owns the count of calls that are being served."""

    def __init__(self, settings: AdmissionSettings, *, drain: Drain) -> None:
        self._max_in_flight = settings.max_in_flight_requests
        self._drain = drain
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A place for one call, free again when the block ends.

        Raises:
            DrainingError: this router is leaving.
            OverloadedError: all places are taken.
        """
        with self._drain.request():
            if self._in_flight >= self._max_in_flight:
                raise OverloadedError(
                    f"this router serves {self._in_flight} requests already, and {self._max_in_flight} at most",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            self._in_flight += 1
            try:
                yield
            finally:
                self._in_flight -= 1
