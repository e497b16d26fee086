"""Repairs to the compilation of published training runs, as tables: what is changed, in which row, and why.

    python calibration/published/repair.py compiled.csv calibration/published/training_runs.csv

Reads the compilation as printed and writes it repaired. Nothing is deleted: every touched row says so at the end of its
`notes`, in one of these forms, so that a reader of the CSV alone can undo or ignore each decision:

    ; REPAIRED column old->new: reason        cells were corrected or filled (several columns: separated by commas)
    ; TREAT AS precision bf16: reason         the cell keeps what the source printed; a model should use this instead
    ; LEFT OUT: reason                        not for fitting or scoring (failed run, duplicate, no step time, ...)
    ; WEIGHT 0.3: reason                      usable, but not to be trusted in full

Running it on its own output changes nothing. Evidence for most entries is a comparison with sister rows of the table (same
model, layout and accelerator in another release); the reason names them. Reasons hold no semicolon: it ends a marker.
"""
import csv
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Repair(NamedTuple):
    """One corrected column in some rows. `old` guards against repairing a compilation that already changed."""
    ids: str
    column: str
    old: str
    new: str
    reason: str


class Fill(NamedTuple):
    """Architecture cells that the compilation left blank, filled for some rows from a source named in the reason."""
    ids: str
    reason: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    gated_mlp: int | None = None
    experts: int | None = None
    topk: int | None = None


class Scale(NamedTuple):
    """A column printed in another unit: the cell times `factor`, in the rows where it is not blank."""
    ids: str
    column: str
    factor: float
    reason: str


class Mark(NamedTuple):
    """Rows left out, weighted down, or to be treated differently from what is printed."""
    ids: str
    reason: str
    weight: str = "0"


_VPP_BORROWED = "blank in the source, borrowed from the rows of the same model and pipeline size"
_LORA_TABLE_PP = "the source prints PP=41 for 32 layers on up to 32 GPUs (typing error), 1 fits the device count"
_EQUAL_FP4 = "precision not in the log, step time equals the FP4 rows and not the FP8 rows (identified from the step time " \
             "itself: do not count as held-out evidence)"
_EQUAL_FP8 = "precision not in the log, equal to the FP8 rows of the same benchmark and accelerator"
_PP_COUNT = "printed TP x PP x DP is not the device count, PP taken as devices/(TP x DP)"
_BATCH_512 = "2048 would be 158 to 187 % of peak, the printed TFLOP/s implies 512"
_TOKENS_512 = "follows from the repaired global batch"
_RECIPE_SEQ = "not printed, recipe default"
_FROM_TOKENS = "not printed, printed tokens per step over the repaired seq_len (exact)"
_MEGATRON_2020 = "not printed in the file, the Megatron-LM paper (arXiv 1909.08053) trains GPT-2 with "
_NEURON_SEQ = "not printed, rows of other SDK releases with the same model print "

# MLPerf Llama rows whose log and configuration do not name the precision, and which run as fast as the FP8 rows.
_MLPERF_FP8 = """tr1921 tr1940 tr1946 tr1960 tr1970 tr1974 tr2027 tr2042 tr2047 tr2055 tr2060 tr2065 tr3262 tr3265 tr3266
tr3271 tr3274 tr3288 tr3295 tr3310 tr3337 tr3345 tr3349 tr3352 tr3362 tr3368 tr3374 tr3384 tr3389 tr3396 tr3398 tr3412 tr3448
tr3467 tr3471 tr3515 tr3527 tr3531 tr3532 tr3540 tr3545 tr3548 tr3551 tr3556 tr3559 tr3565 tr3571 tr3578 tr3580 tr3581 tr3587
tr3588 tr3598 tr3607 tr3619 tr3620 tr3621 tr3635 tr3639 tr3642 tr3685 tr3688 tr3691 tr3693 tr3700 tr3701 tr3718 tr3719 tr3722
tr3723 tr3725 tr3726 tr3728 tr3729 tr3731"""

