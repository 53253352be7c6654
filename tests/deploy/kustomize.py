"""What Kustomize makes of the folders in deploy/, and the pods in it.

The folders use two features of Kustomize: resources and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDERS = ("overlays/standalone", "overlays/sidecar", "overlays/jobset", "overlays/local-tier", "reshard", "scrub")


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder with a ``kustomization.yaml``."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.pop("apiVersion") == "kustomize.config.k8s.io/v1beta1"
    assert kustomization.pop("kind") == "Kustomization"
    objects = []
    for name in kustomization.pop("resources"):
        path = folder / name
        objects += render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    (labels,) = kustomization.pop("labels")
    assert labels.keys() == {"pairs"}  # labels the objects themselves; neither selectors nor templates
    for each in objects:
        each["metadata"].setdefault("labels", {}).update(labels["pairs"])
    assert not kustomization, "these are not rendered here"
    return objects


@dataclass(frozen=True)
class Pod:
    """A template of pods, and what makes them."""

    owner: str
    template: dict[str, Any]
    job: dict[str, Any] | None
    """Spec of the Job, unless a Deployment makes the pods."""

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def spec(self) -> dict[str, Any]:
        return self.template["spec"]

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.spec.get("initContainers", []) + self.spec["containers"]}

    def is_selected_by(self, selector: dict[str, Any]) -> bool:
        """Tell whether a label selector, of which Exists and DoesNotExist are known, takes the pod."""
        wanted = selector.get("matchLabels", {}).items() <= self.labels.items()
        holds = {"Exists": lambda key: key in self.labels, "DoesNotExist": lambda key: key not in self.labels}
        return wanted and all(holds[rule["operator"]](rule["key"]) for rule in selector.get("matchExpressions", []))


def pods_of(objects: list[dict[str, Any]]) -> Iterator[Pod]:
    """Yield the templates of pods."""
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "Deployment":
            yield Pod(name, spec["template"], None)
        if each["kind"] == "Job":
            yield Pod(name, spec["template"], spec)
        if each["kind"] == "CronJob":
            job = spec["jobTemplate"]["spec"]
            yield Pod(name, job["template"], job)
        for part in spec.get("replicatedJobs", []):
            yield Pod(f"{name}-{part['name']}-0", part["template"]["spec"]["template"], part["template"]["spec"])
