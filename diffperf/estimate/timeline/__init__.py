"""When everything of a step runs: task graphs, their longest path, and the timeline of a predicted training step."""

from ._graph import Task as Task
from ._graph import TaskGraph as TaskGraph
from ._graph import TaskGraphError as TaskGraphError
from ._graph import task_graph as task_graph
from ._longest_path import finish_times as finish_times
from ._longest_path import makespan as makespan
from ._pipeline import pipeline_timeline as pipeline_timeline
from ._step import step_timeline as step_timeline
from ._timeline import Memory as Memory
from ._timeline import PathShare as PathShare
from ._timeline import Timeline as Timeline
from ._timeline import critical_path as critical_path
