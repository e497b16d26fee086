"""Timing of calls, and tables that grow."""

import itertools

import pytest

from diffperf.measure._table import GrowingTable
from diffperf.measure._timing import spread_of_median, time_calls

# Timing


def test_rotation_calls_every_set_in_turn():
    called = []
    timing = time_calls(lambda x: called.append(x), [(i,) for i in range(5)], cap=1.0, agreed=(10, 3))
    assert timing.iterations == 10 and timing.calls == 3
    assert called == [i for i, _ in zip(itertools.cycle(range(5)), range(len(called)))] and len(called) >= 30


def test_carried_state_goes_through_every_call():
    seen = []
    time_calls(lambda state, x: (seen.append(state) or state + 1, x), [(0, "x"), (100, "y")], cap=1.0, carry=True, agreed=(6, 1))
    assert seen == [at // 2 + 100 * (at % 2) for at in range(len(seen))]


def test_sampling_stops_at_the_cap_or_when_steady():
    unsteady = time_calls(lambda: None, [()], cap=0.0)
    assert unsteady.iterations == 3
    assert unsteady.least <= unsteady.p10 <= unsteady.median <= unsteady.p90


def test_interval_of_the_median():
    """100 values 101 to 200: ranks 40 and 60, so half of (160 - 140) over 150.5."""
    assert spread_of_median(list(range(101, 201))) == pytest.approx(10 / 150.5)
    assert spread_of_median([2.0] * 9) == 0


# Tables


FIXED = {"device": "X", "version": "1"}


def test_table_grows_and_is_read_back(tmp_path):
    path = tmp_path / "t.csv"
    table = GrowingTable(path, ("device", "version", "m", "note"), FIXED)
    table.append({**FIXED, "m": 3, "note": 'a, "b"\nc'})
    again = GrowingTable(path, ("device", "version", "m", "note"), FIXED)
    assert again.rows == [{"device": "X", "version": "1", "m": "3", "note": 'a, "b" c'}] and again.repaired == 0


def test_a_table_that_vanished_does_not_come_back_without_header(tmp_path):
    table = GrowingTable(tmp_path / "t.csv", ("device", "version", "m"), FIXED)
    (tmp_path / "t.csv").unlink()
    with pytest.raises(FileNotFoundError):
        table.append(FIXED | {"m": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_unfinished_row_is_cut_off(tmp_path, cut):
    path = tmp_path / "t.csv"
    table = GrowingTable(path, ("device", "version", "m"), FIXED)
    table.append(FIXED | {"m": 1})
    whole = path.read_bytes()
    table.append(FIXED | {"m": 222})
    path.write_bytes(path.read_bytes()[:-cut])
    again = GrowingTable(path, ("device", "version", "m"), FIXED)
    assert path.read_bytes() == whole and [row["m"] for row in again.rows] == ["1"] and again.repaired == len("X,1,222\n") - cut
    path.write_bytes(b"device,ver")  # interrupted in the header
    assert GrowingTable(path, ("device", "version", "m"), FIXED).rows == [] and path.read_bytes() == b"device,version,m\n"


def test_other_tables_are_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    for force in (False, True):
        with pytest.raises(ValueError, match="is another table: it begins with 'a,b'"):
            GrowingTable(path, ("device", "version", "m"), FIXED, force)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(ValueError, match="does not exist. Create it first"):
        GrowingTable(tmp_path / "no" / "t.csv", ("device",), FIXED)


def test_another_device_is_refused_or_replaced(tmp_path):
    path = tmp_path / "t.csv"
    columns = ("device", "version", "m")
    GrowingTable(path, columns, FIXED).append(FIXED | {"m": 1})
    with pytest.raises(ValueError, match="version is 1 there and 2 here"):
        GrowingTable(path, columns, FIXED | {"version": "2"})
    assert len(GrowingTable(path, columns, FIXED).rows) == 1
    assert GrowingTable(path, columns, FIXED | {"version": "2"}, force_new=True).rows == []
    assert path.read_text() == "device,version,m\n"
