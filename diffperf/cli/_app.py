"""The commands, in the order in which a reader meets them in `--help`."""

import typer

from . import _calibrate, _demo, _import, _measure, _predict, _search, _show

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
    ("show", _show.show),
    ("models", _show.models),
):
    app.command(_name)(_command)
for _name, _command, _help in (
    ("calibrate", _calibrate.calibrate_runs, "Adapt to your own measurements."),
    ("validate", _calibrate.validate_runs, "Compare predictions with measurements, refitting nothing."),
):
    _group = typer.Typer(help=_help, no_args_is_help=True)
    _group.command("runs")(_command)
    _group.callback()(lambda: None)
    app.add_typer(_group, name=_name)
_group = typer.Typer(help="Take measurements from other projects.", no_args_is_help=True)
_group.command("aiconfigurator")(_import.import_aiconfigurator)
_group.callback()(lambda: None)
app.add_typer(_group, name="import")
_group = typer.Typer(help="Time this machine.", no_args_is_help=True)
_group.command("kernels")(_measure.measure_kernels)
_group.command("collectives")(_measure.measure_collectives)
app.add_typer(_group, name="measure")
