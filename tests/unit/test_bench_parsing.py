"""Command lines and output of perftest, rdmacm-utils and pyverbs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aiordma.bench import perftest, pyverbs, rdmacm_utils
from aiordma.bench.errors import BenchError
from aiordma.bench.plan import Work
from aiordma.bench.sample import Sample

RULE = "-" * 87 + "\n"
SETUP = f"""\
{RULE}                    Send Latency Test
 Dual-port       : OFF\t\tDevice         : rxe0
{RULE} local address: LID 0000 QPN 0x0011 PSN 0xd3f4d8
{RULE}"""
LATENCY = f"""\
{SETUP} #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\
    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]\x20
 64      1000          10.11        152.00       11.50  \t       12.25     \t4.10\
   \t\t20.00   \t\t90.50 \x20
{RULE}"""
BANDWIDTH = f"""\
{SETUP} #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      512              812.50             800.00\t\t   0.012800
{RULE}"""
GIGABITS = BANDWIDTH.replace("[MB/sec]", "[Gb/sec]").replace("800.00", "8.00  ")
CMTIME = """\
creating id
creating qp
connecting
destroying id
step              total ms     max ms     min us  us / conn
create id    :        2.00       0.10      10.00      20.00
resolve addr :        8.00       5.10      10.00      80.00
resolve route:       10.00       5.10      10.00     100.00
create qp    :       20.00       0.90      90.00     200.00
connect      :       50.00      40.00    9000.00     500.00
disconnect   :      100.00      90.00    9000.00    1000.00
destroy      :       10.00       0.40      30.00     100.00
"""
NEWER_CMTIME = """\
Connect (20) QPs test
	Connecting
qp_conn                20
threads                 1
step             avg/iter  total(us)    us/conn    sum(us)    max(us)    min(us)
full connect         1396      29000          0          0      27677       9042
create id              12       1000         12        250         68          6
bind addr               0          0          0          0          0          0
resolve addr           56       3000        150       3008        641         40
resolve route          28       2000        153       3071        294         52
create qp             123       4000        119       2392        428         73
init qp attr            0          0          4         80         22          2
cm connect           1161      20000      14141     282826      22812       4346
disconnect             33       6000         14        298        101          8
destroy id             16       4000         16        338         77         11
Connect (20) test - no QPs
	Connecting
