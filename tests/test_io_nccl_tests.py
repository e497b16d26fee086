"""nccl-tests logs as people paste them: every shared log parses as tabulated, and every kind of damage costs only what it must."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.io import CollectiveFileError, bus_factor, parse_nccl_tests, read_nccl_tests
from diffperf.io._collective_table import datatype_name, op_name

LOGS = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "nccl_tests_logs"
PARSED = LOGS.parent / "collectives" / "nccl_tests_parsed.csv"
shared = pytest.mark.skipif(not LOGS.is_dir(), reason="the shared nccl-tests logs (../shared/data/nccl_tests_logs) are not on this machine")

HEADER = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  11 on  node00 device  0 [0x1a] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  12 on  node00 device  1 [0x40] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  13 on  node01 device  0 [0x1a] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  14 on  node01 device  1 [0x40] NVIDIA H100 80GB HBM3
NCCL version 2.21.5+cuda12.4
"""
NAMES = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
# all-reduce over four ranks: algbw = size / time, busbw = 1.5 algbw
ROWS = [
    "     1048576        262144     float     sum      -1    50.00   20.97   31.46      0    40.00   26.21   39.32      0",
    "     2097152        524288     float     sum      -1    80.00   26.21   39.32      0    75.00   27.96   41.94      0",
    "     4194304       1048576     float     sum      -1    120.0   34.95   52.43      0    118.0   35.54   53.32      0",
]
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 42.965\n#\n"
TIMES = [50e-6, 40e-6, 80e-6, 75e-6, 120e-6, 118e-6]
LOG = HEADER + NAMES + "\n".join(ROWS) + "\n" + TAIL


def log_of(*rows, names=NAMES, header=HEADER, tail=TAIL):
    return header + names + "\n".join(rows) + "\n" + tail


def texts(table):
    return " ".join(str(problem) for problem in table.problems)


def test_a_whole_log():
    table = parse_nccl_tests(LOG)
    (header,) = table.headers
    assert table.problems == () and len(table.zero_byte) == 0 and len(table) == 6
    assert_allclose(table.time_s, TIMES, rtol=1e-12)
    assert table.nbytes.tolist() == [2.0**20] * 2 + [2.0**21] * 2 + [2.0**22] * 2
    assert table.in_place.tolist() == [False, True] * 3
    assert set(table.op) == {"all_reduce"} and set(table.datatype) == {"fp32"} and set(table.reduce_op) == {"sum"} and set(table.root) == {-1}
    assert set(table.ranks) == {4} and set(table.nodes) == {2} and set(table.graph) == {0}
    assert_allclose(table.bus_bandwidth[:2], [31.46e9, 39.32e9])
    assert_allclose(table.bus_rate[0], 1.5 * 2**20 / 50e-6)
    assert table.line[0] == LOG.splitlines().index(ROWS[0]) + 1
    assert (header.library, header.library_version, header.hosts, header.iterations, header.warmup) == ("NCCL", "2.21.5", ("node00", "node01"), 20, 5)
    assert header.devices == ("NVIDIA H100 80GB HBM3",) * 4 and header.inferred == ("op",)
    assert (header.average_bus_bandwidth, header.out_of_bounds, header.min_bytes, header.max_bytes) == (42.965e9, 0, 2**20, 2**22)
    assert table.library[0] == "NCCL 2.21.5" and table.accelerator[0] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("damage", [
    lambda text: "\n".join("node0: " + line for line in text.splitlines()),
    lambda text: "\n".join("[1,0]<stdout>:" + line for line in text.splitlines()),
    lambda text: "\n".join(" 0: " + line for line in text.splitlines()),
    lambda text: "\n".join(f"2026-01-16 15:40:46,{k:03} {line}" for k, line in enumerate(text.splitlines())),
    lambda text: "\n".join(f"2026-01-16T15:40:46.{k:03}Z worker-0: {line}" for k, line in enumerate(text.splitlines())),
    lambda text: "\n".join(f"[15:40:46] [pod/nccl-0/main] {line}" for line in text.splitlines()),
    lambda text: "\n".join("> " + line for line in text.splitlines()),
    lambda text: "\n".join("(Worker pid=123, ip=10.0.0.1) " + line for line in text.splitlines()),
    lambda text: "\n".join("nccl-1  | " + line for line in text.splitlines()),
    lambda text: "```\n" + text + "\n```",
    lambda text: "<pre>" + text.replace("->", "-&gt;") + "</pre>",
    lambda text: text.replace("\n", "\r\n"),
    lambda text: text.replace("#", ""),
    lambda text: "\x1b[32m" + text + "\x1b[0m",
    lambda text: "\n\n".join(text.splitlines()),
    lambda text: text.replace("1048576  ", "1,048,576  ").replace(" 262144 ", " 262,144 "),
], ids="host mpirun srun time iso_time pod mail ray compose fence html crlf no_hash colour spaced thousands".split())  # fmt: skip
def test_what_logs_are_pasted_with_does_not_matter(damage):
    table = parse_nccl_tests(damage(LOG))
    assert_allclose(table.time_s, TIMES, rtol=1e-12)
    assert set(table.ranks) == {4} and set(table.nodes) == {2} and len(table.headers) == 1 and table.problems == ()


