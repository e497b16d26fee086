"""Recorded traces, if they are on this machine, also against HolisticTraceAnalysis."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.io.traces import (
    SYNCHRONISATION,
    RankTrace,
    hta_times,
    match_collectives,
    overlap_slowdowns,
    rank_dict,
    read_trace,
    read_traces,
    times_of,
)

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared traces (../shared/data/traces) are not on this machine")


def traces_of(*patterns):
    return sorted(str(path.relative_to(DATA)) for pattern in patterns for path in DATA.glob(pattern)) if DATA.is_dir() else []


SMALL = [name for name in traces_of("*.gz", "*/rank0.json.gz") if (DATA / name).stat().st_size < 800_000]


@shared
@pytest.mark.parametrize("name", SMALL)
def test_shared_traces_load(name):
    for trace in read_trace(DATA / name):
        described = rank_dict(trace)
        if isinstance(trace, RankTrace):
            times = times_of(trace)
            assert 0 <= times.idle_time_s < times.span_s and times.compute_time_s + times.idle_time_s <= times.span_s * (1 + 1e-9)
            assert times.exposed_communication_time_s <= times.communication_time_s
            assert sum(kernel["count"] for kernel in described["kernels"]) == len(trace.events) > 0
        else:
            assert len(trace) > 1000


@shared
def test_ranks_of_one_machine_agree():
    """Eight ranks of one job: the ends of their collectives agree to microseconds, their starts to milliseconds."""
    found, left = read_traces(sorted((DATA / "dlrm_v100_8ranks").glob("*.gz")))
    matched, _ = match_collectives(found)
    assert matched is not None and matched.agree and matched.row.shape == (8, 8) and not left
    assert matched.spread_s < 10e-6 and np.ptp(matched.start_s, axis=1).max() > 5e-3
    duration = matched.end_s - matched.start_s
    assert (duration.max(axis=1) / matched.transfer_s).max() > 100  # what one rank alone shows is mostly waiting


@shared
def test_kernels_lose_whole_processors_to_a_collective():
    """A100, 108 processors, 8 channels: matrix kernels of 96, 128 or 192 blocks run as if alone, others take a further wave. Ratios of another program."""
    (trace,) = read_trace(DATA / "hta_a100_ddp_nccl_metadata_rank0of2.json.gz")
    assert isinstance(trace, RankTrace)
    pairs = [pair for pair in overlap_slowdowns(trace) if pair.time_alone_s > 15e-6 and re.search("cutlass|xmma", pair.kernel) and pair.blocks < 2000]
    assert all((pair.pairing, pair.num_sms, pair.channels) == ("position", 108, 8) for pair in pairs)
    ratios = sorted((pair.blocks, pair.time_with_s / pair.time_alone_s) for pair in pairs)
    assert [blocks for blocks, _ in ratios] == [96, 100, 100, 128, 192, 200, 208, 216, 400, 512, 512]
    assert_allclose([ratio for _, ratio in ratios], [1.01, 1.61, 1.76, 0.99, 1.00, 1.30, 1.37, 1.33, 1.32, 1.13, 1.45], atol=0.006)


HTA = traces_of("dlrm*/rank[07].json.gz", "hta_sampled*/*.gz", "hta_a100_*", "hta_v100*", "tracelens_h100_bert*", "tracelens_mi300x*")


@shared
@pytest.mark.filterwarnings("ignore")  # of pandas, which it uses in an old way
@pytest.mark.parametrize("name", HTA)
@pytest.mark.parametrize("defaults", [True, False])
def test_times_are_those_of_holistic_trace_analysis(name, defaults, monkeypatch):
    """Its defaults against `hta_times`; and its analyses of all kernels, without rounding to microseconds, against `times_of`."""
    hta = pytest.importorskip("hta.trace_analysis", reason="needs the hta extra")
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "0" if defaults else "1")
    logging.disable(logging.CRITICAL)
    files, (trace,) = {0: str(DATA / name)}, read_trace(DATA / name)
    assert isinstance(trace, RankTrace)
    if defaults:
        theirs = hta.TraceAnalysis(trace_files=files, trace_dir="").t
    else:
        theirs = Trace(trace_files=files, trace_dir="")
        theirs.parse_traces(use_multiprocessing=False)
        theirs.traces[0]["ts"] -= theirs.traces[0]["ts"].min()
    row = BreakdownAnalysis.get_temporal_breakdown(theirs, visualize=False).iloc[0]
    found = hta_times(trace) if defaults else times_of(trace)
    waits = (trace.events.kind == SYNCHRONISATION).any() and not defaults  # it takes records of synchronisation for kernels
    if not waits:
        assert_allclose(found.idle_time_s, row["idle_time(us)"] * 1e-6, rtol=0.01)
    assert_allclose(found.compute_time_s, row["compute_time(us)"] * 1e-6, rtol=0.01)
    if trace.collectives:
        overlap = CommunicationAnalysis.get_comm_comp_overlap(theirs, visualize=False).iloc[0]["comp_comm_overlap_pctg"]
        assert_allclose(100 * found.overlap_fraction, overlap, rtol=0.01, atol=0.01)
    logging.disable(logging.NOTSET)
