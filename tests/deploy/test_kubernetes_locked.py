"""deploy/kubernetes: the gateway, and the components that lock it and the services."""

from pathlib import Path

from kustomize import KUBERNETES, PROBES, allowed, container, find, read, render, write_overlay


def test_locked_services_use_the_certificates_that_they_are_given(tmp_path: Path) -> None:
    resources = render(write_overlay(tmp_path, "cpu", "locked"))
    folder = find(resources, "ConfigMap", "model")["data"]["PAGEWIRE_TLS"]
    issuers = {one["metadata"]["name"] for one in resources if one["kind"] == "Issuer"}
    for name, other in (("scheduler", "worker"), ("worker", "scheduler")):
        certificate = find(resources, "Certificate", name)["spec"]
        assert {name, "localhost"} <= set(certificate["dnsNames"])  # of which probes use the second
        assert certificate["issuerRef"]["name"] in issuers
        pod = find(resources, "Deployment", name)["spec"]["template"]["spec"]
        secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        mounts = {mount["mountPath"]: secrets.get(mount["name"]) for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts[folder] == certificate["secretName"]
        assert f"--{other}-identity={other}" in pod["containers"][0]["args"]


def test_the_gateway_calls_the_scheduler_where_it_is_and_serves_where_it_is_probed(tmp_path: Path) -> None:
    resources = read(KUBERNETES / "openai" / "openai.yaml")
    deployment = find(resources, "Deployment", "openai")
    (port,) = (one["port"] for one in find(resources, "Service", "openai")["spec"]["ports"])
    variables = {variable["name"]: variable["value"] for variable in container(deployment)["env"]}
    scheduler = find(render(KUBERNETES / "cpu"), "Service", "scheduler")
    assert variables["PAGEWIRE_TARGET"] == f"scheduler:{scheduler['spec']['ports'][0]['port']}"
    assert variables["PAGEWIRE_HTTP_LISTEN"] == f"0.0.0.0:{port}"
    assert {container(deployment)[probe]["httpGet"]["port"] for probe in PROBES} == {port}
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert list(allowed(resources, "Ingress", labels)) == [port]
    assert list(allowed(resources, "Egress", labels)) == [scheduler["spec"]["ports"][0]["port"]]


def test_locked_and_with_the_gateway_both_have_certificates_of_one_authority_and_the_gateway_a_key(
    tmp_path: Path,
) -> None:
    resources = render(write_overlay(tmp_path, "cpu", "locked", "openai", "openai-locked"))
    scheduler, certificate = (find(resources, "Certificate", name)["spec"] for name in ("scheduler", "openai"))
    assert certificate["issuerRef"] == scheduler["issuerRef"]
    deployment = find(resources, "Deployment", "openai")
    target, *others = (one for one in container(deployment)["env"] if one["name"] != "PAGEWIRE_HTTP_LISTEN")
    assert target["value"].partition(":")[0] in scheduler["dnsNames"]
    assert find(resources, "Service", "openai")["metadata"]["name"] in certificate["dnsNames"]
    (folder,) = {one["value"] for one in others if "value" in one}
    assert {one["name"] for one in others} == {"PAGEWIRE_CLIENT_TLS", "PAGEWIRE_HTTP_TLS", "PAGEWIRE_CLIENT_API_KEY"}
    (key,) = (one["valueFrom"]["secretKeyRef"] for one in others if "valueFrom" in one)
    made = f"create secret generic {key['name']} --from-literal={key['key']}="
    for page in (KUBERNETES.parent / "README.md", KUBERNETES / "openai-locked" / "kustomization.yaml"):
        assert made in page.read_text()
    pod = deployment["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    mounts = {mount["mountPath"]: secrets.get(mount["name"]) for mount in container(deployment)["volumeMounts"]}
    assert mounts[folder] == certificate["secretName"]
    assert {container(deployment)[probe]["httpGet"]["scheme"] for probe in PROBES} == {"HTTPS"}


def test_keys_are_mounted_with_their_folder(tmp_path: Path) -> None:
    """A `subPath` stays the old file when the Secret changes."""
    resources = render(write_overlay(tmp_path, "cpu", "locked", "openai", "openai-locked"))
    mounts = {
        one["metadata"]["name"]: container(one)["volumeMounts"] for one in resources if one["kind"] == "Deployment"
    }
    assert not [mount for of in mounts.values() for mount in of if "subPath" in mount or "subPathExpr" in mount]
    arguments = container(find(resources, "Deployment", "scheduler"))["args"]
    (file,) = (one.partition("=")[2] for one in arguments if one.startswith("--api-keys="))
    assert str(Path(file).parent) in [mount["mountPath"] for mount in mounts["scheduler"]]
