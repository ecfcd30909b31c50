"""Admission: so many at once, and none once the process takes no more."""

from __future__ import annotations

import pytest

from stallfree_router.admission import Admission
from stallfree_router.settings import AdmissionSettings, RouterSettings
from stallfree_shared.drain import Drain
from stallfree_shared.errors import DrainingError, OverloadedError


def test_a_place_is_free_again_after_any_end() -> None:
    drain = Drain()
    admission = Admission(AdmissionSettings(max_in_flight_requests=1), drain=drain)
    with admission.admitted():
        assert (admission.in_flight, drain.in_flight) == (1, 1)
        with pytest.raises(OverloadedError) as refusal, admission.admitted():
            pass
        assert refusal.value.retry_after_seconds == 1
    with pytest.raises(LookupError), admission.admitted():
        raise LookupError
    assert (admission.in_flight, drain.in_flight) == (0, 0)


async def test_nothing_is_admitted_once_the_process_takes_no_more() -> None:
    drain = Drain()
    admission = Admission(AdmissionSettings(), drain=drain)
    await drain.run(RouterSettings(drain_delay_seconds=0))
    with pytest.raises(DrainingError), admission.admitted():
        pass
    assert admission.in_flight == 0
