"""Manifests for Kubernetes: an Indexed Job, a JobSet, or a TrainJob of Kubeflow."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.cli.launch_files.scripts import LaunchRequest, processes_of_each
from headrace.errors import UsageError

_PORT = 29500
_RUNS = "/runs"
_ALIVE = "/tmp/headrace-alive"
_ALIVE_S = 60
"""Without a sign of life after which a container is started again."""
_START_S = 600
_LEFT_S = 30
"""Of the time to end, for what comes after the checkpoint."""
_RETRIES = 10
_GPU = "nvidia.com/gpu"

Manifest = Mapping[str, Any]


class Form(StrEnum):
    """What the cluster starts."""

    JOB = "job"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"


@dataclass(frozen=True)
class PodSettings:
    """What the pods need: an image with headrace and the job file, and a claim that all of them can write."""

    image: str
    claim: str


def manifests(wanted: LaunchRequest, pods: PodSettings, form: Form) -> list[Manifest]:
    """Returns the documents of the file; each call makes a new secret.

    Raises UsageError for numbers of workers and hosts that the form does not have.
    """
    made: Mapping[Form, Callable[[LaunchRequest, PodSettings], list[Manifest]]] = {
        Form.JOB: _indexed_job,
        Form.JOBSET: _job_set,
        Form.TRAINJOB: _train_job,
    }
    if wanted.hosts is not None and form != Form.TRAINJOB:
        raise UsageError("Kubernetes gives each worker a pod and chooses its host; leave --hosts out")
    return [_secret(wanted), *made[form](wanted, pods)]


def _secret(wanted: LaunchRequest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": wanted.name},
        "stringData": {"secret": secrets.token_hex(32)},
    }


def _indexed_job(wanted: LaunchRequest, pods: PodSettings) -> list[Manifest]:
    label = {"app.kubernetes.io/name": wanted.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": wanted.name},
        "spec": {
            "clusterIP": "None",
            # Pods look each other up before they are ready, because they are ready when they have met.
            "publishNotReadyAddresses": True,
            "selector": label,
            "ports": [{"name": "headrace", "port": _PORT}],
        },
    }
    spec = _job_spec(wanted, pods, f"{wanted.name}-0.{wanted.name}", _RETRIES * wanted.workers)
    template = {"metadata": {"labels": label}, "spec": {"subdomain": wanted.name, **spec["template"]["spec"]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": wanted.name}}
    return [service, {**job, "spec": {**spec, "template": template}}]


def _job_set(wanted: LaunchRequest, pods: PodSettings) -> list[Manifest]:
    # A pod that fails ends its Job, and then all begin again at once.
    job = {"spec": _job_spec(wanted, pods, f"{wanted.name}-worker-0-0.{wanted.name}", 0)}
    mistakes = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _RETRIES, "rules": [mistakes]},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": job}],
    }
    return [{**_head("jobset.x-k8s.io/v1alpha2", "JobSet", wanted), "spec": spec}]


def _train_job(wanted: LaunchRequest, pods: PodSettings) -> list[Manifest]:
    nodes = wanted.hosts or wanted.workers
    per_node = processes_of_each(wanted.workers, nodes)
    trainer = {
        "image": pods.image,
        # It finds the other nodes by what the runtime sets.
        "command": ["torchrun", "--no-python", *_train(wanted)],
        "numNodes": nodes,
        "numProcPerNode": per_node,
        "env": [_secret_variable(wanted)],
        "resourcesPerNode": _resources(wanted, per_node),
    }
    pod = {
        "terminationGracePeriodSeconds": wanted.save_s + _LEFT_S,
        "containers": [{"name": "node", "volumeMounts": [_mount()]}],
        "volumes": [_volume(pods)],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patched = {"template": {"spec": {"replicatedJobs": [job]}}}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "headrace.io/launch-files", "trainingRuntimeSpec": patched}],
    }
    return [{**_head("trainer.kubeflow.org/v1alpha1", "TrainJob", wanted), "spec": spec}]


def _head(version: str, kind: str, wanted: LaunchRequest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": wanted.name}}


def _job_spec(wanted: LaunchRequest, pods: PodSettings, first: str, retries: int) -> dict[str, Any]:
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": wanted.save_s + _LEFT_S,
        "containers": [_container(wanted, pods, first)],
        "volumes": [_volume(pods)],
    }
    return {
        "completionMode": "Indexed",
        "completions": wanted.workers,
        "parallelism": wanted.workers,
        "backoffLimit": retries,
        "podFailurePolicy": {
            "rules": [
                # A node is taken away.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # Wrong arguments, a machine that lacks something, wrong data: another attempt would end the same way.
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3, 5]}},
            ]
        },
        "template": {"spec": pod},
    }


def _container(wanted: LaunchRequest, pods: PodSettings, first: str) -> Mapping[str, Any]:
    variables = {
        "WORLD_SIZE": str(wanted.workers),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(_PORT),
        "HEADRACE_ALIVE_FILE": _ALIVE,
    }
    begun = {"exec": {"command": ["test", "-e", _ALIVE]}, "periodSeconds": 5}
    fresh = f'test "$(($(date +%s) - $(stat -c %Y {_ALIVE})))" -lt {_ALIVE_S}'
    return {
        "name": "headrace",
        "image": pods.image,
        "command": _train(wanted),
        "env": [*({"name": name, "value": value} for name, value in variables.items()), _secret_variable(wanted)],
        "ports": [{"name": "headrace", "containerPort": _PORT}],
        "resources": _resources(wanted, 1),
        # It has met the others, and it is not frozen.
        "startupProbe": {**begun, "failureThreshold": _START_S // 5},
        "livenessProbe": {"exec": {"command": ["sh", "-c", fresh]}, "periodSeconds": 20},
        "volumeMounts": [_mount()],
    }


def _train(wanted: LaunchRequest) -> list[str]:
    return wanted.train(wanted.run_dir or f"{_RUNS}/{wanted.name}")


def _secret_variable(wanted: LaunchRequest) -> Mapping[str, Any]:
    source = {"secretKeyRef": {"name": wanted.name, "key": "secret"}}
    return {"name": "HEADRACE_SECRET", "valueFrom": source}


def _resources(wanted: LaunchRequest, processes: int) -> Mapping[str, Any]:
    both = {"cpu": str(wanted.cores * processes)}
    if wanted.memory_gb is not None:
        both["memory"] = f"{round(1024 * wanted.memory_gb * processes)}Mi"
    # What a device plugin adds is never shared, and requested by its limit.
    gpus = {_GPU: str(wanted.gpus * processes)} if wanted.gpus else {}
    return {"requests": both, "limits": both | gpus}


def _mount() -> Mapping[str, Any]:
    return {"name": "runs", "mountPath": _RUNS}


def _volume(pods: PodSettings) -> Mapping[str, Any]:
    return {"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}}


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?<!-)")
"""Texts that need no quotes, unless they mean something else."""
_OTHERS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_of(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns documents with a line of three hyphens between them."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _after(f"{_scalar(key)}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _after(key: str, item: Any) -> Iterator[str]:
    if isinstance(item, Mapping | list) and item:
        yield key
        yield from (f"  {line}" for line in _lines(item))
    else:
        yield f"{key} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHERS:
        return value
    # YAML reads JSON.
    return json.dumps(value)
