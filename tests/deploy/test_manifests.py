"""The manifests: valid for Kubernetes, and in agreement with one another and with what the code reads."""

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from itertools import chain

import grpc
import kubernetes_validate
import pytest
import yaml
from dtckpt_server import main as server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.coordinators import running_server

from dtckpt.cli.arguments import parse_mesh
from dtckpt.cli.commands import cli
from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.options import parse_size
from dtckpt.coordination.connect import connect
from dtckpt.coordination.discovery import DEFAULT_PORT, find_coordinator

from .dockerfile import read_stages
from .kustomize import DEPLOY, FOLDERS, pods_of, render

OBJECTS = {folder: render(DEPLOY / folder) for folder in FOLDERS}
PODS = [pytest.param(folder, pod, id=f"{folder}/{pod.owner}") for folder in FOLDERS for pod in pods_of(OBJECTS[folder])]
COORDINATORS = [each for each in PODS if "coordinator" in each.values[1].containers]
TRAINING = ("overlays/sidecar", "overlays/jobset")
LOCAL_TIER = "overlays/local-tier"
CUSTOM = {"JobSet": "jobset.x-k8s.io/v1alpha2", "ServiceMonitor": "monitoring.coreos.com/v1"}
JOBSET_LABELS = {
    "jobset.sigs.k8s.io/jobset-name": "dtckpt-train",
    "jobset.sigs.k8s.io/restart-attempt": "2",
    "batch.kubernetes.io/job-name": "dtckpt-train-clients-0",
}

PRINT_COORDINATOR = """
import os
from dtckpt.coordination.discovery import find_coordinator
found = find_coordinator(os.environ)
print(found.address, found.source)
"""


def of_kind(folder, kind):
    return [each for each in OBJECTS[folder] if each["kind"] == kind]


def one(items):
    (item,) = items
    return item


def client_pod(folder):
    return one(pod for pod in pods_of(OBJECTS[folder]) if "client" in pod.containers)


def coordinator_params(pod):
    serve = server.main.commands["serve"]
    return serve.make_context("serve", list(pod.containers["coordinator"]["args"])).params