REPAIRS = (
    Repair("tr1488-tr1490", "global_batch", "2048", "512", _BATCH_512),
    Repair("tr1488", "tokens_per_s_per_device", "4019.69", "1004.92", _TOKENS_512),
    Repair("tr1489", "tokens_per_s_per_device", "4398.76", "1099.69", _TOKENS_512),
    Repair("tr1490", "tokens_per_s_per_device", "2551.03", "637.76", _TOKENS_512),
    Repair("tr1592-tr1594 tr1597 tr1598", "pp", "8", "4", _PP_COUNT),
    Repair("tr1611", "pp", "32", "16", _PP_COUNT),
    Repair("tr0827-tr0838", "pp", "", "1", _LORA_TABLE_PP),
    Repair("tr0827 tr0830 tr0833 tr0836", "dp", "", "8", "follows from PP 1 on 8 devices"),
    Repair("tr0828 tr0831 tr0834 tr0837", "dp", "", "16", "follows from PP 1 on 16 devices"),
    Repair("tr0829 tr0832 tr0835 tr0838", "dp", "", "32", "follows from PP 1 on 32 devices"),
    Repair("tr0944-tr0951", "vpp", "", "12", "the releases before and after print 12 for the same model and layout"),
    Repair("tr1218", "vpp", "", "2", "the row says Interleaved 1F1B, which needs at least 2"),
    Repair("tr0498 tr0542 tr0579", "vpp", "", "1", _VPP_BORROWED + " on this accelerator"),
    Repair("tr0528", "vpp", "", "5", _VPP_BORROWED + " on this accelerator"),
    Repair("tr0553 tr0590", "vpp", "", "12", _VPP_BORROWED + " on this accelerator"),
    Repair("tr0554 tr0591", "vpp", "", "3", _VPP_BORROWED + " on this accelerator"),
    Repair("tr1030 tr1061", "vpp", "", "10", _VPP_BORROWED + " (pre-training)"),
    Repair("tr1031 tr1034 tr1046 tr1062 tr1064", "vpp", "", "20", _VPP_BORROWED + " (pre-training)"),
    Repair("tr3597 tr3636 tr3643 tr3683 tr3697 tr3708 tr3640 tr3682", "precision", "", "nvfp4", _EQUAL_FP4),
    Repair("tr3681", "precision", "", "nvfp4", "precision not in the log, 1.09 s against 1.26 s of the FP8 rows (identified "
           "from the step time itself: do not count as held-out evidence)"),
    Repair(_MLPERF_FP8, "precision", "", "fp8", _EQUAL_FP8),
    Repair("tr1124-tr1135", "seq_len", "", "1024", _MEGATRON_2020 + "1024 positions"),
    Repair("tr1124-tr1135", "vocab", "", "51200", _MEGATRON_2020 + "a vocabulary padded to 51200"),
    Repair("tr2131-tr2133 tr2244 tr2247 tr2257 tr2261", "seq_len", "", "4096", _NEURON_SEQ + "4096"),
    Repair("tr2129 tr2130 tr2243 tr2255 tr2256 tr2259 tr2260 tr2262 tr2264 tr2265 tr2272 tr2279 tr2285 tr2289", "seq_len",
           "", "2048", "not printed, the context of GPT-3"),
    Repair("tr1885 tr1887 tr1891", "seq_len", "", "4096", _RECIPE_SEQ),
    Repair("tr1885", "global_batch", "", "2048", _FROM_TOKENS),
    Repair("tr1887", "global_batch", "", "6144", _FROM_TOKENS),
    Repair("tr1891", "global_batch", "", "8192", _FROM_TOKENS),
)

_TOPOLOGY = "section 'Choosing the fastest 3D Topology' of chronicles-prequel.md: layers follow from the printed TFLOP/s, which " \
            "there is 8 x 12 layers hidden^2 x tokens/time, and heads from the 200B run of the section before"
_CONTENDERS = "chronicles-prequel.md prints NHIDDEN 14336, NLAYERS 72, NHEADS 64 above this table"
_REBALANCED = "chronicles-prequel.md prints HIDDEN 12288 above this table"
_GPT2_SIZES = "size table in experiments/gpt2-meg/meg_gpt2_perf_n16.slurm of the same repository (NHEADS 32, vocabulary 50257)"
_GSHARD = "moe_specs of the Alpa benchmark suite (every second layer a mixture, experts of width 8 hidden), which reproduces " \
          "the printed parameter count"


def _gpt2(ids: str, layers: int, hidden: int) -> Fill:
    return Fill(ids, _GPT2_SIZES, layers, hidden, 32, 32, 4 * hidden, 50257)


def _gshard(ids: str, layers: int, hidden: int, experts: int) -> Fill:
    return Fill(ids, _GSHARD, layers, hidden, 16, 16, 8 * hidden, 32000, experts=experts)


