"""A router in front of scripted workers, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.router_under_test import RouterUnderTest, router_under_test


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with router_under_test() as router:
        yield router


@pytest.fixture
async def client(router: RouterUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    async with router.client() as client:
        yield client