step             avg/iter  total(us)    us/conn    sum(us)    max(us)    min(us)
create id              12    9999999         12        250         68          6
"""
RSTREAM = """\
name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer
custom    64      1       1k      125k        0.05s      0.02      25.50
"""
PYVERBS = json.dumps({"times": [4000, 1000, 3000, 2000], "cpu": 0.00004})
Parse = Callable[[str], Sample]


def cmtime(output: str) -> Sample:
    return rdmacm_utils.parse_cmtime(output, 100)


def rstream_bandwidth(output: str) -> Sample:
    return rdmacm_utils.parse_rstream_bandwidth(output, 65536)


@pytest.mark.parametrize(
    ("parse", "output", "value"),
    [
        (perftest.parse_latency, LATENCY, 23.0),  # the times are doubled to round trips
        (perftest.parse_bandwidth, BANDWIDTH, 838.8608),  # its megabytes are mebibytes
        (perftest.parse_bandwidth, BANDWIDTH.replace("[MB/sec]", "[MiB/sec]"), 838.8608),
        (perftest.parse_bandwidth, GIGABITS, 1000.0),
        (perftest.parse_rate, BANDWIDTH, 12800.0),
        (cmtime, CMTIME, 100 / 0.2),  # connections by the time of all steps
        (cmtime, NEWER_CMTIME, 100 / 0.04),
        (rdmacm_utils.parse_rstream_latency, RSTREAM, 51.0),
        (rstream_bandwidth, RSTREAM, 65536 / 25.5),
        (pyverbs.parse, PYVERBS, 2.5),
    ],
)
def test_the_value_of_an_output(parse: Parse, output: str, value: float) -> None:
    assert parse(output).value == pytest.approx(value)


def test_details_of_an_output() -> None:
    expected = {"min": 20.22, "50": 23.0, "99": 40.0, "99.9": 181.0, "max": 304.0}
    assert perftest.parse_latency(LATENCY).percentiles == pytest.approx(expected)
    assert cmtime(CMTIME).details["resolve_addr_ms"] == 8.0
    assert pyverbs.parse(PYVERBS).client_cpu == 10.0


REJECTED = "connecting\nevent: RDMA_CM_EVENT_REJECTED, error: 8\n"


@pytest.mark.parametrize(
    ("parse", "output", "error"),
    [
        (perftest.parse_latency, "", "no result line"),
        (perftest.parse_latency, SETUP, "no result line"),
        (perftest.parse_latency, LATENCY.partition(" 64  ")[0], "no result line"),
        (perftest.parse_latency, "no device\n", "no result line"),
        (cmtime, "", "no table"),
        (cmtime, CMTIME.replace("connecting\n", REJECTED), "REJECTED"),
        (cmtime, CMTIME.replace("creating qp\n", "failure creating qp\n"), "failure"),
        (cmtime, CMTIME.partition("connect  ")[0], "no table"),
        (cmtime, NEWER_CMTIME.partition("cm connect")[0], "no table"),
        (rdmacm_utils.parse_rstream_latency, RSTREAM.partition("custom")[0], "no result line"),
        (pyverbs.parse, "", "Expecting value"),
    ],
)
def test_output_without_a_result_raises(parse: Parse, output: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse(output)


def test_command_lines() -> None:
    work = Work("bandwidth", operation="write", size=4096, count=512)
    common = ["ib_write_bw", "-R", "-F", "-d", "rxe0", "-p", "7", "-s", "4096", "-n", "512"]
    host = "10.7.1.1"
    assert perftest.commands(work, "rxe0", 7, host, events=False) == (common, [*common, host])
    assert perftest.commands(work, "rxe0", 7, host, events=True)[1] == [*common, "-e", host]
    assert perftest.commands(Work("rate", count=1), "rxe0", 7, host, False)[0][-1] == "5"
    rstream = rdmacm_utils.rstream_command
    latency = rstream(Work("latency", count=9), 7, "h", is_server=True)
    assert " ".join(latency) == "rstream -b h -p 7 -S 64 -C 1 -I 9 -T b"
    many = rstream(Work("bandwidth", size=4096, count=9), 7, "h", is_server=False)
    assert " ".join(many) == "rstream -s h -p 7 -S 4096 -C 4 -I 1 -B 4194304 -T b"


@pytest.mark.parametrize("usage", ["", "--ipv6-addr"], ids=["perftest 4.5", "later"])
def test_perftest_at_an_ipv6_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: str
) -> None:
    (tmp_path / "ib_send_lat").write_text(f"#!/bin/sh\necho 'Usage: ib_send_lat {usage}'; exit 1\n")
    (tmp_path / "ib_send_lat").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    perftest._usage.cache_clear()
    work = Work("latency")
    if usage:
        server, client = perftest.commands(work, "rxe0", 7, "fd07::1", events=False)
        assert (server[-1], client[-2:]) == (usage, [usage, "fd07::1"])
    else:
        with pytest.raises(BenchError, match="knows no IPv6"):
            perftest.commands(work, "rxe0", 7, "fd07::1", events=False)
    perftest._usage.cache_clear()


@pytest.mark.parametrize(
    ("usage", "server", "client"),
    [
        ("", "-b h -p 7 -c 20", "-s h -p 7 -c 20"),
        ("[-q base_qpn]", "-b h -p 7 -c 20 -q 100000", "-s h -p 7 -c 20"),
        (
            "-C controller_address [-q base_qpn]",
            "-b h -C h -L -p 7 -c 20 -q 100000",
            "-b h -C h -p 7 -c 20",
        ),
    ],
    ids=["rdma-core 44", "rdma-core 56", "rdma-core 65"],
)
def test_the_options_of_each_version_of_cmtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: str, server: str, client: str
) -> None:
    (tmp_path / "cmtime").write_text(f"#!/bin/sh\necho 'usage: cmtime {usage}' >&2; exit 1\n")
    (tmp_path / "cmtime").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rdmacm_utils._cmtime_usage.cache_clear()
    work, command = Work("connections", count=20), rdmacm_utils.cmtime_command
    assert command(work, 7, "h", is_server=True) == ["cmtime", *server.split()]
    assert command(work, 7, "h", is_server=False) == ["cmtime", *client.split()]
    rdmacm_utils._cmtime_usage.cache_clear()
