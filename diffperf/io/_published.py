"""Where the table of published training runs lies: in the installed package, or in the source tree."""
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def published_runs_path() -> Path:
    """Path of `training_runs.csv`, published step times with their citations. Read it with `read_runs`.

    A wheel carries it as `diffperf/data/training_runs.csv`; an editable install finds `calibration/published/` beside the
    package, where its README and the script that repaired it are.

    Raises:
      FileNotFoundError: when neither is there, that is when the package was copied by hand.
    """
    places = (_PACKAGE / "data" / "training_runs.csv", _PACKAGE.parent / "calibration" / "published" / "training_runs.csv")
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"training_runs.csv is neither at {places[0]} nor at {places[1]}. Install diffperf from its "
                            "wheel, or as an editable install from a full checkout.")