FILLS = (
    Fill("tr1452 tr1453 tr1456", _TOPOLOGY, layers=80, heads=96, kv_heads=96),
    Fill("tr1454 tr1461-tr1463", _TOPOLOGY, layers=78, heads=96, kv_heads=96),
    Fill("tr1455 tr1459 tr1467-tr1469", _TOPOLOGY, layers=77, heads=96, kv_heads=96),
    Fill("tr1457", _TOPOLOGY, layers=81, heads=96, kv_heads=96),
    Fill("tr1460 tr1470 tr1471", _TOPOLOGY, layers=72, heads=96, kv_heads=96),
    Fill("tr1458 tr1464-tr1466", _TOPOLOGY, heads=96, kv_heads=96),
    Fill("tr1480-tr1482", _CONTENDERS, layers=72, hidden=14336, ffn_hidden=57344),
    Fill("tr1522-tr1535", _CONTENDERS, layers=72, hidden=14336, heads=64, kv_heads=64, ffn_hidden=57344),
    Fill("tr1536", "chronicles-prequel.md prints NHEADS 64 at the head of this section", heads=64, kv_heads=64),
    Fill("tr1560-tr1567", _REBALANCED, hidden=12288, ffn_hidden=49152),
    _gpt2("tr1587 tr1592-tr1598", 40, 6144),
    _gpt2("tr1653", 40, 7168),
    _gpt2("tr1583 tr1588", 48, 7168),
    Fill("tr1599-tr1602 tr1624-tr1627", _GPT2_SIZES, heads=32, kv_heads=32, vocab=50257),
    _gpt2("tr1603-tr1623 tr1628-tr1633 tr1636-tr1652 tr1654 tr1656-tr1664", 64, 8192),
    _gpt2("tr1589", 64, 9216),
    _gpt2("tr1655", 64, 11264),
    _gpt2("tr1590", 64, 12288),
    _gpt2("tr1591", 64, 16384),
    _gshard("tr1708 tr1715", 8, 768, 8),
    _gshard("tr1709 tr1716", 8, 768, 16),
    _gshard("tr1710 tr1717", 16, 768, 16),
    _gshard("tr1711 tr1718", 16, 1024, 16),
    _gshard("tr1712 tr1719", 16, 1536, 32),
    _gshard("tr1713", 16, 2048, 48),
    _gshard("tr1714", 32, 2048, 64),
    Fill("tr1025 tr1041 tr1056", "Nemotron3ModelProvider22B of Megatron-Bridge", 40, 6144, 48, 48, 24576, 256000, 0),
    Fill("tr1402", "config.json of openai/gpt-oss-20b", 24, 2880, 64, 8, 2880, 201088, 1, 32, 4),
    Fill("tr1406", "config.json of Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, 1),
    Fill("tr1408 tr1410 tr1412 tr1414", "config.json of Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064, 1),
    Fill("tr2262 tr2272 tr2279 tr2285 tr2289", "GPT-3 6.7B of Brown et al. 2020 (arXiv 2005.14165) Table 2.1", 32, 4096, 32,
         32, 16384, 50257, 0),
)

_GIB = 2**30 / 1e9

SCALES = (
    Scale("tr1144-tr1186", "peak_mem_gb", _GIB, "printed in GiB"),
    Scale("tr1205-tr1222", "peak_mem_gb", _GIB, "printed in GiB"),
)

TREAT_AS = (
    Mark("tr1227 tr1228 tr1233 tr1234", "precision bf16: float8 rowwise with tensor parallelism runs as slow as the bf16 "
         "rows tr1223 and tr1229"),
)

LEFT_OUT = (
    Mark("tr1888", "86 % of the bf16 peak of TPU v5p, so probably an int8 recipe"),
    Mark("tr1898 tr1899", "only the total size of the mixture of experts is known, 172 % of peak if taken as dense"),
    Mark("tr0364 tr0365", "DeepSeek-V4-Flash: neither architecture nor size printed"),
    Mark("tr1592-tr1598", "1.7 to 1.8 times slower than its neighbours tr1603 and tr1612-tr1616 (network state)"),
    Mark("tr1604 tr1606-tr1611", "1.7 to 1.8 times slower than the identical tr1603, tr1605, tr1612-tr1616 (network state)"),
    Mark("tr1665 tr1666", "the document says the FFN width was mis-set in this section and not to what"),
    Mark("tr1713 tr1714", "failed plan (0.2 and 1.5 TFLOP/s)"),
    Mark("tr0382 tr0383", "container 26.06.01 is 1.6 times slower here than 26.06 and 26.08"),
    Mark("tr0589", "51.3 s against 28.9 s for the same printed layout in the point release (tr0552)"),
    Mark("tr0625", "24.8 s against 12.5 s for the same printed layout in another release (tr0653)"),
    Mark("tr2131 tr2132 tr2187 tr2188 tr2215 tr2216 tr2226 tr2227 tr2247 tr2259-tr2261",
         "printed topology does not multiply to the core count, and the times look as if core counts were exchanged"),
    Mark("tr0305 tr0306 tr0361 tr0282", "2 to 5 times slower than its sister rows"),
    Mark("vt0016", "9.84 s, 2.3 times what its neighbours imply (micro-batch 64 of 2048 tokens)"),
    Mark("tr2786", "10120 samples/s per device, far above every small result of the round: unit of the log in doubt"),
)

WEIGHTS = (
    Mark("tr1583-tr1664", "the document admits up to 40 % noise from network traffic", "0.3"),
    Mark("tr1686 tr1712 tr1719", "searched plan unknown, across nodes at 25 Gb/s", "0.3"),
    Mark("tr0952-tr0956", "early DeepSeek-V3 recipe, 1.4 to 3 times slower than later releases, nothing in the row tells",
         "0.3"),
    Mark("tr2244 tr2257", "1.5 times slower than neighbours with the same layout", "0.3"),
    Mark("tr1462 tr1463 tr1466 tr1469 tr1509 tr1540 tr1543", "single-iteration snapshot 25 to 45 % slower than identical "
         "rows", "0.3"),
    Mark("tr1885 tr1887 tr1891", "batch and sequence length not printed, only tokens per step", "0.5"),
    Mark("tr2101-tr2106", "ZeRO-3 of 2021 with 1 to 4 sequences per GPU, bandwidth far below line rate: a stress case", "0.3"),
)


def main(source: str, target: str) -> None:
    """Read the compilation `source`, repair it, write `target`, print what was done."""
    with open(source, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns, rows = list(reader.fieldnames), list(reader)
    counts = repair(rows)
    temporary = Path(target).with_suffix(".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(target)
    print(f"{len(rows)} rows: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def repair(rows: list[dict[str, str]]) -> dict[str, int]:
    """Apply all tables to `rows` in place; returns the number of marked rows of each kind."""
    by_id = {row["id"]: row for row in rows}
    for entry in REPAIRS:
        for row in _rows(by_id, entry.ids):
            _change(row, {entry.column: (entry.old, entry.new)}, entry.reason)
    for entry in FILLS:
        cells = {column: ("", str(value)) for column, value in entry._asdict().items()
                 if column not in ("ids", "reason") and value is not None}
        for row in _rows(by_id, entry.ids):
            _change(row, cells, entry.reason)
    for entry in SCALES:
        for row in _rows(by_id, entry.ids):
            old = row[entry.column]
            if old and f"REPAIRED {entry.column} " not in row["notes"]:
                _change(row, {entry.column: (old, f"{float(old) * entry.factor:.5g}")}, entry.reason)
    for entry in TREAT_AS:
        for row in _rows(by_id, entry.ids):
            _append(row, f"TREAT AS {entry.reason}")
    left_out = {row["id"]: entry.reason for entry in reversed(LEFT_OUT) for row in _rows(by_id, entry.ids)}
    for row in rows:
        reason = left_out.get(row["id"]) or _rule(row)
        if reason:
            _append(row, f"LEFT OUT: {reason}")
    for entry in WEIGHTS:
        for row in _rows(by_id, entry.ids):
            if "LEFT OUT: " not in row["notes"]:
                _append(row, f"WEIGHT {entry.weight}: {entry.reason}")
    kinds = {"repaired": "REPAIRED ", "treated as": "TREAT AS ", "left out": "LEFT OUT: ", "weighted down": "WEIGHT "}
    return {what: sum(bool(re.search(f"(^|; ){marker}", row["notes"])) for row in rows) for what, marker in kinds.items()}


def _change(row: dict[str, str], cells: dict[str, tuple[str, str]], reason: str) -> None:
    """Set `cells`, given as column -> (old, new), and say so; nothing if that was done before."""
    changes = ", ".join(f"{column} {old or 'blank'}->{new}" for column, (old, new) in cells.items())
    marker = f"REPAIRED {changes}: {reason}"
    if marker in row["notes"]:
        return
    for column, (old, new) in cells.items():
        if row[column] != old:
            raise SystemExit(f"{row['id']}: {column} is {row[column]!r}, the repair expects {old!r}. Was the compilation "
                             "changed? Check the entry in REPAIRS or FILLS.")
        row[column] = new
    _append(row, marker)


def _rule(row: dict[str, str]) -> str | None:
    """Reasons to leave a row out that its own cells show."""
    duplicate = re.search(r"DUPLICATE figure of (\w+)", row["notes"])
    if duplicate:
        return f"repeats the figure of {duplicate[1]}"
    if not row["step_time_s"]:
        return "no step time"
    if row["family"] in ("dense-decoder", "moe", "hybrid-mamba", "hybrid-mamba-moe") and not row["layers"]:
        return "architecture not known"
    return None


def _rows(by_id: dict[str, dict[str, str]], ids: str):
    """The rows named by `ids`: words, each an id or an inclusive range such as `tr1592-tr1598`."""
    for word in ids.split():
        first, _, last = word.partition("-")
        prefix, width = first[:2], len(first) - 2
        for number in range(int(first[2:]), int((last or first)[2:]) + 1):
            yield by_id[f"{prefix}{number:0{width}d}"]


def _append(row: dict[str, str], marker: str) -> None:
    assert "; " not in marker, marker
    if marker not in row["notes"]:
        row["notes"] = f"{row['notes']}; {marker}" if row["notes"] else marker


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python repair.py COMPILED.csv REPAIRED.csv")
    main(*sys.argv[1:])