def ports(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


# --- schemas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.29", "1.37"])  # the first with native sidecars for all, and the latest known
@pytest.mark.parametrize("folder", FOLDERS)
def test_objects_are_valid(folder, version):
    for each in OBJECTS[folder]:
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
        else:
            kubernetes_validate.validate(each, version, strict=True)
    for jobset in of_kind(folder, "JobSet"):
        for part in jobset["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **part["template"]}
            kubernetes_validate.validate(job, version, strict=True)


def test_validation_sees_what_does_not_belong():
    (job,) = render(DEPLOY / "reshard")
    job["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_renders_the_same(folder):
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / folder], check=True, capture_output=True, timeout=60)
    rendered = list(yaml.safe_load_all(done.stdout))
    assert sorted(rendered, key=str_of_name) == sorted(OBJECTS[folder], key=str_of_name)


def str_of_name(each):
    return each["kind"], each["metadata"]["name"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_there_once(folder):
    names = [str_of_name(each) for each in OBJECTS[folder]]
    assert len(set(names)) == len(names)
    assert all("namespace" not in each["metadata"] for each in OBJECTS[folder])  # kubectl's -n decides


def test_the_jobset_is_what_its_controller_takes():
    jobset = one(of_kind("overlays/jobset", "JobSet"))["spec"]
    known = {"network", "coordinator", "successPolicy", "failurePolicy", "replicatedJobs"}
    assert jobset.keys() <= known
    assert jobset["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    coordinator, clients = jobset["replicatedJobs"]
    assert coordinator.keys() | clients.keys() <= {"name", "replicas", "dependsOn", "template"}
    # The first may depend on none, and what a job depends on must come before it.
    assert "dependsOn" not in coordinator
    assert clients["dependsOn"] == [{"name": coordinator["name"], "status": "Ready"}]
    assert jobset["coordinator"] == {"replicatedJob": coordinator["name"], "jobIndex": 0, "podIndex": 0}
    # The coordinator never ends by itself.
    assert jobset["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [clients["name"]]}
    assert jobset["failurePolicy"].keys() == {"maxRestarts"}


# --- pods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "pod"), PODS)
def test_pods_may_do_no_more_than_they_need(folder, pod):
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["enableServiceLinks"] is False
    security = pod.spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == 65532
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for name, container in pod.containers.items():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert re.fullmatch(r"[a-z-]+:\d+\.\d+\.\d+", container["image"]), name
        resources = container["resources"]
        assert resources["limits"] == {"memory": resources["requests"]["memory"]}
        assert resources["requests"].keys() == {"cpu", "memory"}
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts <= {volume["name"] for volume in pod.spec.get("volumes", [])}
    others = [name for name in pod.containers if name != "coordinator"]
    for name in others:  # Python's libraries want a place for temporary files
        assert {"name": "tmp", "mountPath": "/tmp"} in pod.containers[name]["volumeMounts"]
        assert {"name": "tmp", "emptyDir": {}} in pod.spec["volumes"]


@pytest.mark.parametrize(("folder", "pod"), COORDINATORS)
def test_coordinators_listen_at_the_ports_that_are_named(folder, pod):
    params = coordinator_params(pod)
    named = {"grpc": params["port"], "health": params["health_port"], "metrics": params["metrics_port"]}
    assert ports(pod.containers["coordinator"]) == named
    assert named["grpc"] == DEFAULT_PORT == server.main.commands["serve"].make_context("serve", []).params["port"]
    assert params["host"] == "0.0.0.0"
    exposed = read_stages(DEPLOY.parent / "Dockerfile")["coordinator"].last("EXPOSE")
    assert exposed.split() == [str(port) for port in named.values()]
    assert params["log_format"] == "json"


@pytest.mark.parametrize(("folder", "pod"), COORDINATORS)
def test_probes_ask_the_health_service(folder, pod):
    container = pod.containers["coordinator"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    services = {kind: probe["grpc"]["service"] for kind, probe in probes.items()}
    assert services == {"startup": "readiness", "readiness": "readiness", "liveness": "liveness"}
    assert {probe["grpc"]["port"] for probe in probes.values()} == {ports(container)["health"]}
    # A restart costs the open barriers time: only after a minute.
    assert probes["liveness"]["failureThreshold"] * probes["liveness"]["periodSeconds"] >= 60
    with running_server(health_port=0) as running, grpc.insecure_channel(f"127.0.0.1:{running.health_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in services.values():
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("folder", "pod"), COORDINATORS)
def test_there_is_time_to_drain(folder, pod):
    assert pod.spec["terminationGracePeriodSeconds"] >= coordinator_params(pod)["drain_timeout_s"] + 10


def test_the_shared_coordinator_has_tls_and_tokens_from_secrets():
    pod = one(pods_of(OBJECTS["overlays/standalone"]))
    params = coordinator_params(pod)
    assert params["insecure"] is False
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.containers["coordinator"]["volumeMounts"]}
    assert all(mount["readOnly"] for mount in pod.containers["coordinator"]["volumeMounts"])
    assert f"{params['tls_cert']}" == f"{mounts['tls']}/tls.crt"
    assert f"{params['tls_key']}" == f"{mounts['tls']}/tls.key"
    assert f"{params['tokens_file']}" == f"{mounts['tokens']}/tokens"
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod.spec["volumes"]}
    readme = (DEPLOY / "README.md").read_text()
    assert all(
        f"create secret {kind} {secrets[name]}" in readme for name, kind in (("tls", "tls"), ("tokens", "generic"))
    )


def test_the_sidecar_is_a_native_one():
    spec = client_pod("overlays/sidecar").spec
    assert [(each["name"], each["restartPolicy"]) for each in spec["initContainers"]] == [("coordinator", "Always")]
    assert [each["name"] for each in spec["containers"]] == ["client"]


def test_one_coordinator_at_a_time():
    deployment = one(of_kind("overlays/standalone", "Deployment"))["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    coordinator = one(pod for pod in pods_of(OBJECTS["overlays/jobset"]) if "coordinator" in pod.containers)
    assert (coordinator.job["completions"], coordinator.job["parallelism"]) == (1, 1)
    assert coordinator.spec["restartPolicy"] == "OnFailure"  # in place, at the address that clients know


# --- addresses and reachability -----------------------------------------------------------------------------------


def pod_environment(pod, labels, annotations):
    """Return the variables of the client as Kubernetes sets them."""
    metadata = {f"metadata.labels['{key}']": value for key, value in labels.items()}
    metadata |= {f"metadata.annotations['{key}']": value for key, value in annotations.items()}
    env = {}
    for entry in pod.containers["client"]["env"]:
        env[entry["name"]] = (
            entry["value"] if "value" in entry else metadata[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        )
    return env


def environment(folder, index):
    pod = client_pod(folder)
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    if folder == "overlays/sidecar":
        return pod_environment(pod, {"batch.kubernetes.io/job-name": pod.owner}, annotations)
    jobset = one(of_kind(folder, "JobSet"))
    name, leader = jobset["metadata"]["name"], jobset["spec"]["coordinator"]
    host = f"{name}-{leader['replicatedJob']}-{leader['jobIndex']}-{leader['podIndex']}.{name}"
    return pod_environment(pod, JOBSET_LABELS, annotations | {"jobset.sigs.k8s.io/coordinator": host})


@pytest.mark.parametrize(
    ("folder", "address", "source"),
    [
        ("overlays/sidecar", "dtckpt-train-0.dtckpt-train:50051", "MASTER_ADDR and DTCKPT_COORDINATOR_PORT_NUMBER"),
        ("overlays/jobset", "dtckpt-train-coordinator-0-0.dtckpt-train:50051", "DTCKPT_JOBSET_COORDINATOR"),
    ],
)
def test_clients_find_the_coordinator(folder, address, source):
    env = environment(folder, 3)
    found = find_coordinator(env | {"MASTER_ADDR": env["PET_MASTER_ADDR"]})  # as torchrun does
    assert (found.address, found.source) == (address, source)
    assert find_coordinator(env).address == address  # and what is started beside torchrun
    # The host is a pod with a coordinator: its name is the owner's with an index, under the headless Service.
    host, _, port = address.partition(":")
    hostname, _, subdomain = host.partition(".")
    pod = one(pod for pod in pods_of(OBJECTS[folder]) if hostname == f"{pod.owner}-0")
    assert ports(pod.containers["coordinator"])["grpc"] == int(port)
    headless_services = {
        each["metadata"]["name"]: each["spec"]["publishNotReadyAddresses"]
        for each in of_kind(folder, "Service")
        if each["metadata"]["name"] == subdomain
    } or {one(of_kind(folder, "JobSet"))["metadata"]["name"]: True}
    assert headless_services == {subdomain: True}


@pytest.mark.parametrize(("folder", "attempt"), [("overlays/sidecar", 0), ("overlays/jobset", 2)])
def test_clients_say_who_they_are(folder, attempt):
    env = environment(folder, 3)
    member = connect(env | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}).member
    assert (member.job, member.attempt) == ("dtckpt-train", attempt)


@pytest.mark.processes
def test_torchrun_hands_on_what_names_the_coordinator(tmp_path):
    program = tmp_path / "client.py"
    program.write_text(PRINT_COORDINATOR)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = environment("overlays/sidecar", 0)
    env |= {"PET_NNODES": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", program]
    done = subprocess.run(torchrun, env=os.environ | env, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "localhost:50051 MASTER_ADDR and DTCKPT_COORDINATOR_PORT_NUMBER"


@pytest.mark.parametrize("folder", TRAINING)
def test_torchrun_is_told_what_the_job_says(folder):
    pod, env = client_pod(folder), environment(folder, 3)
    assert pod.job["completionMode"] == "Indexed"
    assert pod.job["completions"] == pod.job["parallelism"] == int(env["PET_NNODES"])
    assert env["PET_NODE_RANK"] == "3"
    hostname, _, subdomain = env["PET_MASTER_ADDR"].partition(".")
    assert hostname == f"{pod.owner}-0"
    assert pod.spec.get("subdomain", "dtckpt-train") == subdomain == "dtckpt-train"
    assert ports(pod.containers["client"])["torch"] == int(env["PET_MASTER_PORT"])


def test_what_a_local_tier_needs_outlives_restarts():
    pod = client_pod(LOCAL_TIER)
    job = one(of_kind(LOCAL_TIER, "JobSet"))["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = pod.containers["client"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert pod.spec["restartPolicy"] == "OnFailure", "a container restarts in its pod, whose volumes stay"
    assert job["backoffLimit"] > 0 < int(env["PET_MAX_RESTARTS"])
    assert job["completions"] == job["parallelism"] == int(env["PET_NNODES"])
    assert {"DTCKPT_HOST", "DTCKPT_DOMAIN"} < env.keys()
    assert "DTCKPT_ATTEMPT" not in env, "torchrun counts the attempts"
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "tier")
    assert volume["emptyDir"]["medium"] == "Memory"
    assert {"name": "tier", "mountPath": "/tier"} in container["volumeMounts"]
    budget = one(of_kind(LOCAL_TIER, "PodDisruptionBudget"))["spec"]
    assert budget["minAvailable"] == job["parallelism"] - 1


@pytest.mark.parametrize("folder", TRAINING)
def test_drains_wait_for_whole_jobs(folder):
    budget, pod = one(of_kind(folder, "PodDisruptionBudget"))["spec"], client_pod(folder)
    assert budget["minAvailable"] == pod.job["parallelism"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert [each for each in pods_of(OBJECTS[folder]) if each.is_selected_by(budget["selector"])] == [pod]


@pytest.mark.parametrize("folder", ["overlays/standalone", *TRAINING])
def test_services_lead_to_ports_of_pods(folder):
    pods = list(pods_of(OBJECTS[folder]))
    for service in of_kind(folder, "Service"):
        spec = service["spec"]
        pod = one(pod for pod in pods if pod.is_selected_by({"matchLabels": spec["selector"]}))
        open_ports = {name: port for each in pod.containers.values() for name, port in ports(each).items()}
        for port in spec["ports"]:
            assert port["port"] == port["targetPort"] == open_ports[port["name"]]


@pytest.mark.parametrize("folder", ["overlays/standalone", *TRAINING])
def test_prometheus_finds_the_metrics(folder):
    monitor = one(of_kind(folder, "ServiceMonitor"))["spec"]
    labels = monitor["selector"]["matchLabels"].items()
    watched = one(each for each in of_kind(folder, "Service") if labels <= each["metadata"]["labels"].items())
    (endpoint,) = monitor["endpoints"]
    assert [port["name"] for port in watched["spec"]["ports"]] == [endpoint["port"]]
    with running_server(metrics_port=0) as running:
        url = f"http://127.0.0.1:{running.metrics_port}{endpoint['path']}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"dtckpt_coordinator_" in answer.read()


@pytest.mark.parametrize("folder", ["overlays/standalone", *TRAINING])
def test_network_policies_let_clients_and_prometheus_in(folder):
    pods = list(pods_of(OBJECTS[folder]))
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(folder, "NetworkPolicy")}
    coordinators = [pod for pod in pods if "coordinator" in pod.containers]
    ingress = policies["dtckpt-coordinator"]
    assert [pod for pod in pods if pod.is_selected_by(ingress["podSelector"])] == coordinators
    clients, monitoring = ingress["ingress"]
    named = ports(coordinators[0].containers["coordinator"])
    assert [port["port"] for port in clients["ports"]] == [named["grpc"]]
    assert [port["port"] for port in monitoring["ports"]] == [named["metrics"]]
    for pod in pods:
        assert pod.is_selected_by(one(clients["from"])["podSelector"]) == ("client" in pod.containers)
    # What a coordinator shares its pod with must get out.
    alone = [pod for pod in coordinators if pod.containers.keys() == {"coordinator"}]
    egress = policies["dtckpt-coordinator-egress"]
    assert egress["egress"] == []
    assert [pod for pod in pods if pod.is_selected_by(egress["podSelector"])] == alone


def test_clients_beside_a_coordinator_reach_one_another():
    pod = client_pod("overlays/sidecar")
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("overlays/sidecar", "NetworkPolicy")}
    assert pod.is_selected_by(policies["dtckpt-train"]["podSelector"])
    rule = one(policies["dtckpt-train"]["ingress"])
    assert rule.keys() == {"from"}  # at any port
    assert pod.is_selected_by(one(rule["from"])["podSelector"])


def test_variables_are_ones_that_are_read():
    named = {name for file in DEPLOY.rglob("*.*") for name in re.findall(r"DTCKPT_\w+", file.read_text())}
    root = DEPLOY.parent
    sources = chain.from_iterable((root / package).rglob("*.py") for package in ("dtckpt", "server"))
    read = {name for file in sources for name in re.findall(r"DTCKPT_\w+", file.read_text())}
    assert "DTCKPT_COORDINATOR" in named
    assert named <= read


# --- reshard ------------------------------------------------------------------------------------------------------


def test_the_reshard_job_is_a_command_that_works():
    pod = one(pods_of(OBJECTS["reshard"]))
    container = pod.containers["reshard"]
    name, *arguments = container["args"]
    params = cli.commands[name].make_context(name, arguments).params
    mesh = parse_mesh(params["mesh"])
    for rule in params["layouts"]:
        pattern, _, spec = rule.partition("=")
        assert pattern
        assert set(spec.split(",")) <= set(mesh.dim_names)
    assert container["resources"]["limits"]["memory"].endswith("Gi")
    assert 2 * parse_size(params["max_memory"]) <= parse_size(container["resources"]["limits"]["memory"] + "B")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    job = one(pods_of(OBJECTS["reshard"])).job
    assert job["completions"] == job["parallelism"] == params["workers"] > 1
    assert params["resume"]  # a pod that is repeated keeps what it had
    for path in (params["src"], params["dst"]):
        assert any(path.startswith(f"{mount}/") for mount in mounts)


def test_the_reshard_job_repeats_only_what_may_succeed():
    pod = one(pods_of(OBJECTS["reshard"]))
    disrupted, failed = pod.job["podFailurePolicy"]["rules"]
    assert (disrupted["action"], failed["action"]) == ("Ignore", "FailJob")
    final = {ExitCode.FAILED, ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.CONFLICT}
    assert failed["onExitCodes"] == {"containerName": "reshard", "operator": "In", "values": sorted(final)}
    assert pod.spec["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert pod.job["completionMode"] == "Indexed"


# --- scrub --------------------------------------------------------------------------------------------------------


def test_the_scrub_job_is_a_command_that_works():
    pod = one(pods_of(OBJECTS["scrub"]))
    container = pod.containers["scrub"]
    name, *arguments = container["args"]
    params = cli.commands[name].make_context(name, arguments).params
    assert parse_size(params["bytes_per_day"]) > parse_size(params["max_rate"])
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    places = {
        path: next(mount for mount in mounts if path.startswith(f"{mount}/"))
        for path in (params["root"], params["source"])
    }
    assert [mounts[mount] for mount in places.values()] == [False, True]


def test_the_scrub_job_repeats_only_what_may_succeed():
    (cron,) = of_kind("scrub", "CronJob")
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"  # another run would be refused
    disrupted, failed = cron["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert (disrupted["action"], failed["action"]) == ("Ignore", "FailJob")
    final = {ExitCode.FAILED, ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.CONFLICT}
    assert failed["onExitCodes"] == {"containerName": "scrub", "operator": "In", "values": sorted(final)}
