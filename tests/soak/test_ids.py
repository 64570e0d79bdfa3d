"""Long campaigns for AsyncCmId and SyncCmId, run by `make soak`."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from campaign import Campaign, finish
from helpers import TIME_LIMIT

from aiordma import AsyncCmId, RdmaError, Rejected, SyncCmId
from aiordma.rdmacm import AddrInfo, DeviceAddress, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

pytestmark = pytest.mark.asyncio

SMALL = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)


async def answer_all(listener: SyncCmId, figures: Counter[str]) -> None:
    """Accept every request, receive one message, and disconnect."""
    async for request in listener:
        try:
            async with asyncio.timeout(TIME_LIMIT), request:
                await request.create_qp(SMALL)
                region = await request.reg_msgs(bytearray(64))
                request.cm_id.post_recv(1, region, 0, 64)
                await request.accept()
                await request.get_recv_comp()
                figures["answered"] += 1
        except RdmaError:
            figures["peer disconnected before the accept"] += 1


async def run_client(server: tuple[str, int], campaign: Campaign) -> None:
    """Connect by one of two methods, send one message, and disconnect."""
    info = AddrInfo(destination=parse_address(*server))
    by_hand = campaign.chance.random() < 0.5
    async with await (SyncCmId.create() if by_hand else SyncCmId.create_ep(info, init=SMALL)) as cm:
        if by_hand:
            await resolve(cm, server)
        region = await cm.reg_msgs(bytearray(64))
        with suppress(RdmaError):
            await cm.connect()
            cm.cm_id.post_send(1, region, 0, 64)
            await cm.get_send_comp()
            await cm.disconnect()
            campaign.figures["messages sent"] += 1


async def resolve(cm: AsyncCmId | SyncCmId, server: tuple[str, int]) -> None:
    """Prepare an id for connect()."""
    await cm.resolve_addr(parse_address(*server))
    await cm.resolve_route()
    await cm.create_qp(SMALL)


async def test_synchronous_ids_cancelled_at_random_moments(
    address: DeviceAddress, campaign: Campaign
) -> None:
    listener = await SyncCmId.create()
    listener.bind_addr(parse_address(address.host))
    listener.listen()
    server = listener.local_address
    answering = asyncio.create_task(answer_all(listener, campaign.figures))
    for _ in campaign.rounds():
        tasks = [asyncio.create_task(run_client(server, campaign)) for _ in range(4)]
        for task in tasks:
            await asyncio.sleep(campaign.chance.uniform(0, 0.1))
            if campaign.chance.random() < 0.7:
                task.cancel()
                campaign.figures["cancelled"] += 1
        await finish(tasks)
        for task in tasks:
            assert task.cancelled() or task.exception() is None, task
    await listener.aclose()
    async with asyncio.timeout(TIME_LIMIT):
        await answering
    assert campaign.figures["answered"]


async def test_listener_that_migrates_repeatedly(
    address: DeviceAddress, campaign: Campaign
) -> None:
    """Migrate a listener between loop and threads while clients connect. None is lost."""
    figures, stop = campaign.figures, asyncio.Event()

    async def keep_connecting(server: tuple[str, int]) -> None:
        while not stop.is_set():
            async with await AsyncCmId.create() as cm:
                await resolve(cm, server)
                answer = b""
                try:
                    async with asyncio.timeout(TIME_LIMIT):
                        await cm.connect()
                except Rejected as rejected:
                    answer = rejected.private_data
                except (RdmaError, TimeoutError):
                    pass  # the request was not answered
                if answer.startswith(b"rejected"):
                    figures["answered"] += 1
                elif not stop.is_set():  # otherwise the closing listener has rejected it
                    figures["lost in a migration"] += 1

    async def reject_for_a_while(listener: AsyncCmId | SyncCmId) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(campaign.chance.uniform(0, 0.1)):
                while True:
                    request = await listener.get_request()
                    request.reject(b"rejected")
                    request.abort()

    listener = await AsyncCmId.create()
    listener.bind_addr(parse_address(address.host))
    listener.listen()
    server = listener.local_address
    clients = [asyncio.create_task(keep_connecting(server)) for _ in range(3)]
    for _ in campaign.rounds():
        synchronous = await listener.migrate(None)
        await reject_for_a_while(synchronous)
        listener = await synchronous.migrate()
        await reject_for_a_while(listener)
    stop.set()
    await listener.aclose()
    async with asyncio.timeout(2 * TIME_LIMIT):
        await asyncio.gather(*clients)
    assert figures["answered"]
    assert not figures["lost in a migration"]