def test_markdown_and_html_tables():
    cells = [row.split() for row in [NAMES.splitlines()[1][1:], *ROWS]]
    bars = "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * 13, *cells[1:]])
    web = "<table>" + "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells) + "</table>"
    for text in (bars, web):
        table = parse_nccl_tests(text)
        assert_allclose(table.time_s, TIMES, rtol=1e-12)
        assert set(table.ranks) == {4} and table.headers[0].inferred == ("op", "ranks")  # 4 follows from busbw / algbw = 1.5


@pytest.mark.parametrize("width", [20, 40, 64, 80, 100])
def test_rows_that_a_terminal_wrapped(width):
    """Also inside a number."""
    wrap = lambda line: "\n".join(line[k : k + width] for k in range(0, len(line), width))
    table = parse_nccl_tests(HEADER + NAMES + "\n".join(map(wrap, ROWS)) + "\n" + TAIL)
    assert_allclose(table.time_s, TIMES, rtol=1e-12)
    assert table.problems == ()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2), st.integers(0, 12), st.booleans())
def test_a_row_torn_by_a_library_message(row, column, own_line):
    """The library writes to the same terminal while a row is being printed."""
    message = "node00:123:456 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    words = ROWS[row].split()
    torn = " ".join(words[:column]) + ("\n" if own_line else " ") + message + "\n" + " ".join(words[column:])
    table = parse_nccl_tests(log_of(*ROWS[:row], torn, *ROWS[row + 1 :]))
    assert_allclose(table.time_s, TIMES, rtol=1e-12)
    assert [text for _, text in table.headers[0].notes] == [message] and table.problems == ()


def test_a_row_cut_off_costs_only_itself():
    table = parse_nccl_tests(log_of(ROWS[0], ROWS[1][:50], ROWS[2]))
    assert_allclose(table.time_s, TIMES[:2] + TIMES[4:])
    (problem,) = table.problems
    assert problem.kind == "row left out" and problem.line == LOG.splitlines().index(ROWS[1]) + 1
    assert len(parse_nccl_tests(log_of(ROWS[0], "     2097152        524288     float     sum      -1    abc   26.21   39.32      0", ROWS[2]))) == 4


def test_a_row_cut_after_its_first_buffer_keeps_it():
    table = parse_nccl_tests(log_of(ROWS[0], " ".join(ROWS[1].split()[:9]), ROWS[2]))
    assert_allclose(table.time_s, TIMES[:3] + TIMES[4:])
    assert "ends after its first buffer" in texts(table)


def test_old_layouts():
    old = ["  1048576  262144  float  sum  50.00  20.97  31.46  2e-07  40.00  26.21  39.32  N/A",
           "  2097152  524288  float  sum  80.00  26.21  39.32  0e+00  75.00  27.96  41.94  1e-07"]  # fmt: skip
    names = "# size count type redop time algbw busbw error time algbw busbw error\n"
    for head in (names, ""):  # without a header the columns are counted
        table = parse_nccl_tests(log_of(*old, names=head))
        assert_allclose(table.time_s, TIMES[:4])
        assert table.flag.tolist() == [""] * 4  # a floating error is a rounding error, not a wrong value
    rooted = "  1048576  262144  float  0  50.00  20.97  20.97  0e+00  40.00  26.21  26.21  0e+00"
    table = parse_nccl_tests("# size count type root time algbw busbw error time algbw busbw error\n" + rooted)
    assert (table.op[0], table.root[0]) == ("broadcast", 0)
    bare = "  1048576  65536  float  50.00  20.97  15.73  N/A  40.00  26.21  19.66  N/A"
    table = parse_nccl_tests("# size count type time algbw busbw error time algbw busbw error\n" + bare)
    assert (table.op[0], table.ranks[0]) == ("all_gather", 4)  # size is four times count


