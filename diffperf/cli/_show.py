"""`show`: what is known of a system or a stack, with sources. `models`: the catalog of models."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def show(
    name: Annotated[str, typer.Argument(metavar="SYSTEM|STACK|list", help="A system, a software stack, a TOML file of either, or `list`.")] = "list",
    as_json: JSON = False,
) -> None:
    """Every number of a SYSTEM or STACK with unit, source, prior and fitted value; `list` for what there is."""
    from . import _output

    _output.start()
    if name == "list":
        _show_list(as_json)
    elif _is_stack(name):
        _show_stack(name, as_json)
    else:
        _show_system(name, as_json)


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|config.json]", help="One model in detail; leave out for the list.", show_default=False)] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Positions per sequence.", show_default=False)] = None,
    as_json: JSON = False,
) -> None:
    """The models of the catalog with their parameter counts, or one in detail beside its published count."""
    from . import _output

    _output.start()
    if name is None:
        _list_models(as_json)
    else:
        _one_model(name, seq, as_json)


def _is_stack(name: str) -> bool:
    """A TOML file with the fields of a stack under [values], or a name that is a stack and no system."""
    from ..hardware import UnknownNameError, resolve_name
    from ..stack import UnknownStackError, resolve_stack_name

    if name.endswith(".toml"):
        path = Path(name)
        return path.is_file() and "layer_factor" in path.read_text(encoding="utf-8", errors="replace")
    try:
        resolve_name(name)
        return False
    except UnknownNameError as error:
        try:
            resolve_stack_name(name)
            return True
        except UnknownStackError as other:
            systems = str(error).split("Near names: ")[-1].split(". ")[0]
            stacks = str(other).split("near names: ")[-1].split(". ")[0]
            raise ValueError(
                f"{name!r} is neither a system nor a software stack. Near systems: {systems}. Near stacks: {stacks}. See `diffperf show list`."
            ) from None


def _show_list(as_json: bool) -> None:
    from ..hardware import describe, system_names, vendor
    from ..stack import describe_stack, stack_names
    from . import _output

    systems = []
    for name in system_names():
        v = {row.path: row.value for row in describe(name)}
        peak = v["chip.peak_flops_per_s.bf16"] or v["chip.peak_flops_per_s.fp16"]
        systems.append((name, vendor(name), peak, v["chip.memory_capacity"], v["chip.memory_bandwidth"], v["scale_up.bandwidth"], v["scale_up.domain"]))
    stacks = [(name, describe_stack(name)[0]) for name in stack_names()]
    if as_json:
        keys = ("name", "vendor", "peak_16bit_flops_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s", "scale_up_bytes_per_s", "scale_up_domain")
        _output.print_json({"systems": [dict(zip(keys, row)) for row in systems], "stacks": [{"name": name, "fit": fit} for name, fit in stacks]})
        return
    from .._units import quantity
    from ..report._tables import table

    result = table("Systems")
    result.add_column("name", no_wrap=True)
    result.add_column("vendor", no_wrap=True)
    for heading in ("16-bit peak", "memory", "bandwidth", "scale-up", "domain"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, maker, peak, capacity, bandwidth, link, domain in systems:
        result.add_row(name, maker, quantity(peak, "FLOP/s"), quantity(capacity, "B"), quantity(bandwidth, "B/s"), quantity(link, "B/s"), f"{domain:g}")
    _output.out().print(result)
    fits = table("Software stacks")
    fits.add_column("name", no_wrap=True)
    fits.add_column("family", no_wrap=True)
    fits.add_column("runs", justify="right", no_wrap=True)
    fits.add_column("quality", overflow="fold")
    for name, fit in stacks:
        fits.add_row(name, str(fit.get("family", "")), str(fit.get("rows", "") or ""), str(fit.get("quality", "")))
    _output.out().print(fits)


def _show_system(name: str, as_json: bool) -> None:
    from ..hardware import describe, resolve_name
    from . import _output

    rows = describe(name)
    title = name if name.endswith(".toml") else resolve_name(name)
    if as_json:
        _output.print_json({"system": title, "numbers": [dataclasses.asdict(row) for row in rows]})
        return
    from ..report import provenance_table

    _output.out().print(provenance_table(rows, f"{title}: bandwidths are one direction of one device"))


def _show_stack(name: str, as_json: bool) -> None:
    from ..stack import describe_stack, resolve_stack_name
    from . import _output

    meta, constants = describe_stack(name)
    title = name if name.endswith(".toml") else resolve_stack_name(name)
    if as_json:
        _output.print_json({"stack": title, "fit": meta, "constants": [dataclasses.asdict(constant) for constant in constants]})
        return
    from .._units import quantity
    from ..report import unit_of
    from ..report._tables import table

    result = table(f"Software stack {title}")
    result.add_column("constant", no_wrap=True)
    for heading in ("value", "80% from", "to", "prior", "learned"):
        result.add_column(heading, justify="right", no_wrap=True)
    for c in constants:
        shown = [quantity(x, unit_of(f"stack.{c.name}")) for x in (c.value, c.low, c.high, c.prior)]
        learned = "" if abs(c.value - c.prior) <= 5e-3 * abs(c.prior) else f"{c.value / c.prior - 1:+.0%}"
        result.add_row(c.name, *shown, learned)
    _output.out().print(result)
    for key, value in meta.items():
        _output.out().print(f"{key}: {value}", markup=False)


def _list_models(as_json: bool) -> None:
    from ..workload import catalog_entry, load_model, model_names, num_active_parameters, num_layers, num_parameters, published_parameters
    from . import _output

    rows = []
    for name in model_names():
        model = load_model(name)
        numbers = (float(f(model)) for f in (num_parameters, num_active_parameters, num_layers))
        rows.append((name, *numbers, float(model.seq_len), published_parameters(name), catalog_entry(name).source))
    if as_json:
        keys = ("name", "parameters", "active_parameters", "layers", "seq_len", "published_parameters", "source")
        _output.print_json({"models": [dict(zip(keys, row)) for row in rows]})
        return
    from .._units import count_text
    from ..report._tables import table

    result = table(f"{len(rows)} models")
    result.add_column("name", no_wrap=True)
    for heading in ("parameters", "active", "published", "layers", "seq"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, parameters, active, layers, seq, published, _ in rows:
        shown = count_text(active) if active < 0.995 * parameters else ""
        result.add_row(name, count_text(parameters), shown, count_text(published) if published else "", f"{layers:g}", f"{seq:g}")
    _output.out().print(result)


def _one_model(name: str, seq: int | None, as_json: bool) -> None:
    import numpy as np

    from ..workload import catalog_entry, forward_flops_per_sequence, num_active_parameters, num_layers, num_parameters
    from . import _inputs, _output

    model, title, in_file = _inputs.read_model(name, seq)
    entry = None if in_file else catalog_entry(name)
    fields = [field for field in model.blocks.__dataclass_fields__ if np.ndim(getattr(model.blocks, field))]
    columns = {field: np.asarray(getattr(model.blocks, field)).tolist() for field in fields}
    blocks = [{field: column[kind] for field, column in columns.items()} for kind in range(len(columns["count"]))]
    facts = {
        "name": title,
        "parameters": float(num_parameters(model)),
        "active_parameters": float(num_active_parameters(model)),
        "published_parameters": float(entry.published) if entry and entry.published else None,
        "published_active_parameters": float(entry.published_active) if entry and entry.published_active else None,
        "layers": float(num_layers(model)),
        "hidden": float(model.hidden),
        "vocab": float(model.vocab),
        "tied_embedding": bool(model.tied),
        "seq_len": float(model.seq_len),
        "forward_flops_per_token": float(forward_flops_per_sequence(model) / model.seq_len),
        "source": entry.source if entry else title,
        "blocks": blocks,
    }
    if as_json:
        _output.print_json(facts)
        return
    from rich.table import Table

    from .._units import count_text, quantity
    from ..report._tables import table

    grid = Table.grid(padding=(0, 2))
    published = facts["published_parameters"]
    apart = f"  (published {count_text(published)}, {facts['parameters'] / published - 1:+.2%})" if published else ""
    grid.add_row("model", facts["name"])
    grid.add_row("parameters", count_text(facts["parameters"]) + apart)
    if facts["active_parameters"] < 0.995 * facts["parameters"]:
        grid.add_row("active per token", count_text(facts["active_parameters"]))
    grid.add_row("layers, width", f"{facts['layers']:g}, {facts['hidden']:g}")
    grid.add_row("vocabulary", f"{facts['vocab']:g}" + (", tied" if facts["tied_embedding"] else ""))
    grid.add_row("sequence", f"{facts['seq_len']:g} positions")
    grid.add_row("forward FLOP per token", quantity(facts["forward_flops_per_token"], "FLOP"))
    grid.add_row("source", facts["source"])
    _output.out().print(grid)
    kinds = table("Kinds of layer")
    kinds.add_column("")
    for at in range(len(blocks)):
        kinds.add_column(str(at), justify="right")
    for field in blocks[0]:
        values = [block[field] for block in blocks]
        if any(values):
            kinds.add_row(field, *(f"{value:,.10g}" for value in values))
    _output.out().print(kinds)
