"""The commands, in the order in which a reader meets them in `--help`."""

import typer

from . import _calibrate, _collectives, _demo, _import, _kernels, _measure, _overlap, _predict, _search, _show, _trace

app = typer.Typer(
    help="How long will it take? Differentiable, calibrated performance models of ML training: time, memory, energy and cost.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from ._output import version as installed

        print(f"diffperf {installed()}")
        raise typer.Exit()


for _name, _command in (
    ("demo", _demo.demo),
    ("predict", _predict.predict),
    ("explain", _predict.explain),
    ("tune", _search.tune),
    ("sweep", _search.sweep),
    ("nccl-tests", _collectives.nccl_tests),
    ("show", _show.show),
    ("models", _show.models),
    ("trace", _trace.trace),
):
    app.command(_name)(_command)
_fits = {"runs": _calibrate.calibrate_runs, "kernels": _kernels.calibrate_kernels, "collectives": _collectives.calibrate_collectives,
         "overlap": _overlap.calibrate_overlap}  # fmt: skip
_checks = {"runs": _calibrate.validate_runs, "kernels": _kernels.validate_kernels, "collectives": _collectives.validate_collectives}
for _name, _help, _commands in (
    ("calibrate", "Adapt to your own measurements.", _fits),
    ("validate", "Compare predictions with measurements, refitting nothing.", _checks),
):
    _group = typer.Typer(help=_help, no_args_is_help=True)
    for _word, _command in _commands.items():
        _group.command(_word)(_command)
    app.add_typer(_group, name=_name)
_group = typer.Typer(help="Take measurements from other projects.", no_args_is_help=True)
_group.command("aiconfigurator")(_import.import_aiconfigurator)
_group.callback()(lambda: None)  # keeps the word of a group's only command
app.add_typer(_group, name="import")
_group = typer.Typer(help="Time this machine.", no_args_is_help=True)
_group.command("kernels")(_measure.measure_kernels)
_group.command("collectives")(_measure.measure_collectives)
app.add_typer(_group, name="measure")