def test_missing_columns():
    no_errors = [" ".join(w for k, w in enumerate(row.split()) if k not in (8, 12)) for row in ROWS]
    assert_allclose(parse_nccl_tests(log_of(*no_errors, names="")).time_s, TIMES)
    one_buffer = [" ".join(row.split()[:9]) for row in ROWS]
    assert_allclose(parse_nccl_tests(log_of(*one_buffer, names="# size count type redop root time algbw busbw #wrong\n")).time_s, TIMES[::2])
    pairs = "# size(B) time(us)\n" + "\n".join(" ".join(row.split()[k] for k in (0, 5)) for row in ROWS)
    table = parse_nccl_tests(pairs, op="allreduce", ranks=4)
    assert_allclose(table.time_s, TIMES[::2])
    assert np.isnan(table.bus_bandwidth).all() and set(table.op) == {"all_reduce"} and table.bus_rate[0] == 1.5 * 2**20 / 50e-6


def test_units_of_the_header():
    milliseconds = [" ".join(f"{float(w) / 1e3:.5f}" if k in (5, 9) else w for k, w in enumerate(row.split())) for row in ROWS]
    assert_allclose(parse_nccl_tests(log_of(*milliseconds, names=NAMES.replace("(us)", "(ms)"))).time_s, TIMES)
    with pytest.raises(CollectiveFileError, match=r"log:11: mixed units: the time columns are in ms and in us"):
        parse_nccl_tests(log_of(*ROWS, names=NAMES.replace("(us)", "(ms)", 1)))
    with pytest.raises(CollectiveFileError, match="the unit 'fortnights' is not known"):
        parse_nccl_tests(log_of(*ROWS, names=NAMES.replace("(us)", "(fortnights)")))
    mixed = ROWS[1].replace(" 80.00", "0.08000")
    table = parse_nccl_tests(log_of(ROWS[0], mixed, ROWS[2]))
    assert_allclose(table.time_s, TIMES[:2] + TIMES[3:])
    assert "algbw is 26.21 GB/s, but size over time is 2.621e+04 GB/s: units are mixed (a factor of 1000" in texts(table)


def test_several_collectives_in_one_paste():
    gather = ["  1048576  65536  float  none  -1  50.00  20.97  15.73  0  40.00  26.21  19.66  0"]
    exchange = ["  1048576  65536  float  none  -1  50.00  20.97  15.73  0  40.00  26.21  19.66  N/A"]
    scatter = ["  1048576  65536  float  sum  -1  50.00  20.97  15.73  0  40.00  26.21  19.66  0"]
    text = LOG + "$ ./build/all_gather_perf -b 1M\n" + log_of(*gather) + log_of(*exchange, header="") + "# Collective test starting: reduce_scatter_perf\n"
    table = parse_nccl_tests(text + log_of(*scatter))
    assert [header.op for header in table.headers] == ["all_reduce", "all_gather", "all_gather", "reduce_scatter"]  # the command holds until the next
    assert table.header.tolist() == [0] * 6 + [1] * 2 + [2] * 2 + [3] * 2
    assert set(table.ranks) == {4} and len(set(table.log)) == 4
    table = parse_nccl_tests(LOG + log_of(*exchange, header=""))
    assert [header.op for header in table.headers] == ["all_reduce", "all_to_all"]  # no command: in-place results are not checked


def test_rows_of_zero_bytes_stand_apart():
    zero = "  0  0  float  sum  -1  34.27  0.00  0.00  0  33.57  0.00  0.00  0"
    table = parse_nccl_tests(log_of(zero, zero, *ROWS))
    assert len(table) == 6 and len(table.zero_byte) == 4 and table.problems == ()
    assert_allclose(table.zero_byte.time_s[:2], [34.27e-6, 33.57e-6])


