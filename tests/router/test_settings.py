"""Worker URLs are checked at the start."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stallfree_router.settings import DiscoverySettings


def test_worker_urls_are_split_at_commas_and_trimmed() -> None:
    settings = DiscoverySettings.model_validate({"worker_urls": " http://a:1/, dns+http://workers.ns.svc:8000 ,"})
    assert settings.worker_urls == ("http://a:1", "dns+http://workers.ns.svc:8000")


@pytest.mark.parametrize("url", ["a:1", "ftp://a:1", "http://", "dns+http://workers", "dns+https://workers:1"])
def test_a_wrong_worker_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="URL"):
        DiscoverySettings.model_validate({"worker_urls": url})
