"""Fitting the calibrated model of collectives: priors, shipped constants, a user's logs, validation, and the verdict on a log's health."""

from ._calibrate import CollectiveCalibration as CollectiveCalibration
from ._calibrate import CollectiveFit as CollectiveFit
from ._calibrate import EngineFit as EngineFit
from ._calibrate import calibrate_collectives as calibrate_collectives
from ._predict import prepare_collectives as prepare_collectives
from ._priors import prior_of as prior_of
from ._settings import FABRICS as FABRICS
from ._settings import Setting as Setting
from ._settings import setting_of as setting_of
from ._validate import validate_collectives as validate_collectives
from ._vector import constants_of as constants_of
from ._verdict import LogVerdict as LogVerdict
from ._verdict import RowVerdict as RowVerdict
from ._verdict import judge_collectives as judge_collectives
from ._verdict import judge_rows as judge_rows
