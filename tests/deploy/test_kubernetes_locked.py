"""deploy/kubernetes: the component that locks the services."""

from pathlib import Path

from kustomize import container, find, render, write_overlay


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


def test_keys_are_mounted_with_their_folder(tmp_path: Path) -> None:
    """A `subPath` stays the old file when the Secret changes."""
    resources = render(write_overlay(tmp_path, "cpu", "locked"))
    mounts = {
        one["metadata"]["name"]: container(one)["volumeMounts"] for one in resources if one["kind"] == "Deployment"
    }
    assert not [mount for of in mounts.values() for mount in of if "subPath" in mount or "subPathExpr" in mount]
    arguments = container(find(resources, "Deployment", "scheduler"))["args"]
    (file,) = (one.partition("=")[2] for one in arguments if one.startswith("--api-keys="))
    assert str(Path(file).parent) in [mount["mountPath"] for mount in mounts["scheduler"]]
