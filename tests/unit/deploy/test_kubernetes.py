"""The objects of Kubernetes fit each other, the workers and the image."""

import pytest
import yaml

from tests.support.deployment_files import (
    KUBERNETES,
    PROJECT,
    compose,
    container,
    containers,
    in_kubernetes,
    instructions,
    manifests,
    of_kind,
    pods,
)


class TestKubernetes:
    def test_every_file_is_applied(self) -> None:
        listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
        assert {path.name for path in KUBERNETES.glob("*.yaml")} == {*listed, "kustomization.yaml"}

    def test_objects_have_names_of_their_own(self) -> None:
        names = [(document["apiVersion"], document["kind"], document["metadata"]["name"]) for document in manifests()]
        assert len(set(names)) == len(names)

    def test_selectors_match_the_labels_of_exactly_one_kind_of_pod(self) -> None:
        selectors = [
            *(
                (document, document["spec"]["selector"]["matchLabels"])
                for document in of_kind("Deployment", "PodDisruptionBudget")
            ),
            *((document, document["spec"]["selector"]) for document in of_kind("Service")),
        ]
        assert len(selectors) == 5
        for document, selector in selectors:
            matched = [name for name, pod in pods().items() if selector.items() <= pod["metadata"]["labels"].items()]
            assert matched == [document["metadata"]["name"]]

    def test_the_network_policy_covers_every_pod_and_opens_their_port(self) -> None:
        (policy,) = of_kind("NetworkPolicy")
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in pods().values())
        (rule,) = policy["spec"]["ingress"]
        assert [str(port["port"]) for port in rule["ports"]] == [
            in_kubernetes("gracestream-editor")["GRACESTREAM_HTTP_PORT"]
        ]

    def test_what_pods_refer_to_exists(self) -> None:
        existing = {(document["kind"], document["metadata"]["name"]) for document in manifests()}
        for pod in pods().values():
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            inside = [*pod["spec"].get("initContainers", ()), container(pod)]
            mounted = {mount["name"] for one in inside for mount in one["volumeMounts"]}
            assert mounted == volumes.keys()
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in existing
            for one in inside:
                mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
                certificates = volumes[mounts["/etc/gracestream/certificates"]]["secret"]
                expected = (f"gracestream-{one['name']}-certificates", True)
                assert (certificates["secretName"], certificates["optional"]) == expected
        for name, one in containers().items():
            config, *secrets = one["envFrom"]
            assert ("ConfigMap", config["configMapRef"]["name"]) in existing
            # After the ConfigMap, so that they win, the container's own last; their text is in no file.
            assert [secret["secretRef"] for secret in secrets] == [
                {"name": "gracestream-credentials", "optional": True},
                {"name": f"{name}-credentials", "optional": True},
            ]
        (autoscaler,) = of_kind("HorizontalPodAutoscaler")
        target = autoscaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in existing
        assert not of_kind("Secret")

    @pytest.mark.parametrize("name", ["gracestream-editor", "gracestream-inference"])
    def test_probes_ask_the_worker_s_port(self, name: str) -> None:
        worker = container(pods()[name])
        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        probes = {kind: worker[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        assert {kind: probe["path"] for kind, probe in probes.items()} == {
            "startup": "/live",
            "liveness": "/live",
            "readiness": "/ready",
        }
        assert {str(ports[probe["port"]]) for probe in probes.values()} == {
            in_kubernetes(name)["GRACESTREAM_HTTP_PORT"]
        }
        service = next(document for document in of_kind("Service") if document["metadata"]["name"] == name)
        (port,) = service["spec"]["ports"]
        annotations = service["metadata"]["annotations"]
        assert port["port"] == ports[port["targetPort"]] == int(annotations["prometheus.io/port"])
        assert annotations["prometheus.io/scrape"] == "true"
        # Otherwise a replica that is not ready vanishes from Prometheus, and no alert says so.
        assert service["spec"]["publishNotReadyAddresses"] is True

    def test_there_is_one_editor_and_it_has_a_gpu(self) -> None:
        (editor,) = [
            document for document in of_kind("Deployment") if document["metadata"]["name"] == "gracestream-editor"
        ]
        assert editor["spec"]["replicas"] == 1
        assert editor["spec"]["strategy"] == {"type": "Recreate"}
        assert container(editor["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container(editor["spec"]["template"])["image"] == "gracestream-gpu"

    def test_no_service_can_overwrite_a_setting(self) -> None:
        for name, pod in pods().items():
            assert pod["spec"]["enableServiceLinks"] is False, name

    def test_pods_run_without_privileges_as_the_image_s_user(self) -> None:
        (user,) = [arguments for instruction, arguments in instructions() if instruction == "USER"]
        for name, pod in pods().items():
            security = pod["spec"]["securityContext"]
            assert security["runAsNonRoot"] is True, name
            assert f"{security['runAsUser']}:{security['runAsGroup']}" == user, name
        for one in containers().values():
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }

    def test_everything_can_be_applied_again_with_another_image(self) -> None:
        """The pods of a Job cannot be changed, so `kubectl apply` of another version would fail."""
        assert of_kind("Job") == []

    def test_references_to_fields_name_the_version_of_the_api(self) -> None:
        """Else the API server adds it, and whoever compares the files with the cluster sees a difference for ever."""
        for one in containers().values():
            for variable in one.get("env", []):
                if "valueFrom" in variable:
                    assert variable["valueFrom"]["fieldRef"]["apiVersion"] == "v1"

    def test_images_bear_the_project_s_version_and_commands_are_those_of_compose(self) -> None:
        images = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"]
        assert {image["newTag"] for image in images} == {PROJECT["version"]}
        assert {one["image"] for one in containers().values()} == {image["name"] for image in images}
        for one in containers().values():
            command, *options = one["args"]
            assert [command] == compose()["services"][one["name"]]["command"]
            assert options == (["--replication", "3"] if one["name"] == "topics" else [])
