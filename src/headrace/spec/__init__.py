"""Frozen values that describe a job, a model, a cluster, a plan and events. No torch at run time."""

from headrace.spec.cluster import Cluster, Host
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan, Role, Segment

__all__ = ["Cluster", "Host", "Job", "ModelSpec", "Options", "ParameterSpec", "Plan", "Role", "Segment"]
