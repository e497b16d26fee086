"""Fitting the models to measurements: published training runs, and a user's own."""

from ._calibration import Calibration as Calibration
from ._calibration import load_calibration as load_calibration
from ._fit import Fit as Fit
from ._fit import fit_runs as fit_runs
from ._frameworks import FAMILIES as FAMILIES
from ._overlap import OverlapFit as OverlapFit
from ._overlap import calibrate_overlap as calibrate_overlap
from ._overlap import load_overlap_fit as load_overlap_fit
from ._posterior import Posterior as Posterior
from ._posterior import Prediction as Prediction
from ._posterior import build_posterior as build_posterior
from ._predict import StepPrediction as StepPrediction
from ._predict import predict_step as predict_step
from ._published import fit_published as fit_published
from ._rows import Rows as Rows
from ._rows import SkipRun as SkipRun
from ._rows import prepare as prepare
from ._user import CalibrationReport as CalibrationReport
from ._user import calibrate_runs as calibrate_runs
from ._validate import validate_runs as validate_runs
