"""Which wheels a machine lacks, with wheels that are made here."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bench.gpu.inventory import Inventory
from bench.gpu.resolve import Fetch, PackError, platforms, read_pins, resolve, version_of

MACHINE = Inventory("3.12", "x86_64", "2.35", {"torch": "2.11.0+cu130", "numpy": "2.5.2", "regex": None})


@pytest.fixture
def index(tmp_path: Path) -> Callable[[dict[str, list[str]]], Fetch]:
    """Makes an index of wheels by "name version", with what each requires."""

    def make(packages: dict[str, list[str]]) -> Fetch:
        def fetch(requirement: str) -> Path:
            wanted = Requirement(requirement)
            versions = [name.split()[1] for name in packages if name.split()[0] == wanted.name]
            fitting = sorted(wanted.specifier.filter(versions), key=Version)
            if not fitting:
                raise PackError(f"there is no wheel for {requirement}")
            file = tmp_path / f"{wanted.name.replace('-', '_')}-{fitting[-1]}-py3-none-any.whl"
            lines = [f"Requires-Dist: {line}" for line in packages[f"{wanted.name} {fitting[-1]}"]]
            with zipfile.ZipFile(file, "w") as wheel:
                wheel.writestr(f"{file.name.rsplit('-', 3)[0]}.dist-info/METADATA", "\n".join(["Name: x", *lines]))
            return file

        return fetch

    return make


Index = Callable[[dict[str, list[str]]], Fetch]


def versions(fetch: Fetch, *requirements: str, **pins: str) -> dict[str, str]:
    constraints = {name: SpecifierSet(pin) for name, pin in pins.items()}
    return resolve([Requirement(line) for line in requirements], MACHINE, fetch, constraints).versions


def test_what_the_machine_has_in_a_version_that_fits_is_not_brought_and_the_rest_is_with_all_it_requires(
    index: Index,
) -> None:
    fetch = index(
        {
            "server 1.0": ["numpy>=2", "web<2", "Torch==2.11.0", "regex"],
            "web 1.9": ["sockets"],
            "web 2.0": [],
            "sockets 3": [],
        }
    )
    plan = resolve([Requirement("server")], MACHINE, fetch)
    assert plan.versions == {"server": "1.0", "sockets": "3", "web": "1.9"}
    assert plan.on_machine == {"numpy": "2.5.2", "torch": "2.11.0+cu130", "regex": None}


def test_a_package_in_a_version_that_does_not_fit_is_brought_although_the_machine_has_one(index: Index) -> None:
    fetch = index({"server 1.0": ["numpy", "old"], "old 1": ["numpy<2"], "numpy 1.26": []})
    plan = resolve([Requirement("server")], MACHINE, fetch)
    assert plan.versions == {"server": "1.0", "old": "1", "numpy": "1.26"}
    assert "numpy" not in plan.on_machine


def test_a_machine_without_the_right_torch_is_refused_as_torch_is_never_brought(index: Index) -> None:
    with pytest.raises(PackError, match=r"torch==2\.12 is needed, and the machine has 2\.11\.0\+cu130; it is not"):
        versions(index({"server 1.0": ["torch==2.12"]}), "server")


def test_requirements_are_those_of_the_machine_and_not_of_the_one_that_packs(index: Index) -> None:
    fetch = index({
        "server 1.0": [
            'new; python_version > "3.11"', 'old; python_version <= "3.11"', 'arm; platform_machine == "aarch64"',
            'audio; extra == "sound"', 'films; extra == "video" and python_version > "3.11"',
        ],
        "new 1": [], "old 1": [], "arm 1": [], "audio 1": [], "films 1": [],
    })  # fmt: skip
    assert versions(fetch, "server[video]") == {"server": "1.0", "new": "1", "films": "1"}


def test_an_older_version_is_taken_of_a_package_that_requires_what_cannot_be_had(index: Index) -> None:
    fetch = index({
        "server 1.0": ["ffi==0.9", "grammar>=0.2"],
        "ffi 0.9": [], "ffi 1.0": [],
        "grammar 0.2": ["ffi"], "grammar 0.3": ["ffi>=1.0"],
    })  # fmt: skip
    assert versions(fetch, "server") == {"server": "1.0", "ffi": "0.9", "grammar": "0.2"}


def test_what_cannot_be_had_in_any_version_is_an_error(index: Index) -> None:
    with pytest.raises(PackError, match="there is no wheel for"):
        versions(index({"server 1.0": ["missing"], "server 0.9": ["missing"]}), "server")


def test_kernels_that_serving_makes_no_use_of_are_not_brought(index: Index) -> None:
    plan = resolve([Requirement("server")], MACHINE, index({"server 1.0": ["flashinfer_python==0.6"]}))
    assert plan.versions == {"server": "1.0"}
    assert plan.not_needed == {"flashinfer-python"}


def test_a_pin_holds_where_no_requirement_is_against_it(index: Index) -> None:
    fetch = index({"server 1.0": ["web", "other>=2"], "web 1": [], "web 2": [], "other 1": [], "other 3": []})
    assert versions(fetch, "server", web="==1", other="==1") == {"server": "1.0", "web": "1", "other": "3"}


def test_pins_are_read_by_normalised_names(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("# all\nJinja2==3.1.6\nimportlib_resources==7.1.0  # why\n")
    assert read_pins(tmp_path / "constraints.txt") == {
        "jinja2": SpecifierSet("==3.1.6"),
        "importlib-resources": SpecifierSet("==7.1.0"),
    }


def test_wheels_for_an_older_glibc_run_and_those_for_a_newer_one_do_not() -> None:
    names = platforms(MACHINE)
    assert names[0] == "manylinux_2_35_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(names)


def test_a_wheels_version_is_that_of_its_name() -> None:
    assert version_of(Path("lm_format_enforcer-0.11.3-py3-none-any.whl")) == "0.11.3"