def test_a_busbw_that_is_no_number_is_kept_with_its_time():
    table = parse_nccl_tests(log_of(ROWS[0], ROWS[1].replace("39.32", "  nan"), ROWS[2]))
    assert_allclose(table.time_s, TIMES)
    assert table.flag.tolist() == ["", "", "busbw_not_a_number", "", "", ""] and np.isnan(table.bus_bandwidth[2])
    assert "busbw is not a number" in texts(table)


@pytest.mark.parametrize("time", ["nan", "0.00", "N/A", "inf", "-5.00"])
def test_a_time_that_is_none_costs_one_buffer(time):
    table = parse_nccl_tests(log_of(ROWS[0], ROWS[1].replace("80.00", time), ROWS[2]))
    assert_allclose(table.time_s, TIMES[:2] + TIMES[3:])
    assert "2097152 B, out-of-place: the time is" in texts(table)


def test_busbw_that_contradicts_algbw():
    table = parse_nccl_tests(log_of(ROWS[0], ROWS[1].replace("39.32", "26.21"), ROWS[2]))
    assert table.flag.tolist() == ["", "", "busbw_factor_mismatch", "", "", ""]
    assert "busbw is 1 times algbw; all_reduce over 4 ranks gives 1.5" in texts(table)
    ring = [row.replace("31.46", "36.70").replace("39.32", "45.87").replace("41.94", "48.93") for row in ROWS[:2]]  # 1.75: eight ranks
    table = parse_nccl_tests(log_of(*ring))
    assert [problem.kind for problem in table.problems] == ["row kept"]  # one remark for all
    assert "in 4 of 4 rows" in texts(table) or "in 3 of 4 rows" in texts(table)


def test_wrong_values_are_flagged():
    table = parse_nccl_tests(log_of(ROWS[0][:-1] + "7", ROWS[1]))
    assert table.flag.tolist() == ["", "wrong_results", "", ""] and "the test found 7 wrong values" in texts(table)


def test_a_single_rank_is_refused():
    rows = ["  1048576  262144  float  sum  -1  5.00  209.72  0.00  0  0.40  2621.44  0.00  0"]
    with pytest.raises(CollectiveFileError, match="a single rank: nothing is sent.*MPI=1"):
        parse_nccl_tests(log_of(*rows, header=HEADER.splitlines()[3]))
    with pytest.raises(CollectiveFileError, match="a single rank"):
        parse_nccl_tests(log_of(*rows, header=""))  # busbw 0 says the same


@pytest.mark.parametrize("text, words", [("", "is empty"), ("  \n\n", "is empty"), ("step,loss\n1,2.0\n", "not an nccl-tests log.*Line 1 reads 'step,loss'"),
                                         (HEADER, "not an nccl-tests log.*Line 1"), ("\x00\x01\x02", "not an nccl-tests log")])  # fmt: skip
def test_what_is_no_log(text, words):
    with pytest.raises(CollectiveFileError, match=words):
        parse_nccl_tests(text)


def test_what_the_caller_knows():
    small = "  8  2  float  sum  -1  50.00  0.00  0.00  0  40.00  0.00  0.00  0"
    unknown = parse_nccl_tests(NAMES + small)
    assert np.isnan(unknown.ranks).all() and "the number of ranks is neither listed nor in the columns" in texts(unknown)
    known = parse_nccl_tests(NAMES + small, op="all_reduce", ranks=16, nodes=2)
    assert set(known.ranks) == {16} and set(known.nodes) == {2} and known.problems == ()
    contradicted = parse_nccl_tests(LOG, ranks=16, nodes=4)
    assert set(contradicted.ranks) == {4} and set(contradicted.nodes) == {2}
    assert "ranks was given as 16, but the log says 4" in texts(contradicted) and "nodes was given as 4" in texts(contradicted)
    with pytest.raises(ValueError, match="op is 'alreduce'"):
        parse_nccl_tests(LOG, op="alreduce")


def test_ranks_that_columns_leave_open():
    """Of 2 (n - 1) / n with two decimals at 2 GB/s nothing follows for large n."""
    table = parse_nccl_tests("  1048576  262144  float  sum  -1  500.0   2.10   4.18  0  500.0   2.10   4.18  0")
    assert np.isnan(table.ranks).all() and "allows" in texts(table)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(2, 128), st.floats(20.0, 1e5), st.integers(22, 30))
