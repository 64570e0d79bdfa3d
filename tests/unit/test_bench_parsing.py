"""Command lines and output of perftest, rdmacm-utils and pyverbs."""

from __future__ import annotations

import json

import pytest

from aiordma.bench import perftest, pyverbs, rdmacm_utils
from aiordma.bench.plan import Work

RULE = "-" * 87 + "\n"
SETUP = (
    RULE
    + "                    Send Latency Test\n"
    + " Dual-port       : OFF\t\tDevice         : rxe0\n"
    + " TX depth        : 1\n"
    + RULE
    + " local address: LID 0000 QPN 0x0011 PSN 0xd3f4d8\n"
    + RULE
)
LATENCY = (
    SETUP
    + " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]"
    + "    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n"
    + " 64      1000          10.11        152.00       11.50  \t       12.25     \t4.10"
    + "   \t\t20.00   \t\t90.50  \n"
    + RULE
)
BANDWIDTH = (
    SETUP
    + " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n"
    + " 65536      512              812.50             800.00\t\t   0.012800\n"
    + RULE
)
CMTIME = """\
creating id
resolving address
resolving route
creating qp
connecting
disconnecting
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
RSTREAM = """\
name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer
custom    64      1       1k      125k        0.05s      0.02      25.50
"""


def test_times_of_ib_send_lat_are_doubled_to_round_trips() -> None:
    sample = perftest.parse_latency(LATENCY)
    assert sample.value == 23.0
    expected = {"min": 20.22, "50": 23.0, "99": 40.0, "99.9": 181.0, "max": 304.0}
    assert sample.percentiles == pytest.approx(expected)


def test_megabytes_of_perftest_are_read_as_mebibytes() -> None:
    assert perftest.parse_bandwidth(BANDWIDTH).value == pytest.approx(838.8608)
    newer = BANDWIDTH.replace("[MB/sec]", "[MiB/sec]")
    assert perftest.parse_bandwidth(newer).value == pytest.approx(838.8608)


def test_bandwidth_in_gigabits_is_recognised_by_the_header() -> None:
    gigabits = BANDWIDTH.replace("[MB/sec]", "[Gb/sec]").replace("800.00", "8.00  ")
    assert perftest.parse_bandwidth(gigabits).value == pytest.approx(1000.0)


def test_message_rate_is_in_messages_per_second() -> None:
    assert perftest.parse_rate(BANDWIDTH).value == pytest.approx(12800.0)


@pytest.mark.parametrize("output", ["", SETUP, LATENCY.partition(" 64  ")[0], "no device\n"])
def test_perftest_output_without_a_result_raises(output: str) -> None:
    with pytest.raises(ValueError, match="no result line"):
        perftest.parse_latency(output)


def test_perftest_command_lines() -> None:
    work = Work("bandwidth", operation="write", size=4096, count=512)
    common = ["ib_write_bw", "-R", "-F", "-d", "rxe0", "-p", "7", "-s", "4096", "-n", "512"]
    assert perftest.command(work, "rxe0", 7, None, events=False) == common
    assert perftest.command(work, "rxe0", 7, "10.7.1.1", events=True) == [*common, "-e", "10.7.1.1"]


def test_perftest_runs_at_least_five_iterations() -> None:
    assert perftest.command(Work("rate", count=1), "rxe0", 7, None, False)[-1] == "5"


def test_cmtime_rate_is_connections_by_the_time_of_all_steps() -> None:
    sample = rdmacm_utils.parse_cmtime(CMTIME, 100)
    assert sample.value == pytest.approx(100 / 0.2)
    assert sample.details["resolve_addr_ms"] == 8.0


@pytest.mark.parametrize(
    "output",
    [
        "",
        CMTIME.replace("connecting\n", "connecting\nevent: RDMA_CM_EVENT_REJECTED, error: 8\n"),
        CMTIME.replace("creating qp\n", "creating qp\nfailure creating qp\n"),
        CMTIME.partition("connect  ")[0],
    ],
)
def test_cmtime_output_of_a_failure_raises(output: str) -> None:
    with pytest.raises(ValueError, match=r"REJECTED|failure|no table"):
        rdmacm_utils.parse_cmtime(output, 100)


def test_rstream_transfers() -> None:
    assert rdmacm_utils.parse_rstream_latency(RSTREAM).value == 51.0
    assert rdmacm_utils.parse_rstream_bandwidth(RSTREAM, 65536).value == pytest.approx(65536 / 25.5)
    with pytest.raises(ValueError, match="no result line"):
        rdmacm_utils.parse_rstream_latency(RSTREAM.partition("custom")[0])


def test_rstream_command_lines() -> None:
    latency = rdmacm_utils.rstream_command(Work("latency", count=9), 7, "h", is_server=True)
    assert latency == ["rstream", "-b", "h", "-p", "7", "-S", "64", "-C", "1", "-I", "9", "-T", "b"]
    many = rdmacm_utils.rstream_command(
        Work("bandwidth", size=4096, count=9), 7, "h", is_server=False
    )
    assert many == ["rstream", "-s", "h", "-p", "7", "-S", "4096", "-C", "9", "-I", "1", "-T", "b"]


def test_pyverbs_times_become_a_sample() -> None:
    output = json.dumps({"times": [4000, 1000, 3000, 2000], "cpu": 0.00004})
    sample = pyverbs.parse(output)
    assert (sample.value, sample.client_cpu) == (2.5, 10.0)
    with pytest.raises(ValueError, match="Expecting value"):
        pyverbs.parse("")