def test_op_and_ranks_follow_from_the_columns(op, ranks, time_us, power):
    count = 2**power // (4 if op == "all_reduce" else 4 * ranks)
    size = count * (4 if op == "all_reduce" else 4 * ranks)
    rate = size / (time_us := float(f"{time_us:.4g}")) / 1e3
    bus = rate * bus_factor(op, ranks)
    group = f"{time_us:.5g} {rate:.2f} {bus:.2f} 0"
    table = parse_nccl_tests(f"{size} {count} float {'none' if op == 'all_gather' else 'sum'} -1 {group} {group}")
    assert set(table.op) == {op}
    assert set(table.ranks) == {ranks} or (op == "all_reduce" and np.isnan(table.ranks).all())  # never a wrong number
    assert_allclose(table.time_s, time_us * 1e-6, rtol=1e-4)


def test_stray_bytes_and_encodings(tmp_path):
    for k, data in enumerate((LOG.encode() + b"\xff\xfe\x00", LOG.encode("utf-16"), "\ufeff".encode() + LOG.encode())):
        path = tmp_path / f"{k}.txt"
        path.write_bytes(data)
        assert_allclose(read_nccl_tests(path).time_s, TIMES)
    (tmp_path / "a.txt").write_bytes(b"\x1f\x8b\x08\x00 cut")
    with pytest.raises(CollectiveFileError, match="not a complete gzip file"):
        read_nccl_tests(tmp_path / "a.txt")


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(0, len(LOG)), st.integers(0, 300), st.sampled_from(["", "\n", " x ", "1", "N/A"]))
def test_any_cut_gives_a_table_or_a_clear_error(start, length, patch):
    try:
        table = parse_nccl_tests(LOG[:start] + patch + LOG[start + length :])
    except CollectiveFileError as error:
        assert str(error).startswith("log")
        return
    assert np.all(table.time_s > 0) and np.all(table.nbytes > 0)


@pytest.fixture(scope="module")
def shared_logs():
    with open(LOGS / "INDEX.csv", encoding="utf-8") as file:
        index = list(csv.DictReader(file))
    return [(row, read_nccl_tests(LOGS / row["file"])) for row in index]


@shared
def test_shared_logs_parse_as_tabulated(shared_logs):
    with open(PARSED, encoding="utf-8") as file:
        rows = defaultdict(list)
        for row in csv.DictReader(file):
            rows[row["log_id"]].append(row)
    assert len(shared_logs) == 58
    for entry, table in shared_logs:
        parts = [table, table.zero_byte]
        column = lambda name, parts=parts: np.concatenate([getattr(part, name) for part in parts])
        order = np.lexsort((column("in_place"), column("line")))
        expected = rows.pop(entry["file"].removesuffix(".txt"))
        numbers = lambda name, expected=expected: np.array([float(row[name]) for row in expected])
        assert len(order) == len(expected), entry["file"]
        assert_allclose(column("nbytes")[order], numbers("bytes"), rtol=0)
        assert_allclose(column("time_s")[order], numbers("time_us") * 1e-6, rtol=1e-12)
        assert_allclose(column("algorithm_bandwidth")[order], numbers("algbw_GBps") * 1e9, rtol=1e-12)
        assert_allclose(column("bus_bandwidth")[order], numbers("busbw_GBps") * 1e9, rtol=1e-12)
        assert column("in_place")[order].tolist() == [row["buffer"] == "in_place" for row in expected]
        assert column("datatype")[order].tolist() == [datatype_name(row["dtype"]) for row in expected]
        assert column("op")[order].tolist() == [op_name(row["op"]) for row in expected]  # from the columns where the log has no name
    assert not rows


@shared
def test_ranks_and_nodes_of_shared_logs(shared_logs):
    """Where a log tells them at all, they are those of the index; five small or send/recv logs without a list of devices cannot."""
    unknown = 0
    for entry, table in shared_logs:
        (header,) = table.headers
        assert header.nodes in (None, float(entry["n_nodes"])), entry["file"]
        assert header.ranks in (None, float(entry["n_ranks"])), entry["file"]
        assert [problem.kind for problem in table.problems] == ["note"] * (header.ranks is None), entry["file"]
        unknown += header.ranks is None
    assert unknown == 5
